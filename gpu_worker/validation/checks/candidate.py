"""What the checks look at, and the line between a finding and a fault of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from registry_service.domain.findings import Check, Code, Finding, refuse

WEIGHT_PATH: Final = "adapter_model.safetensors"
CONFIG_PATH: Final = "adapter_config.json"
DECLARATION_PATH: Final = "adapter-declaration.json"
PREFIX: Final = "base_model.model."
CANDIDATE: Final = "candidate"
RESIDENT: Final = "resident"

_MEMORY_WORDS: Final = ("out of memory", "can't allocate memory", "cannot allocate memory")
# What PEFT puts around a base's module; the base's own name is what is left without them.
_WRAPPERS: Final = frozenset({"base_layer", "original_module", "token_adapter"})


class CheckFaultError(Exception):
    """A fault of ours or of this machine: it says nothing about the adapter."""


@dataclass(frozen=True, slots=True)
class FileFact:
    """One file of the manifest: path, digest, size in bytes."""

    path: str
    digest: str
    size: int


@dataclass(slots=True)
class Candidate:
    """The adapter under validation: its folder, its files as the manifest states them."""

    directory: Path
    files: tuple[FileFact, ...]
    weights: bytes = b""
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def base_name(name: str) -> str:
    """The base's own name of a module or tensor, without PEFT's wrappers around it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@contextmanager
def reading(check: Check, what: str, findings: list[Finding]) -> Iterator[None]:
    """Turn an exception over the adapter's bytes into a finding, and one of ours into a fault.

    A reader that fails on the bytes has found something. Memory and files of this machine have
    nothing to do with them.

    Raises:
        CheckFaultError: memory ran out, or the machine's files cannot be read.
    """
    try:
        yield
    except CheckFaultError:
        raise
    except (MemoryError, OSError, torch.OutOfMemoryError) as error:
        raise CheckFaultError(f"{what}: {type(error).__name__}: {error}") from error
    except Exception as error:
        # Libraries raise what they like on a hostile adapter: a finding, unless memory ran out.
        message = f"{type(error).__name__}: {error}"
        if any(word in message.lower() for word in _MEMORY_WORDS):
            raise CheckFaultError(f"{what}: {message}") from error
        findings.append(refuse(check, Code.LOAD_FAILED, what, "no error", message))
