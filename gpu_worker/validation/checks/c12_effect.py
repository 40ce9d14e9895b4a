"""Check 12: adapter on differs from adapter off, and off equals the base exactly."""

from __future__ import annotations

from typing import Any, Final

import torch
from peft import PeftModel

from gpu_worker.validation.checks.candidate import CANDIDATE, Candidate, reading
from registry_service.domain.findings import Check, Code, Finding, refuse

_TOKENS: Final = 32
_STRIDE: Final = 7919
_CHOSEN_TOKENS: Final = 16


def effect_inputs(candidate: Candidate, model: Any) -> torch.Tensor:
    """Fixed tokens, and those that an adapter on an embedding touches most."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    tokens = (torch.arange(_TOKENS) * _STRIDE + 1) % vocabulary
    for name, tensor in sorted(candidate.tensors.items()):
        if name.endswith(".lora_embedding_A") and tensor.dim() == 2:
            weight = tensor.float().norm(dim=0)[:vocabulary]
            tokens = torch.cat([tokens, weight.topk(min(_CHOSEN_TOKENS, len(weight))).indices])
    return tokens.unsqueeze(0).to(next(model.parameters()).device)


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The model's first output over ``tokens``."""
    options: dict[str, Any] = {"input_ids": tokens}
    if getattr(model.config, "is_encoder_decoder", False):
        options["decoder_input_ids"] = tokens
    with torch.inference_mode():
        output = model(**options)
    result: torch.Tensor = output[0].detach().clone()
    return result


def effect_check(
    model: PeftModel, tokens: torch.Tensor, base: torch.Tensor
) -> tuple[list[Finding], dict[str, Any]]:
    """Compare the adapter on and off with ``base``, the output before anything was loaded.

    Raises:
        CheckFaultError: memory ran out.
    """
    findings: list[Finding] = []
    measured: dict[str, Any] = {}
    with reading(Check.EFFECT, "forward", findings):
        model.set_adapter(CANDIDATE)
        on = logits_of(model, tokens)
        with model.disable_adapter():
            off = logits_of(model, tokens)
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
