"""Check 14: the bytes that the adapter keeps resident, measured against those predicted."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel

from gpu_worker.validation.checks.c11_load import adapter_tensors
from gpu_worker.validation.checks.candidate import CANDIDATE, Candidate
from registry_service.domain.findings import Check, Code, Finding, review

_WIDENED = (torch.float16, torch.bfloat16)


def resident_predict(candidate: Candidate) -> int:
    """Bytes that PEFT will hold: it widens 16-bit adapter weights to 32 bits."""
    return sum(
        tensor.numel() * (4 if tensor.dtype in _WIDENED else tensor.element_size())
        for tensor in candidate.tensors.values()
    )


def resident_check(candidate: Candidate, model: PeftModel) -> tuple[list[Finding], dict[str, Any]]:
    """A difference is a person's to look at: it would break the memory plan of a node."""
    predicted = resident_predict(candidate)
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
