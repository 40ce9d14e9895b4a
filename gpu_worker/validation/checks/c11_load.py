"""Check 11: PEFT loads it with nothing missing, nothing left over and nothing else changed.

PEFT copies a key that names a base tensor into the base without a word, and one that names another
adapter into that adapter. So the base's parameters are hashed before and after, and a resident
adapter with random values on the same modules stands beside. A base that differs from the proven
one before anything was loaded is a fault of this node; after loading it is the adapter's doing.
"""

from __future__ import annotations

import hashlib
import math
import time
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
    base_name,
    reading,
)
from registry_service.domain.findings import Check, Code, Finding, refuse

_RESIDENT_RANK: Final = 2
# PEFT's random values are large: at full scale they would drown what check 13 compares.
_RESIDENT_SCALING: Final = 1 / 16
_KEYS_SHOWN: Final = 64
# What decides which modules an adapter sits on. PEFT asks that all adapters on one model name the
# same target_parameters. The task type decides which modules PEFT saves and wraps beside LoRA.
_SELECTION: Final = (
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "task_type",
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model with the candidate in it, and how long loading took in seconds."""

    model: PeftModel
    seconds: float


def load_check(
    candidate: Candidate, model: torch.nn.Module, base_digest: str, device: str
) -> tuple[list[Finding], Loaded | None]:
    """Load beside a resident adapter; ``base_digest`` is the proven base's parameters' hash.

    Raises:
        CheckFaultError: a fault of ours, a base that is not the proven one included.
    """
    before = parameters_digest(base_tensors(model))
    if before != base_digest:
        raise CheckFaultError(
            f"{Code.BASE_DIFFERS}: parameters in memory: expected {base_digest}, got {before}"
        )
    findings: list[Finding] = []
    loaded: Loaded | None = None
    with reading(Check.LOAD, "adapter", findings):
        peft_model = _resident_add(candidate, model)
        resident = parameters_digest(adapter_tensors(peft_model, RESIDENT))
        started = time.perf_counter()
        result = peft_model.load_adapter(
            str(candidate.directory), CANDIDATE, is_trainable=False, torch_device=device
        )
        loaded = Loaded(peft_model, time.perf_counter() - started)
        findings += _keys(Code.LOAD_MISSING_KEYS, "no missing key", result.missing_keys)
        findings += _keys(Code.LOAD_UNEXPECTED_KEYS, "no unexpected key", result.unexpected_keys)
        if parameters_digest(adapter_tensors(peft_model, RESIDENT)) != resident:
            expected = "the resident adapter as it was"
            findings.append(
                refuse(Check.LOAD, Code.OTHER_ADAPTER_CHANGED, RESIDENT, expected, "changed values")
            )
    after = parameters_digest(base_tensors(model))
    if after != base_digest:
        findings.append(refuse(Check.LOAD, Code.BASE_CHANGED, "base", base_digest, after))
    return findings, loaded


def base_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The base's parameters and buffers under their own names, with or without adapters around.

    PEFT writes an adapter's name into the name of every tensor of it. All the rest is the base's.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not {CANDIDATE, RESIDENT} & {*name.split(".")}:
            yield base_name(name), tensor


def adapter_tensors(model: PeftModel, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that ``adapter`` keeps resident."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if adapter in name.split("."):
            yield name, tensor


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


def _resident_add(candidate: Candidate, model: torch.nn.Module) -> PeftModel:
    """A small random adapter on the candidate's own modules, where a stray key would hit it."""
    chosen = {
        field: candidate.config[field]
        for field in _SELECTION
        if candidate.config.get(field) is not None
    }
    # PEFT asks that the rank on a grouped convolution be a multiple of its groups.
    groups = (m.groups for m in model.modules() if isinstance(m, torch.nn.Conv2d))
    torch.manual_seed(0)
    rank = math.lcm(_RESIDENT_RANK, *groups)
    config = LoraConfig(
        r=rank, lora_alpha=rank * _RESIDENT_SCALING, init_lora_weights=False, **chosen
    )
    peft_model: Any = get_peft_model(model, config, adapter_name=RESIDENT)
    if not any(True for _ in adapter_tensors(peft_model, RESIDENT)):
        raise CheckFaultError("the resident adapter has no tensors")
    return peft_model.eval()


def _keys(code: Code, expected: str, keys: Iterable[str]) -> list[Finding]:
    names = sorted(keys)
    found = [refuse(Check.LOAD, code, name, expected, name) for name in names[:_KEYS_SHOWN]]
    if len(names) > _KEYS_SHOWN:
        more = f"{len(names) - _KEYS_SHOWN} more"
        found.append(refuse(Check.LOAD, code, "adapter", expected, more))
    return found
