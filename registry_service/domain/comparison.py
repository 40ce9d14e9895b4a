"""How an artifact differs from the version that an alias points to now, from their reports alone.

A reviewer decides with it: a new version of an adapter usually changes the same modules by about
as much as the one before. What a report does not say is told as not measured, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from registry_service.domain import limits
from registry_service.domain.findings import Check, Code, Finding, review
from registry_service.domain.report import ModuleGroup

MODULES: Final = "modules"
_SPECTRUM: Final = "spectrum"
_NORMS: Final = "norms"


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """What is kept of a version. ``groups`` is None where its scan has not kept them.

    ``norms`` gives, by pattern, of how many modules the norm of the change was measured, and the
    norm of all of them together (Frobenius).
    """

    rank: int
    alpha: float
    groups: tuple[ModuleGroup, ...] | None
    norms: Mapping[str, tuple[int, float]]


@dataclass(frozen=True, slots=True)
class ModuleState:
    """Modules of one pattern in one version; ``rank`` and ``scaling`` are None without LoRA."""

    count: int
    rank: int | None
    scaling: float | None


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """One pattern of modules, before and now; norms are None where they were not measured."""

    pattern: str
    change: Literal["added", "removed", "changed", "same"]
    before: tuple[ModuleState, ...]
    now: tuple[ModuleState, ...]
    norm_before: float | None
    norm_now: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rank and alpha of the configs, and the modules; None where one of the scans lacks them."""

    rank_before: int
    rank_now: int
    alpha_before: float
    alpha_now: float
    modules: tuple[ModuleChange, ...] | None


def versions_compare(before: VersionFacts, now: VersionFacts) -> Comparison:
    """``now`` held against ``before``; added and removed modules first, then by pattern."""
    modules = None
    if before.groups is not None and now.groups is not None:
        old, new = _states(before.groups), _states(now.groups)
        changes = [_change(pattern, before, now, old, new) for pattern in {*old, *new}]
        order = ("added", "removed", "changed", "same")
        modules = tuple(sorted(changes, key=lambda c: (order.index(c.change), c.pattern)))
    return Comparison(before.rank, now.rank, before.alpha, now.alpha, modules)


def change_check(alias: str, before: VersionFacts, now: VersionFacts) -> tuple[Finding, ...]:
    """A look at modules whose scaling is far from that of the version that ``alias`` points to.

    The factor stands in no tensor: ten times the alpha changes nothing else in the file.
    """
    far = [
        (change.pattern, old, new)
        for change in versions_compare(before, now).modules or ()
        for old, new in [(_largest(change.before), _largest(change.now))]
        if old and new and not 1 / limits.SCALING_CHANGE < new / old < limits.SCALING_CHANGE
    ]
    if not far:
        return ()
    pattern, old, new = max(far, key=lambda item: abs(math.log(item[2] / item[1])))
    where = pattern if len(far) == 1 else f"{pattern} and {len(far) - 1} more"
    expected = f"a factor of B·A near the {old:g} of the version that '{alias}' points to"
    return (review(Check.STRUCTURE, Code.SCALING_CHANGED, where, expected, f"{new:g}"),)


def _largest(states: tuple[ModuleState, ...]) -> float | None:
    return max((s.scaling for s in states if s.scaling is not None), default=None)


def measured_modules(groups: tuple[ModuleGroup, ...]) -> dict[str, Any]:
    """A scan's measurements about modules; a count alone where there are too many to keep."""
    if len(groups) > limits.REPORT_MODULE_GROUPS:
        return {"moduleGroups": len(groups)}
    return {MODULES: [asdict(group) for group in groups]}


def version_facts(
    declaration: Mapping[str, Any],
    scan: Mapping[str, Any] | None,
    validation: Mapping[str, Any] | None,
) -> VersionFacts:
    """The facts in a declaration and the measurements of the last scan and validation.

    A validation's measurements are a worker's word: what has another form counts as not measured.
    """
    return VersionFacts(
        rank=int(declaration["rank"]),
        alpha=float(declaration["alpha"]),
        groups=_groups((scan or {}).get(MODULES)),
        norms=dict(_norms((validation or {}).get(_SPECTRUM))),
    )


def _groups(value: Any) -> tuple[ModuleGroup, ...] | None:
    if not isinstance(value, list) or not value:
        return None
    return tuple(
        ModuleGroup(item["pattern"], item["count"], item["rank"], item["scaling"]) for item in value
    )


def _norms(spectrum: Any) -> Iterable[tuple[str, tuple[int, float]]]:
    norms = spectrum.get(_NORMS) if isinstance(spectrum, dict) else None
    for pattern, item in norms.items() if isinstance(norms, dict) else ():
        count = item.get("modules") if isinstance(item, dict) else None
        norm = item.get("norm") if isinstance(item, dict) else None
        if type(count) is int and isinstance(norm, int | float) and math.isfinite(norm):
            yield pattern, (count, float(norm))


def _states(groups: Iterable[ModuleGroup]) -> dict[str, tuple[ModuleState, ...]]:
    states: dict[str, tuple[ModuleState, ...]] = {}
    for group in groups:
        state = ModuleState(group.count, group.rank, group.scaling)
        states[group.pattern] = (*states.get(group.pattern, ()), state)
    return states


def _change(
    pattern: str,
    before: VersionFacts,
    now: VersionFacts,
    old: Mapping[str, tuple[ModuleState, ...]],
    new: Mapping[str, tuple[ModuleState, ...]],
) -> ModuleChange:
    was, is_now = old.get(pattern, ()), new.get(pattern, ())
    change: Literal["added", "removed", "changed", "same"] = "same"
    if not was or not is_now:
        change = "added" if is_now else "removed"
    elif was != is_now:
        change = "changed"
    norms = _norm(before, pattern, was), _norm(now, pattern, is_now)
    return ModuleChange(pattern, change, was, is_now, *norms)


def _norm(version: VersionFacts, pattern: str, states: tuple[ModuleState, ...]) -> float | None:
    """The norm, where all modules of the pattern were measured."""
    count, norm = version.norms.get(pattern, (0, 0.0))
    return norm if count and count == sum(state.count for state in states) else None
