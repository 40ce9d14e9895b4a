"""Two versions held against each other: modules, rank, scaling and norms, and what is not known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from registry_service.domain import limits
from registry_service.domain.comparison import (
    ModuleState,
    VersionFacts,
    change_check,
    measured_modules,
    version_facts,
    versions_compare,
)
from registry_service.domain.report import ModuleGroup

Q, V, UP = (f"model.layers.*.{name}" for name in ("q_proj", "v_proj", "up_proj"))


def group(pattern: str, rank: int = 8, scaling: float = 2.0, count: int = 4) -> ModuleGroup:
    return ModuleGroup(pattern, count, rank, scaling)


def facts(*groups: ModuleGroup, **norms: float) -> VersionFacts:
    return VersionFacts(8, 16.0, groups, {Q: (4, norms["q"])} if norms else {})


def test_added_removed_and_changed_modules_come_first() -> None:
    before = facts(group(Q), group(V), group("a"))
    now = facts(group(Q, scaling=20.0), group(UP), group("a"))
    compared = versions_compare(before, now).modules
    assert compared is not None
    assert [(change.change, change.pattern) for change in compared] == [
        ("added", UP),
        ("removed", V),
        ("changed", Q),
        ("same", "a"),
    ]
    changed = compared[2]
    assert changed.before == (ModuleState(4, 8, 2.0),)
    assert changed.now == (ModuleState(4, 8, 20.0),)


def test_a_pattern_may_have_several_ranks() -> None:
    before = facts(group(Q, rank=8, count=3), group(Q, rank=16, count=1))
    (change,) = versions_compare(before, facts(group(Q))).modules or ()
    assert (len(change.before), len(change.now), change.change) == (2, 1, "changed")


def test_rank_and_alpha_are_the_configs() -> None:
    compared = versions_compare(
        VersionFacts(8, 16.0, None, {}), VersionFacts(16, 160.0, (group(Q),), {})
    )
    assert (compared.rank_before, compared.rank_now) == (8, 16)
    assert (compared.alpha_before, compared.alpha_now) == (16.0, 160.0)
    assert compared.modules is None


def test_norms_are_told_where_all_modules_of_the_pattern_were_measured() -> None:
    (change,) = versions_compare(facts(group(Q), q=1.5), facts(group(Q), q=4.5)).modules or ()
    assert (change.norm_before, change.norm_now, change.change) == (1.5, 4.5, "same")
    (change,) = (
        versions_compare(facts(group(Q), q=1.5), facts(group(Q, count=5), q=4.5)).modules or ()
    )
    assert (change.norm_before, change.norm_now) == (1.5, None)
    (change,) = versions_compare(facts(group(Q)), facts(group(Q), q=4.5)).modules or ()
    assert (change.norm_before, change.norm_now) == (None, 4.5)


DECLARATION: dict[str, Any] = {"rank": 8, "alpha": 16}


def test_what_a_scan_keeps_is_read_back() -> None:
    groups = (group(Q), ModuleGroup("score", 1, None, None))
    kept = json.loads(json.dumps(measured_modules(groups)))
    read = version_facts(DECLARATION, kept, {"spectrum": {"norms": {Q: {"modules": 4, "norm": 2}}}})
    assert read == VersionFacts(8, 16.0, groups, {Q: (4, 2.0)})


def test_too_many_groups_are_counted_and_not_kept() -> None:
    groups = tuple(group(f"m{n}") for n in range(limits.REPORT_MODULE_GROUPS + 1))
    assert measured_modules(groups) == {"moduleGroups": len(groups)}
    assert version_facts(DECLARATION, measured_modules(groups), None).groups is None


@pytest.mark.parametrize(
    "validation",
    [
        None,
        {},
        {"spectrum": 7},
        {"spectrum": {"norms": [1]}},
        {"spectrum": {"norms": {Q: 3}}},
        {"spectrum": {"norms": {Q: {"modules": True, "norm": 1.0}}}},
        {"spectrum": {"norms": {Q: {"modules": 4, "norm": "infinite"}}}},
        {"spectrum": {"norms": {Q: {"modules": 4, "norm": float("inf")}}}},
        {"spectrum": {"norms": {Q: {"modules": 4}}}},
    ],
)
def test_a_validation_in_another_form_counts_as_not_measured(validation: Any) -> None:
    assert version_facts(DECLARATION, None, validation).norms == {}


@pytest.mark.parametrize("now", [8.0, 20.0, 0.5])
def test_a_factor_far_from_the_present_versions_asks_for_a_look(now: float) -> None:
    before = facts(group("a.*.q"), group("a.*.v"), group("a.*.k"))
    after = facts(group("a.*.q", scaling=now), group("a.*.v"), group("a.*.x", scaling=99.0))
    (finding,) = change_check("prod", before, after)
    assert (finding.code, finding.severity, finding.where) == ("SCALING_CHANGED", "review", "a.*.q")
    assert "the 2 of the version that 'prod' points to" in finding.expected
    assert finding.got == f"{now:g}"


@pytest.mark.parametrize("now", [2.0, 4.0, 1.0])
def test_a_factor_near_the_present_versions_does_not(now: float) -> None:
    assert change_check("prod", facts(group("q")), facts(group("q", scaling=now))) == ()


def test_several_far_factors_are_one_finding() -> None:
    before, after = (facts(*(group(n, scaling=s) for n in "abc")) for s in (1.0, 30.0))
    (finding,) = change_check("prod", before, after)
    assert finding.where.endswith(" and 2 more")
