"""Check 10, its first half: every value in the file is finite. Runs before anything is loaded.

The second half, the spectrum, needs the scaling that PEFT applies and runs after check 11: see
``c10_spectrum``.
"""

from __future__ import annotations

import torch
from safetensors.torch import load

from gpu_worker.validation.checks.candidate import WEIGHT_PATH, Candidate, reading
from registry_service.domain.findings import Check, Code, Finding, refuse


def values_check(candidate: Candidate) -> list[Finding]:
    """Read the tensors from the hashed bytes, and look at every value.

    Raises:
        CheckFaultError: memory ran out.
    """
    findings: list[Finding] = []
    with reading(Check.VALUES, WEIGHT_PATH, findings):
        candidate.tensors = load(candidate.weights)
    for name, tensor in sorted(candidate.tensors.items()):
        findings += _finite(name, tensor)
    return findings


def _finite(name: str, tensor: torch.Tensor) -> list[Finding]:
    if not tensor.is_floating_point():
        return []
    values = tensor.float() if tensor.element_size() == 1 else tensor
    if bool(torch.isfinite(values).all()):
        return []
    nan, infinite = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    got = f"{nan} NaN and {infinite} infinite of {values.numel()}"
    return [refuse(Check.VALUES, Code.VALUE_NOT_FINITE, name, "finite values only", got)]
