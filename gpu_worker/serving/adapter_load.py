"""From an adapter's files to tensors: read once, hashed, checked exactly, from one buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_worker.serving.adapter import Adapter, LoraError, adapter_of
from gpu_worker.serving.sealed import Sealed, sealed_read
from registry_service.domain.base_model import chat_template_digest, chat_template_of
from registry_service.domain.catalog import Catalog
from registry_service.domain.declaration import Declaration, declaration_parse
from registry_service.domain.digests import Digest, digest_equal
from registry_service.domain.errors import RefusedError, UntrustedError
from registry_service.domain.expected_tensors import ExpectedTensors, expected_tensors
from registry_service.domain.expressions import matches_of
from registry_service.domain.file_set import TEMPLATE_PATHS
from registry_service.domain.findings import Finding, Severity
from registry_service.domain.manifest import CONFIG_PATH, DECLARATION_PATH, WEIGHT_PATH
from registry_service.domain.peft_config import peft_config_parse
from registry_service.domain.safetensors_header import HEADER_PREFIX_BYTES, Header, header_parse
from registry_service.domain.structure import structure_check
from registry_service.domain.tensor_content import content_digest
from registry_service.matching import expressions_match


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """What this node's base is; ``name`` is the registry's for it."""

    digest: Digest
    tokenizer_digest: Digest
    chat_template_digest: Digest
    catalog: Catalog
    name: str

    @property
    def catalog_digest(self) -> Digest:
        """The digest of the catalog that this node made."""
        return self.catalog.digest


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter on the CPU, what it declares, and how many modules it must be applied to.

    ``chat_template`` is its own; None where it declares its base's.

    The tensors are views of the sealed weights. The rank is the largest of its modules. The content
    digest is that of its tensors, however they are packed.
    """

    adapter: Adapter
    declaration: Declaration
    modules: int
    rank: int
    content_digest: Digest
    chat_template: str | None


def files_read(folder: Path, files: tuple[tuple[str, Digest], ...]) -> dict[str, Sealed]:
    """Exactly these files, each read once, sealed, and hashed from the buffer that is returned.

    Raises:
        UntrustedError: other names, a link, or other bytes.
    """
    try:
        names = sorted(entry.name for entry in folder.iterdir())
        if names != sorted(path for path, _ in files):
            raise UntrustedError("pulled files: expected exactly those of the verdict")
        contents = {path: sealed_read(folder / path) for path, _ in files}
    except OSError as error:
        raise UntrustedError(f"pulled files: cannot be read: {error.strerror}") from error
    for path, digest in files:
        if not digest_equal(contents[path].digest(), digest):
            raise UntrustedError(f"pulled files: {path}: expected {digest}, got other bytes")
    return contents


def adapter_read(files: Mapping[str, Sealed], base: BaseIdentity) -> ReadAdapter:
    """The tensors of verified files, if they are exactly what config and catalog say.

    Raises:
        RefusedError: with the findings, or because this node's engine has no place for a tensor.
        MalformedError: a declaration that cannot be read, or a regular expression that is refused.
        UnavailableError: this machine had no room or time to match its regular expressions.
    """
    declaration = declaration_parse(bytes(files[DECLARATION_PATH].view))
    if not digest_equal(declaration.base_model_digest, base.digest):
        raise RefusedError("declaration: another base")
    if not digest_equal(declaration.tokenizer_digest, base.tokenizer_digest):
        # Prompts are encoded with the base's tokenizer, which this adapter was not trained with.
        raise RefusedError("declaration: another tokenizer than the base's is not served yet")
    expected, header = _expected(files, base.catalog)
    weights = files[WEIGHT_PATH]
    tensors = {info.name: weights.tensor(info, header.data_start) for info in header.tensors}
    try:
        adapter = adapter_of(tensors, expected.scaling)
    except LoraError as error:
        raise RefusedError(f"adapter: does not load: {error}") from error
    return ReadAdapter(
        adapter,
        declaration,
        modules=len(adapter.parts),
        rank=max((part.a.shape[0] for part in adapter.parts.values()), default=0),
        content_digest=content_digest(header, weights.view),
        chat_template=_own_template(files, declaration, base),
    )


def _own_template(
    files: Mapping[str, Sealed], declaration: Declaration, base: BaseIdentity
) -> str | None:
    """The template that an adapter brings, if it is the one that it declares."""
    if digest_equal(declaration.chat_template_digest, base.chat_template_digest):
        return None
    brought = {path: bytes(files[path].view) for path in TEMPLATE_PATHS if path in files}
    template = chat_template_of(brought)
    got = chat_template_digest(template)
    if not digest_equal(declaration.chat_template_digest, got):
        raise RefusedError(
            f"declaration: chatTemplateDigest: expected {got}, "
            f"got {declaration.chat_template_digest}"
        )
    return template


def _expected(files: Mapping[str, Sealed], catalog: Catalog) -> tuple[ExpectedTensors, Header]:
    weights = files[WEIGHT_PATH]
    config, findings = peft_config_parse(bytes(files[CONFIG_PATH].view))
    _findings_check(findings)
    header, findings = header_parse(bytes(weights.view[:HEADER_PREFIX_BYTES]), len(weights))
    _findings_check(findings)
    if config is None or header is None:
        raise RefusedError("adapter: config or weights cannot be read")
    matches = matches_of(catalog, config, expressions_match)
    expected = expected_tensors(catalog, config, matches)
    _findings_check(structure_check(header, expected, catalog))
    return expected, header


def _findings_check(findings: tuple[Finding, ...]) -> None:
    refusals = tuple(f for f in findings if f.severity is Severity.REFUSE)
    if refusals:
        first = refusals[0]
        raise RefusedError(
            f"adapter: {first.where}: expected {first.expected}, got {first.got}",
            findings=refusals,
        )
