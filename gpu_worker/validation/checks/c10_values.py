"""Check 10: every value is finite, and the spectrum of each update is looked at.

The update of a module is s·B·A. With the thin factors B = Q1·R1 and Aᵀ = Q2·R2 its singular values
are exactly those of the small matrix s·R1·R2ᵀ, so nothing of the module's size is ever built.
What stands out asks for a person's look. It proves nothing, and neither does its absence.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from safetensors.torch import load

from gpu_worker.validation.checks.candidate import PREFIX, WEIGHT_PATH, Candidate, reading
from registry_service.domain.findings import Check, Code, Finding, refuse, review

RELATIVE_NORM_REVIEW: Final = 1.0
"""‖update‖ over ‖base weight‖ (Frobenius) from which a module is an anomaly."""
RELATIVE_NORM_OUTLIER: Final = 25.0
"""A module's relative norm over the median of all modules from which it is an anomaly."""
OUTLIER_MODULES: Final = 8
"""The median means something from this many modules on."""
SIGMA1_SHARE_REVIEW: Final = 0.9999
"""σ1² over the sum of σ² from which an update of some rank is an anomaly: it has rank one."""
SIGMA1_SHARE_RANK: Final = 4
"""The share says something from this rank on."""
DOUBLE_RANK: Final = 64
"""Up to this rank the factors are computed in double precision."""
REVIEW_FINDINGS: Final = 32
MODULES_MEASURED: Final = 512

_PAIRS: Final = (
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_embedding_A", ".lora_embedding_B"),
)


@dataclass(frozen=True, slots=True)
class Spectrum:
    """One module's update: σ1, Frobenius norm, the norm over the base weight's, rank, σ1 share."""

    module: str
    sigma1: float
    norm: float
    relative: float
    rank: int
    share: float


def values_check(
    candidate: Candidate, model: torch.nn.Module
) -> tuple[list[Finding], dict[str, Any]]:
    """Findings and the spectrum per module; reads the tensors from the hashed bytes.

    Raises:
        CheckFaultError: memory ran out.
    """
    findings: list[Finding] = []
    with reading(Check.VALUES, WEIGHT_PATH, findings):
        candidate.tensors = load(candidate.weights)
    for name, tensor in sorted(candidate.tensors.items()):
        findings += _finite(name, tensor)
    if findings:
        return findings, {}
    spectra: list[Spectrum] = []
    with reading(Check.VALUES, WEIGHT_PATH, findings):
        spectra = list(_spectra(candidate, model))
    return findings + _anomalies(spectra), _measured(spectra)


def _finite(name: str, tensor: torch.Tensor) -> list[Finding]:
    if not tensor.is_floating_point():
        return []
    values = tensor.float() if tensor.element_size() == 1 else tensor
    if bool(torch.isfinite(values).all()):
        return []
    nan, infinite = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    got = f"{nan} NaN and {infinite} infinite of {values.numel()}"
    return [refuse(Check.VALUES, Code.VALUE_NOT_FINITE, name, "finite values only", got)]


def _spectra(candidate: Candidate, model: torch.nn.Module) -> Iterator[Spectrum]:
    modules = dict(model.named_modules())
    for name, down in sorted(candidate.tensors.items()):
        for suffix_a, suffix_b in _PAIRS:
            up = candidate.tensors.get(name.removesuffix(suffix_a) + suffix_b)
            if not name.endswith(suffix_a) or up is None or down.dim() != 2 or up.dim() != 2:
                continue
            module = name.removesuffix(suffix_a).removeprefix(PREFIX)
            weight = getattr(modules.get(module), "weight", None)
            scaling = scaling_of(candidate.config, module, down.shape[0])
            yield _spectrum(module, scaling, down, up, weight)


def _spectrum(
    module: str, scaling: float, down: torch.Tensor, up: torch.Tensor, weight: Any
) -> Spectrum:
    rank = down.shape[0]
    dtype = torch.float64 if rank <= DOUBLE_RANK else torch.float32
    left = torch.linalg.qr(up.to(dtype), mode="r").R
    right = torch.linalg.qr(down.to(dtype).T, mode="r").R
    sigma = abs(scaling) * torch.linalg.svdvals(left @ right.T)
    sigma1, norm = float(sigma.max()), float(torch.linalg.vector_norm(sigma))
    relative = math.inf
    if isinstance(weight, torch.Tensor):
        base = float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float32))
        relative = norm / base if base > 0 else (math.inf if norm > 0 else 0.0)
    share = (sigma1 / norm) ** 2 if norm > 0 else 0.0
    return Spectrum(module, sigma1, norm, relative, rank, share)


def scaling_of(config: dict[str, Any], module: str, rank: int) -> float:
    """alpha/r, or alpha/√r with rslora, with the module's own alpha where a pattern names it."""
    alpha = config.get("lora_alpha", rank)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        # The static check admits plain names only: nothing here may run as an expression.
        if re.fullmatch(rf"(.*\.)?{re.escape(str(pattern).lstrip('^'))}", module):
            alpha = value
            break
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _anomalies(spectra: list[Spectrum]) -> list[Finding]:
    known = [s.relative for s in spectra if math.isfinite(s.relative)]
    median = statistics.median(known) if len(known) >= OUTLIER_MODULES else 0.0
    found: list[tuple[float, Finding]] = []
    for s in spectra:
        for limit, got in _reasons(s, median):
            finding = review(Check.VALUES, Code.SPECTRUM, s.module, limit, got)
            found.append((s.relative, finding))
    found.sort(key=lambda pair: -pair[0])
    kept = [finding for _, finding in found[:REVIEW_FINDINGS]]
    if len(found) > len(kept):
        more = f"anomaly, needs review: {len(found) - len(kept)} more of this kind"
        kept.append(review(Check.VALUES, Code.SPECTRUM, "adapter", "no anomaly", more))
    return kept


def _reasons(s: Spectrum, median: float) -> Iterator[tuple[str, str]]:
    if s.relative > RELATIVE_NORM_REVIEW:
        yield (
            f"norm at most {RELATIVE_NORM_REVIEW:g} of the base weight's",
            f"anomaly, needs review: {s.relative:.4g} of the base weight's",
        )
    elif median > 0 and s.relative > RELATIVE_NORM_OUTLIER * median:
        yield (
            f"relative norm at most {RELATIVE_NORM_OUTLIER:g} times the median {median:.4g}",
            f"anomaly, needs review: relative norm {s.relative:.4g}",
        )
    if s.rank >= SIGMA1_SHARE_RANK and s.share > SIGMA1_SHARE_REVIEW:
        yield (
            f"at most {SIGMA1_SHARE_REVIEW:g} of the energy in one direction",
            f"anomaly, needs review: {s.share:.6f} of it, at rank {s.rank}",
        )


def _measured(spectra: list[Spectrum]) -> dict[str, Any]:
    worst = sorted(spectra, key=lambda s: -s.relative)[:MODULES_MEASURED]
    return {
        "modules": len(spectra),
        "perModule": {
            s.module: {"sigma1": s.sigma1, "norm": s.norm, "relativeNorm": s.relative}
            for s in worst
        },
    }
