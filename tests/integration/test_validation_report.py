"""A child's answer is untrusted: in another form it is a fault, never a pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gpu_worker.validation.report import ReportError, report_build

ALL = {"checksRun": [9, 10, 11, 12, 13, 14, 15]}


def test_an_answer_becomes_a_report() -> None:
    finding = {"check": 11, "code": "BASE_CHANGED", "where": "b\x1b", "expected": "x", "got": "y"}
    measured = {"loadSeconds": 0.1, "checksRun": [9, 10, 11]}
    result = {"findings": [{**finding, "severity": "refuse"}], "measurements": measured}
    report = report_build(result, device="cpu", versions={"torch": "2"}, sandbox=False)
    assert report["findings"][0]["where"] == "b\\x1b"
    assert report["sandbox"] is False
    assert report["checks"] == [9, 10, 11]
    assert set(report) == {"findings", "checks", "device", "versions", "sandbox", "measurements"}


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"findings": [], "measurements": []},
        {"findings": [{"check": 11, "code": "INVENTED"}], "measurements": ALL},
        {"findings": [{"check": 1}], "measurements": ALL},
        {"findings": [None] * 6000, "measurements": ALL},
        {"findings": [], "measurements": {**ALL, "x": "y" * (9 << 20)}},
        {"findings": [], "measurements": {}},
        {"findings": [], "measurements": {"checksRun": [9, 10, 11, 12, 13, 14]}},
        {"findings": [], "measurements": {"checksRun": [1, 2, 3, 4, 5, 8]}},
        {"fault": "memory ran out"},
    ],
)
def test_an_answer_of_another_form_is_a_fault(result: dict[str, Any]) -> None:
    with pytest.raises(ReportError):
        report_build(copy.deepcopy(result), device="cpu", versions={}, sandbox=True)


def test_a_pass_that_ran_all_checks_is_reported() -> None:
    result = {"findings": [], "measurements": dict(ALL)}
    report = report_build(result, device="cpu", versions={}, sandbox=True)
    assert report["checks"] == ALL["checksRun"]
