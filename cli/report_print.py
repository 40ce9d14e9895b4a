"""What a report looks like on a terminal: findings in groups, modules, and the comparison."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from cli.output import WIDTH, plain, say, table_print
from registry_service.domain.findings import Finding

if TYPE_CHECKING:
    from registry_service.domain.report import FindingGroup

Findings = Iterable[Mapping[str, Any] | Finding]

_PLACES_SHOWN: Final = 6
_MODULES_SHOWN: Final = 40
_FIELDS: Final = ("check", "code", "where", "expected", "got", "severity")
_PAGE: Final = "docs/findings.md"


def findings_grouped(findings: Findings) -> tuple[FindingGroup, ...]:
    """Findings of ours or of a service's answer in groups; none is left out."""
    from registry_service.domain.report import findings_group

    return findings_group(
        item if isinstance(item, Finding) else Finding(**{name: item[name] for name in _FIELDS})
        for item in findings
    )


def findings_print(findings: Findings, *, error: bool = False, hint: bool = True) -> None:
    """Findings by code and place, with what was expected and got; ``hint``: where to read on."""
    groups = findings_grouped(findings)
    stream = sys.stderr if error else sys.stdout
    by_code: dict[tuple[str, int, str], list[FindingGroup]] = {}
    for group in groups:
        by_code.setdefault((group.severity, group.check, group.code), []).append(group)
    for (severity, check, code), places in by_code.items():
        count = sum(group.count for group in places)
        times = f"  {count} times" if count > 1 else ""
        stream.write(f"{plain(severity)}  check {check}  {plain(code)}{times}\n")
        lines = [line for group in places[:_PLACES_SHOWN] for line in _lines(group, count == 1)]
        stream.write("".join(f"{line}\n" for line in lines))
        if len(places) > _PLACES_SHOWN:
            stream.write(f"    and {len(places) - _PLACES_SHOWN} more places; --json has them\n")
    if hint:
        hint_print(groups)


def hint_print(groups: Sequence[FindingGroup]) -> None:
    """Where the first code is explained, and the others beside it."""
    if groups:
        say(f"  what a code means and what to do: {_PAGE}#{plain(groups[0].code).lower()}")


def modules_print(modules: Sequence[Mapping[str, Any]]) -> None:
    """What an adapter changes, with its rank and effective scaling."""
    table_print(
        "",
        ("MODULES", "COUNT", "RANK", "SCALING"),
        (
            (item["pattern"], item["count"], item["rank"], _number(item["scaling"]))
            for item in modules[:_MODULES_SHOWN]
        ),
        "no modules",
    )
    if len(modules) > _MODULES_SHOWN:
        say(f"{len(modules) - _MODULES_SHOWN} more groups of modules; --json has all of them")


def comparison_print(comparison: Mapping[str, Any]) -> None:
    """What an artifact changes against the version that an alias points to."""
    was = f"'{comparison['alias']}' (generation {comparison['generation']})"
    say(f"compared with {was}, {comparison['adapterDigest']}:")
    for what in ("rank", "alpha"):
        values = [_number(comparison[f"{what}{when}"]) for when in ("Before", "Now")]
        say(f"  {what} {_moved(*values)}")
    modules = comparison["modules"]
    if modules is None:
        say("  modules: not measured, one of the two scans has kept none")
        return
    table_print(
        "",
        ("CHANGE", "MODULES", "COUNT", "RANK", "SCALING", "NORM"),
        (_change_row(change) for change in modules[:_MODULES_SHOWN]),
        "  no modules in either",
    )
    if len(modules) > _MODULES_SHOWN:
        say(f"{len(modules) - _MODULES_SHOWN} more groups of modules; --json has all of them")


def _change_row(change: Mapping[str, Any]) -> tuple[object, ...]:
    states = [change["before"], change["now"]]
    cells = [
        _moved(*(", ".join(_number(state[field]) for state in side) or "-" for side in states))
        for field in ("count", "rank", "scaling")
    ]
    norms = [
        _number(norm) if norm is not None else ("not measured" if side else "-")
        for norm, side in zip((change["normBefore"], change["normNow"]), states, strict=True)
    ]
    return (change["change"], change["pattern"], *cells, _moved(*norms))


def _moved(before: str, now: str) -> str:
    return before if before == now else f"{before} -> {now}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else plain(value)


def _lines(group: FindingGroup, alone: bool) -> Iterator[str]:
    """One place: all of it where it is alone, else the place and a line about it."""
    if alone:
        first = group.examples[0]
        for name, value in (
            ("where", first.where),
            ("expected", first.expected),
            ("got", first.got),
        ):
            yield from _folded(f"    {name:<10}", value)
        return
    yield from _folded("    ", group.where)
    pairs = dict.fromkeys((example.expected, example.got) for example in group.examples)
    text = "; ".join(f"expected {expected}, got {got}" for expected, got in pairs)
    if group.count > 1:
        text = f"{group.count} times: {text}"
    numbers = [_numbers(group.where, example.where) for example in group.examples]
    if any(numbers):
        text += f"; at * = {', '.join(numbers)}{', …' if group.count > len(numbers) else ''}"
    yield from _folded("        ", text)


def _numbers(pattern: str, name: str) -> str:
    """What stands in ``name`` for each ``*`` of its pattern."""
    parts = zip(pattern.split("."), name.split("."), strict=True)
    return "/".join(part for star, part in parts if star != part)


def _folded(start: str, value: str) -> list[str]:
    return textwrap.wrap(
        plain(value) or "-",
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
    )
