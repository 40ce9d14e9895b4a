"""Check 14: the bytes that the adapter keeps resident, measured against those predicted."""

from __future__ import annotations

from typing import Any, Final

import torch
from peft import PeftModel

from gpu_worker.validation.checks.c11_load import adapter_tensors
from gpu_worker.validation.checks.candidate import CANDIDATE, Candidate, base_name
from registry_service.domain.findings import Check, Code, Finding, review

_WIDENED: Final = (torch.float16, torch.bfloat16)
_COPY: Final = ".base_layer.weight"
_TRAINED_ROWS: Final = ".trainable_tokens_delta"


def resident_predict(candidate: Candidate, model: PeftModel) -> int:
    """Bytes that PEFT will hold for the tensors of the file.

    It widens 16-bit adapter weights to 32 bits, keeps the rows of trained tokens twice (as trained
    and as they were), saved modules in the base's dtype, and of a copied embedding nothing.
    """
    # With every name of a shared tensor: a saved head may be tied in the base.
    named = model.named_parameters(remove_duplicate=False)
    held = {base_name(name): tensor.element_size() for name, tensor in named}
    total = 0
    for name, tensor in candidate.tensors.items():
        if name.endswith(_COPY):
            continue
        size = 4 if tensor.dtype in _WIDENED else tensor.element_size()
        size = held.get(name, size)
        total += tensor.numel() * size * (2 if name.endswith(_TRAINED_ROWS) else 1)
    return total


def resident_check(candidate: Candidate, model: PeftModel) -> tuple[list[Finding], dict[str, Any]]:
    """A difference is a person's to look at: it would break the memory plan of a node."""
    predicted = resident_predict(candidate, model)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for _, tensor in adapter_tensors(model, CANDIDATE)
    }
    measured = sum(storages.values())
    findings = []
    if measured != predicted:
        findings.append(
            review(
                Check.RESIDENT_BYTES,
                Code.RESIDENT_BYTES,
                "adapter",
                f"{predicted} bytes resident",
                f"{measured} bytes",
            )
        )
    return findings, {"measured": measured, "predicted": predicted}
