"""A report for people: thousands of findings as a few groups, and modules as groups of layers.

Both replace the numbers in a name by ``*``, since a fault of training is the same in every layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from registry_service.domain import limits
from registry_service.domain.findings import Check, Code, Finding, Severity, review

if TYPE_CHECKING:
    from registry_service.domain.expected_tensors import ExpectedTensors

EXAMPLES: Final = 3
_ORDER: Final = {severity: place for place, severity in enumerate(Severity)}
_ANY: Final = "*"


@dataclass(frozen=True, slots=True)
class Example:
    """Where one finding of a group is, with what was expected and got there."""

    where: str
    expected: str
    got: str


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """Findings of one kind in one kind of place; ``where`` has ``*`` for each layer's number."""

    check: int
    code: Code
    severity: Severity
    where: str
    count: int
    examples: tuple[Example, ...]

    def to_json(self) -> dict[str, Any]:
        """The form of ``adapterctl … --json``."""
        return {**asdict(self), "examples": [asdict(example) for example in self.examples]}


def findings_group(findings: Iterable[Finding]) -> tuple[FindingGroup, ...]:
    """Groups by severity (refuse, review, info), check, code and place; up to three examples each.

    Within a check they keep the order in which the findings came: summaries before single ones.
    """
    counts: Counter[tuple[Severity, int, Code, str]] = Counter()
    examples: dict[tuple[Severity, int, Code, str], list[Example]] = {}
    for finding in findings:
        key = (finding.severity, finding.check, finding.code, name_pattern(finding.where))
        counts[key] += 1
        shown = examples.setdefault(key, [])
        if len(shown) < EXAMPLES:
            shown.append(Example(finding.where, finding.expected, finding.got))
    ordered = sorted(counts, key=lambda key: (_ORDER[key[0]], key[1]))
    return tuple(
        FindingGroup(check, code, severity, where, counts[key], tuple(examples[key]))
        for key in ordered
        for severity, check, code, where in (key,)
    )


def findings_cut(findings: Sequence[Finding], limit: int) -> tuple[Finding, ...]:
    """At most ``limit`` findings in their order, every code among them as far as there is room.

    A flood of one code must not hide the one finding that explains it.
    """
    if len(findings) <= limit:
        return tuple(findings)
    share = max(1, limit // len({finding.code for finding in findings}))
    taken: Counter[Code] = Counter()
    kept: list[int] = []
    rest: list[int] = []
    for position, finding in enumerate(findings):
        taken[finding.code] += 1
        (kept if taken[finding.code] <= share else rest).append(position)
    chosen = sorted([*kept, *rest[: max(0, limit - len(kept))]])[:limit]
    return tuple(findings[position] for position in chosen)


def name_pattern(name: str) -> str:
    """``name`` with ``*`` for each of its parts that is a number, the first one excepted."""
    first, *rest = name.split(".")
    return ".".join([first, *(_ANY if part.isdecimal() else part for part in rest)])


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Modules that differ by their layer only. ``rank`` and ``scaling`` are None without LoRA."""

    pattern: str
    count: int
    rank: int | None
    scaling: float | None

    def to_json(self) -> dict[str, Any]:
        """The form in a scan's measurements and of ``adapterctl check --json``."""
        return asdict(self)


def variety_check(groups: Sequence[ModuleGroup]) -> tuple[Finding, ...]:
    """A look at what has more different ranks and factors than a report keeps and compares."""
    if len(groups) <= limits.REPORT_MODULE_GROUPS:
        return ()
    expected = f"at most {limits.REPORT_MODULE_GROUPS} groups of modules of one rank and factor"
    got = f"{len(groups)}: this version is not compared with others"
    return (review(Check.STRUCTURE, Code.MODULES_VARIED, "adapter", expected, got),)


def modules_group(expected: ExpectedTensors) -> tuple[ModuleGroup, ...]:
    """What the adapter changes, with rank and effective scaling (the factor of B·A)."""
    counts: Counter[tuple[str, int | None, float | None]] = Counter(
        (name_pattern(name), expected.ranks[name], scaling)
        for name, scaling in expected.scaling.items()
    )
    whole = {e.module for e in expected.tensors.values() if e.rank == 0} - expected.scaling.keys()
    counts.update((name_pattern(name), None, None) for name in whole)
    groups = [
        ModuleGroup(pattern, count, rank, scaling)
        for (pattern, rank, scaling), count in counts.items()
    ]
    return tuple(sorted(groups, key=lambda g: (g.pattern, g.rank or 0, g.scaling or 0.0)))
