"""Check 12: adapter on differs from adapter off, and off equals the base exactly."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel

from gpu_worker.validation.checks.candidate import CANDIDATE, reading
from gpu_worker.validation.checks.inputs import Inputs, logits_of
from registry_service.domain.findings import Check, Code, Finding, refuse


def effect_check(
    model: PeftModel, inputs: Inputs, base: torch.Tensor
) -> tuple[list[Finding], dict[str, Any]]:
    """Compare the adapter on and off with ``base``, the output before anything was loaded.

    Raises:
        CheckFaultError: memory ran out.
    """
    findings: list[Finding] = []
    measured: dict[str, Any] = {}
    with reading(Check.EFFECT, "forward", findings):
        model.set_adapter(CANDIDATE)
        on = logits_of(model, inputs)
        with model.disable_adapter():
            off = logits_of(model, inputs)
        measured = {"maxDifference": float((on.double() - off.double()).abs().max())}
        findings += _compare(on, off, base)
    return findings, measured


def _compare(on: torch.Tensor, off: torch.Tensor, base: torch.Tensor) -> list[Finding]:
    findings: list[Finding] = []
    if not bool(torch.isfinite(on).all()):
        bad = int((~torch.isfinite(on)).sum())
        got = f"{bad} values that are not finite of {on.numel()}"
        findings.append(
            refuse(Check.EFFECT, Code.VALUE_NOT_FINITE, "output", "finite outputs only", got)
        )
    if not torch.equal(off, base):
        got = f"{int((off != base).sum())} of {base.numel()} outputs differ"
        findings.append(
            refuse(Check.EFFECT, Code.OFF_DIFFERS, "adapter off", "exactly the base's", got)
        )
    if torch.equal(on, off):
        got = f"no output of {on.numel()} differs, at the base's precision"
        findings.append(
            refuse(Check.EFFECT, Code.NO_EFFECT, "adapter on", "outputs unlike the base's", got)
        )
    return findings
