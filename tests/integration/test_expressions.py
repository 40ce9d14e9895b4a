"""Adapters that choose their modules by a regular expression, through the service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from registry_service.domain import limits
from registry_service.domain.errors import UnavailableError
from registry_service.domain.expressions import Matches
from tests.integration.conftest import World

EXPRESSION = r"^(model(?=\.).*\.(q_proj|v_proj))$"


def scanned(world: World, path: Path, expression: str) -> tuple[str, list[str]]:
    """The state after the scan, and its findings' codes."""
    digest = world.publish(
        path, config={"target_modules": expression}, declare={"target_modules": expression}
    )
    world.settle()
    with world.client("operator") as operator:
        reports = operator.report_list("t-1042", digest)
        codes = [finding["code"] for report in reports for finding in report["findings"]]
        return operator.artifact_show("t-1042", digest)["state"], codes


def test_the_scan_matches_an_expression_against_the_catalog(world: World, tmp_path: Path) -> None:
    assert scanned(world, tmp_path / "a", EXPRESSION) == ("VALIDATING", [])


def test_the_scan_refuses_an_expression_that_does_not_end(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MATCH_CPU_SECONDS", 0)
    found = scanned(world, tmp_path / "a", ".*(.*)*q_projX")
    assert found == ("REJECTED", ["EXPRESSION_REFUSED"])


def test_a_fault_while_matching_burns_no_digest(world: World, tmp_path: Path) -> None:
    def overloaded(expressions: Sequence[str], names: Sequence[str]) -> Matches:
        raise UnavailableError("the matching process had no end")

    able = world.context
    world.context = replace(able, matcher=overloaded)
    state, codes = scanned(world, tmp_path / "a", EXPRESSION)
    assert (state, codes) == ("SCANNING", [])
    world.context = able
    with world.client("operator") as operator:
        (job,) = operator.job_list(state="QUEUED")
    assert "the matching process had no end" in job["fault"]
