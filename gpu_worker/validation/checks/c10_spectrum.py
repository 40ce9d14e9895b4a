"""Check 10, its second half: the spectrum and norm of what the adapter does to each module.

Runs after check 11 on the loaded model, so that scaling, factors and base weight are those which
PEFT uses. A LoRA's update is s·B·A: with the thin factors B = Q1·R1 and Aᵀ = Q2·R2 its singular
values are exactly those of the small matrix s·R1·R2ᵀ, so nothing of the module's size is built.
What stands out is an anomaly and asks for a person's look. It proves nothing, and neither does its
absence: an adapter made with these numbers in mind stays below every one of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any, Final

from peft import PeftModel

from gpu_worker.validation.checks.candidate import WEIGHT_PATH, Candidate, reading
from gpu_worker.validation.checks.change import Change, changes
from registry_service.domain.findings import Check, Code, Finding, review
from registry_service.domain.report import name_pattern

RELATIVE_NORM_REVIEW: Final = 1.0
"""‖change‖ over ‖base weight‖ (Frobenius) from which a module is an anomaly."""
RELATIVE_NORM_OUTLIER: Final = 25.0
"""A module's relative norm over the median of all modules from which it is an anomaly."""
OUTLIER_MODULES: Final = 8
"""The median means something from this many modules on."""
SIGMA1_SHARE_REVIEW: Final = 0.9999
"""σ1² over the sum of σ² from which an update of some rank is an anomaly: it has rank one."""
SIGMA1_SHARE_RANK: Final = 4
"""The share says something from this rank on."""
MAGNITUDE_REVIEW: Final = 2.0
"""A DoRA magnitude over the base's column norm, or one over it, from which it is an anomaly."""
REVIEW_FINDINGS: Final = 32
MODULES_MEASURED: Final = 512
PATTERNS_MEASURED: Final = 512


def spectrum_check(candidate: Candidate, model: PeftModel) -> tuple[list[Finding], dict[str, Any]]:
    """Anomalies, and the numbers by module; ``model`` holds the candidate.

    Raises:
        CheckFaultError: memory ran out.
    """
    findings: list[Finding] = []
    found: list[Change] = []
    with reading(Check.VALUES, WEIGHT_PATH, findings):
        found = list(changes(model))
    return findings + _anomalies(found), _measured(found)


def _anomalies(found: list[Change]) -> list[Finding]:
    known = [c.relative for c in found if math.isfinite(c.relative)]
    median = statistics.median(known) if len(known) >= OUTLIER_MODULES else 0.0
    reasons = [
        (change.relative, review(Check.VALUES, Code.SPECTRUM, change.module, limit, got))
        for change in found
        for limit, got in _reasons(change, median)
    ]
    reasons.sort(key=lambda pair: -pair[0])
    kept = [finding for _, finding in reasons[:REVIEW_FINDINGS]]
    if len(reasons) > len(kept):
        more = f"anomaly, needs review: {len(reasons) - len(kept)} more of this kind"
        kept.append(review(Check.VALUES, Code.SPECTRUM, "adapter", "no anomaly", more))
    return kept


def _reasons(change: Change, median: float) -> Iterator[tuple[str, str]]:
    if change.relative > RELATIVE_NORM_REVIEW:
        yield (
            f"norm at most {RELATIVE_NORM_REVIEW:g} of the base weight's",
            f"anomaly, needs review: {change.relative:.4g} of the base weight's",
        )
    elif median > 0 and change.relative > RELATIVE_NORM_OUTLIER * median:
        yield (
            f"relative norm at most {RELATIVE_NORM_OUTLIER:g} times the median {median:.4g}",
            f"anomaly, needs review: relative norm {change.relative:.4g}",
        )
    energy = change.energy
    if energy and energy.rank >= SIGMA1_SHARE_RANK and energy.share > SIGMA1_SHARE_REVIEW:
        yield (
            f"at most {SIGMA1_SHARE_REVIEW:g} of the energy in one direction",
            f"anomaly, needs review: {energy.share:.6f} of it, at rank {energy.rank}",
        )
    if change.magnitude is not None:
        low, high = change.magnitude
        if low < 1 / MAGNITUDE_REVIEW or high > MAGNITUDE_REVIEW:
            yield (
                f"magnitudes from {1 / MAGNITUDE_REVIEW:g} to {MAGNITUDE_REVIEW:g} "
                "of the base's column norms",
                f"anomaly, needs review: from {low:.4g} to {high:.4g}",
            )


def _measured(found: list[Change]) -> dict[str, Any]:
    worst = sorted(found, key=lambda change: -change.relative)[:MODULES_MEASURED]
    return {
        "modules": len(found),
        "perModule": {change.module: _numbers(change) for change in worst},
        "norms": _norms(found),
    }


def _numbers(change: Change) -> dict[str, Any]:
    numbers: dict[str, Any] = {"norm": change.norm, "relativeNorm": change.relative}
    if change.energy is not None:
        numbers["scaling"] = change.energy.scaling
        numbers["sigma1"] = change.energy.sigma1
        numbers["energyShare"] = change.energy.share
        numbers["entropy"] = change.energy.entropy
    if change.magnitude is not None:
        numbers["magnitudeRatio"] = list(change.magnitude)
    return numbers


def _norms(found: list[Change]) -> dict[str, dict[str, Any]]:
    """The norm of all modules of one place in a layer together, the largest first."""
    squares: dict[str, list[float]] = {}
    for change in found:
        squares.setdefault(name_pattern(change.module), []).append(change.norm**2)
    groups = [(pattern, len(s), math.sqrt(sum(s))) for pattern, s in squares.items()]
    groups.sort(key=lambda group: -group[2])
    return {p: {"modules": n, "norm": norm} for p, n, norm in groups[:PATTERNS_MEASURED]}
