"""A training output folder: which files make the artifact, and why the others do not."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from registry_service.client import PublishFile
from registry_service.domain import limits
from registry_service.domain.declaration import Declaration
from registry_service.domain.digests import Digest, digest_equal
from registry_service.domain.errors import MalformedError, RefusedError
from registry_service.domain.manifest import (
    ADAPTER_PATHS,
    CONFIG_PATH,
    DECLARATION_PATH,
    TOKENIZER_PATHS,
    WEIGHT_PATH,
)
from registry_service.domain.peft_config import peft_config_parse
from registry_service.domain.verification import WHOLE_PATHS, OwnFacts, own_facts

_SAME_AS_BASE: Final = "the base's own tokenizer, which the adapter uses anyway"
_REASONS: Final = (
    (("checkpoint-",), "a training checkpoint"),
    (("optimizer", "scheduler", "rng_state", "scaler"), "the trainer's state, not the adapter's"),
    (("trainer_state", "training_args", "all_results", "train_results"), "the trainer's notes"),
    (("adapter_model.bin", "pytorch_model"), "a pickle, which is never taken; save safetensors"),
    (("events.out", "runs", "logs"), "training logs"),
    (("model", "config.json", "generation_config"), "the base's file, not the adapter's"),
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The files to publish, those left out with the reason, and what the adapter brings along."""

    files: dict[str, Path]
    left_out: tuple[tuple[str, str], ...]
    own: OwnFacts


@dataclass(frozen=True, slots=True)
class Statement:
    """What the publisher states besides what the config says."""

    tenant: str
    adapter: str
    training_data_version: str
    base_quantization: str
    max_replicas: int


def files_choose(folder: Path, base: dict[str, Any]) -> Chosen:
    """Pick an adapter's files from a folder, given the base's facts from the service.

    Raises:
        MalformedError: no folder, or without weights or config.
    """
    if not folder.is_dir():
        raise MalformedError(f"{folder}: expected a training output folder")
    files, left_out = {}, []
    for entry in sorted(folder.iterdir()):
        reason = _reason(entry)
        if reason is None:
            files[entry.name] = entry
        else:
            left_out.append((entry.name, reason))
    own = _own(files)
    if _is_bases_tokenizer(own, base):
        same = sorted(files.keys() & TOKENIZER_PATHS)
        left_out += [(path, _SAME_AS_BASE) for path in same]
        files = {path: entry for path, entry in files.items() if path not in TOKENIZER_PATHS}
        own = _own(files)
    for path in (WEIGHT_PATH, CONFIG_PATH):
        if path not in files:
            raise MalformedError(
                f"{folder}: expected {path}, got none; save the adapter with "
                "peft's save_pretrained(…, safe_serialization=True)"
            )
    return Chosen(files, tuple(sorted(left_out)), own)


def declaration_build(chosen: Chosen, base: dict[str, Any], statement: Statement) -> Declaration:
    """The declaration of the chosen files.

    Raises:
        RefusedError: an adapter config that the registry would refuse, with the findings.
        MalformedError: an option in another form.
    """
    config, findings = peft_config_parse(chosen.files[CONFIG_PATH].read_bytes())
    if config is None:
        raise RefusedError(f"{CONFIG_PATH}: the registry would refuse it", findings=findings)
    own = chosen.own
    try:
        return Declaration(
            tenant=statement.tenant,
            adapter=statement.adapter,
            base_model_digest=base["baseModelDigest"],
            peft_type=config.peft_type,
            rank=config.r,
            alpha=config.lora_alpha,
            target_modules=config.declared_targets or (),
            tokenizer_digest=own.tokenizer_digest or base["tokenizerDigest"],
            chat_template_digest=own.chat_template_digest or base["chatTemplateDigest"],
            training_data_version=statement.training_data_version,
            evaluation_report_digest=own.evaluation_report_digest,
            base_quantization=statement.base_quantization,
            max_replicas=statement.max_replicas,
        )
    except ValueError as error:
        raise MalformedError(f"declaration: {error}") from error


def publish_files(chosen: Chosen, declaration: Declaration) -> list[PublishFile]:
    """The files to push, the declaration among them."""
    files = [PublishFile(path, entry) for path, entry in chosen.files.items()]
    return [*files, PublishFile(DECLARATION_PATH, declaration.to_bytes())]


def _reason(entry: Path) -> str | None:
    """Why an entry of the folder is left out, or None when it belongs to the adapter."""
    name = entry.name
    if entry.is_symlink():
        return "a link"
    if name == DECLARATION_PATH:
        return "made anew from this command's options"
    if entry.is_file() and name in ADAPTER_PATHS:
        return None
    for beginnings, reason in _REASONS:
        if name.startswith(beginnings):
            return reason
    return "a folder" if entry.is_dir() else "not a file of an adapter"


def _own(files: dict[str, Path]) -> OwnFacts:
    known = {path: entry for path, entry in files.items() if path != WEIGHT_PATH}
    templates = {
        path: entry.read_bytes()[: limits.DOC_BYTES + 1]
        for path, entry in known.items()
        if path in WHOLE_PATHS
    }
    facts = own_facts({path: _digest(entry) for path, entry in known.items()}, templates)
    if facts.template_fault is not None:
        raise MalformedError(facts.template_fault)
    return facts


def _is_bases_tokenizer(own: OwnFacts, base: dict[str, Any]) -> bool:
    if own.tokenizer_digest is None:
        return False
    template = own.chat_template_digest or base["chatTemplateDigest"]
    return digest_equal(own.tokenizer_digest, base["tokenizerDigest"]) and digest_equal(
        template, base["chatTemplateDigest"]
    )


def _digest(path: Path) -> Digest:
    with path.open("rb") as file:
        return Digest("sha256:" + hashlib.file_digest(file, "sha256").hexdigest())
