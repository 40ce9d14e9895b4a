"""Check 11: PEFT loads it with nothing missing, nothing left over and nothing else changed.

PEFT copies a key that names a base tensor into the base without a word, and one that names another
adapter into that adapter. So the base's parameters are hashed before and after, and a resident
adapter with random values on the same modules stands beside.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from gpu_worker.validation.checks.candidate import (
    CANDIDATE,
    RESIDENT,
    Candidate,
    CheckFaultError,
    reading,
)
from registry_service.domain.findings import Check, Code, Finding, refuse

_RESIDENT_RANK: Final = 2
_KEYS_SHOWN: Final = 64
_ADAPTER_PARTS: Final = ("modules_to_save", "token_adapter")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model with the candidate in it, and how long loading took in seconds."""

    model: PeftModel
    seconds: float


def load_check(
    candidate: Candidate, model: torch.nn.Module, base_digest: str, device: str
) -> tuple[list[Finding], Loaded | None]:
    """Load beside a resident adapter; ``base_digest`` is the base parameters' hash before.

    Raises:
        CheckFaultError: a fault of ours.
    """
    findings: list[Finding] = []
    loaded: Loaded | None = None
    with reading(Check.LOAD, "adapter", findings), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = _resident_add(candidate, model)
        before = parameters_digest(_of_adapter(peft_model, RESIDENT))
        started = time.perf_counter()
        result = peft_model.load_adapter(
            str(candidate.directory), CANDIDATE, is_trainable=False, torch_device=device
        )
        loaded = Loaded(peft_model, time.perf_counter() - started)
        findings += _keys(Code.LOAD_MISSING_KEYS, "no missing key", result.missing_keys)
        findings += _keys(Code.LOAD_UNEXPECTED_KEYS, "no unexpected key", result.unexpected_keys)
        if parameters_digest(_of_adapter(peft_model, RESIDENT)) != before:
            expected = "the resident adapter as it was"
            findings.append(
                refuse(Check.LOAD, Code.OTHER_ADAPTER_CHANGED, RESIDENT, expected, "changed values")
            )
    after = parameters_digest(base_tensors(model))
    if after != base_digest:
        findings.append(refuse(Check.LOAD, Code.BASE_CHANGED, "base", base_digest, after))
    return findings, loaded


def base_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The base's parameters and buffers under their own names, with or without adapters around."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts = name.split(".")
        if any(part in _ADAPTER_PARTS or part.startswith("lora_") for part in parts):
            continue
        kept = [part for part in parts if part not in ("base_layer", "original_module")]
        yield ".".join(kept), tensor


def parameters_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One SHA-256 over names, dtypes, shapes and bytes."""
    state = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        head = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|"
        state.update(len(head).to_bytes(4, "little") + head.encode())
        # As bytes: bfloat16 has no numpy type of its own.
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        state.update(memoryview(flat.view(torch.uint8).numpy()))
    return "sha256:" + state.hexdigest()


def adapter_tensors(model: PeftModel, adapter: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors that ``adapter`` keeps resident."""
    return list(_of_adapter(model, adapter))


def _of_adapter(model: PeftModel, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if adapter in name.split("."):
            yield name, tensor


def _resident_add(candidate: Candidate, model: torch.nn.Module) -> PeftModel:
    """A small random adapter on the candidate's own modules, where a stray key would hit it."""
    chosen = {
        field: candidate.config.get(field)
        for field in ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
        if candidate.config.get(field) is not None
    }
    torch.manual_seed(0)
    config = LoraConfig(r=_RESIDENT_RANK, init_lora_weights=False, **chosen)
    peft_model: Any = get_peft_model(model, config, adapter_name=RESIDENT)
    if not any(True for _ in _of_adapter(peft_model, RESIDENT)):
        raise CheckFaultError("the resident adapter has no tensors")
    return peft_model.eval()


def _keys(code: Code, expected: str, keys: Iterable[str]) -> list[Finding]:
    names = sorted(keys)
    found = [refuse(Check.LOAD, code, name, expected, name) for name in names[:_KEYS_SHOWN]]
    if len(names) > _KEYS_SHOWN:
        more = f"{len(names) - _KEYS_SHOWN} more"
        found.append(refuse(Check.LOAD, code, "adapter", expected, more))
    return found
