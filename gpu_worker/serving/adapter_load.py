"""From an adapter's files to tensors: read once, hashed, checked exactly, from one buffer."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import safetensors.torch
import torch

from gpu_worker.serving.lora import Adapter, Part
from registry_service.domain import limits
from registry_service.domain.catalog import Catalog
from registry_service.domain.declaration import Declaration, declaration_parse
from registry_service.domain.digests import Digest, digest_equal, digest_of
from registry_service.domain.errors import RefusedError, UntrustedError
from registry_service.domain.expected_tensors import KEY_PREFIX, ExpectedTensors, expected_tensors
from registry_service.domain.expressions import matches_of
from registry_service.domain.findings import Finding, Severity
from registry_service.domain.manifest import CONFIG_PATH, DECLARATION_PATH, WEIGHT_PATH
from registry_service.domain.peft_config import peft_config_parse
from registry_service.domain.safetensors_header import HEADER_PREFIX_BYTES, header_parse
from registry_service.domain.structure import structure_check
from registry_service.domain.text import bounded
from registry_service.matching import expressions_match

_A: Final = ("lora_A.weight", "lora_embedding_A")
_B: Final = ("lora_B.weight", "lora_embedding_B")
_MAGNITUDE: Final = "lora_magnitude_vector"


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """What this node's base is."""

    digest: Digest
    tokenizer_digest: Digest
    chat_template_digest: Digest
    catalog: Catalog

    @property
    def catalog_digest(self) -> Digest:
        """The digest of the catalog that this node made."""
        return self.catalog.digest


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter on the CPU, with what it declares and how many modules it must be applied to."""

    adapter: Adapter
    declaration: Declaration
    modules: int


def files_read(folder: Path, files: tuple[tuple[str, Digest], ...]) -> dict[str, bytes]:
    """Exactly these files, each read once and hashed from the buffer that is returned.

    Raises:
        UntrustedError: other names, a link, or other bytes.
    """
    try:
        names = sorted(entry.name for entry in folder.iterdir())
        if names != sorted(path for path, _ in files):
            raise UntrustedError("pulled files: expected exactly those of the verdict")
        contents = {path: _file_read(folder / path) for path, _ in files}
    except OSError as error:
        raise UntrustedError(f"pulled files: cannot be read: {error.strerror}") from error
    for path, digest in files:
        if not digest_equal(digest_of(contents[path]), digest):
            raise UntrustedError(f"pulled files: {path}: expected {digest}, got other bytes")
    return contents


def adapter_read(files: Mapping[str, bytes], base: BaseIdentity) -> ReadAdapter:
    """The tensors of verified files, if they are exactly what config and catalog say.

    Raises:
        RefusedError: with the findings, or because this node's engine has no place for a tensor.
        MalformedError: a declaration that cannot be read, or a regular expression that is refused.
        UnavailableError: this machine had no room or time to match its regular expressions.
    """
    declaration = declaration_parse(files[DECLARATION_PATH])
    if not digest_equal(declaration.base_model_digest, base.digest):
        raise RefusedError("declaration: another base")
    if not digest_equal(declaration.tokenizer_digest, base.tokenizer_digest):
        # Prompts are encoded with the base's tokenizer, which this adapter was not trained with.
        raise RefusedError("declaration: another tokenizer than the base's is not served yet")
    expected = _expected(files, base.catalog)
    tensors = safetensors.torch.load(files[WEIGHT_PATH])
    parts = {
        module: _part_take(tensors, module, scaling) for module, scaling in expected.scaling.items()
    }
    if tensors:
        # Leaving one out would run another adapter than the one that was admitted.
        left = bounded(min(tensors))
        raise RefusedError(f"adapter: {left} is not served by this node's engine")
    return ReadAdapter(Adapter(parts), declaration, len(expected.scaling))


def _part_take(tensors: dict[str, torch.Tensor], module: str, scaling: float) -> Part:
    """The tensors of one module, taken out of ``tensors``."""
    own = {
        suffix: tensors.pop(name)
        for suffix in (*_A, *_B, _MAGNITUDE)
        if (name := f"{KEY_PREFIX}{module}.{suffix}") in tensors
    }
    a = next((own[suffix] for suffix in _A if suffix in own), None)
    b = next((own[suffix] for suffix in _B if suffix in own), None)
    if a is None or b is None:
        raise RefusedError(f"adapter: {bounded(module)} is not served by this node's engine")
    return Part(a, b, scaling, own.get(_MAGNITUDE))


def _expected(files: Mapping[str, bytes], catalog: Catalog) -> ExpectedTensors:
    weights = files[WEIGHT_PATH]
    config, findings = peft_config_parse(files[CONFIG_PATH])
    _findings_check(findings)
    header, findings = header_parse(weights[:HEADER_PREFIX_BYTES], len(weights))
    _findings_check(findings)
    if config is None or header is None:
        raise RefusedError("adapter: config or weights cannot be read")
    matches = matches_of(catalog, config, expressions_match)
    expected = expected_tensors(catalog, config, matches)
    _findings_check(structure_check(header, expected, catalog))
    return expected


def _findings_check(findings: tuple[Finding, ...]) -> None:
    refusals = tuple(f for f in findings if f.severity is Severity.REFUSE)
    if refusals:
        first = refusals[0]
        raise RefusedError(
            f"adapter: {first.where}: expected {first.expected}, got {first.got}",
            findings=refusals,
        )


def _file_read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limits.WEIGHT_BYTES:
            raise UntrustedError(f"pulled files: {path.name}: not a plain file of allowed size")
        return file.read()
