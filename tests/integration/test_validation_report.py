"""A child's answer is untrusted: in another form it is a fault, never a pass."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker.validation.report import ReportError, report_build


def test_an_answer_becomes_a_report() -> None:
    finding = {"check": 11, "code": "BASE_CHANGED", "where": "b\x1b", "expected": "x", "got": "y"}
    result = {"findings": [{**finding, "severity": "refuse"}], "measurements": {"loadSeconds": 0.1}}
    report = report_build(result, device="cpu", versions={"torch": "2"}, sandbox=False)
    assert report["findings"][0]["where"] == "b\\x1b"
    assert report["sandbox"] is False
    assert set(report) == {"findings", "device", "versions", "sandbox", "measurements"}


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"findings": [], "measurements": []},
        {"findings": [{"check": 11, "code": "INVENTED"}], "measurements": {}},
        {"findings": [{"check": 1}], "measurements": {}},
        {"findings": [None] * 6000, "measurements": {}},
        {"findings": [], "measurements": {"x": "y" * (9 << 20)}},
        {"fault": "memory ran out"},
    ],
)
def test_an_answer_of_another_form_is_a_fault(result: dict[str, Any]) -> None:
    with pytest.raises(ReportError):
        report_build(result, device="cpu", versions={}, sandbox=True)
