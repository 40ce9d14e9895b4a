"""A child's answer becomes a report: untrusted input, parsed and bounded before it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from registry_service.domain import limits
from registry_service.domain.canonical import canonical_json
from registry_service.domain.findings import WORKER_CHECKS, Code, Finding, Severity, refused
from registry_service.domain.text import bounded

_MEASUREMENTS: Final = 256


class ReportError(Exception):
    """The child's answer has not the form of a report: a fault, never a pass."""


def report_build(
    result: Mapping[str, Any], *, device: str, versions: Mapping[str, str], sandbox: bool
) -> dict[str, Any]:
    """The report of a validation, in the form of the wire.

    Raises:
        ReportError: another form, or too many bytes.
    """
    if "fault" in result:
        raise ReportError(bounded(str(result["fault"]), limits.REASON_CHARS - 100))
    findings, measurements = result.get("findings"), result.get("measurements")
    if not isinstance(findings, list) or len(findings) > limits.REPORT_FINDINGS:
        raise ReportError("the child's findings are no list within bounds")
    if not isinstance(measurements, dict) or len(measurements) > _MEASUREMENTS:
        raise ReportError("the child's measurements are no object within bounds")
    checks = _checks(measurements.pop("checksRun", None))
    parsed = [_finding(item) for item in findings]
    if not refused(parsed) and checks != list(WORKER_CHECKS):
        raise ReportError("the child's answer is a pass without all checks")
    report = {
        "findings": [finding.to_json() for finding in parsed],
        "checks": checks,
        "device": device,
        "versions": dict(versions),
        "sandbox": sandbox,
        "measurements": measurements,
    }
    if len(canonical_json(report)) > limits.REPORT_BYTES:
        raise ReportError(f"the child's report is over {limits.REPORT_BYTES} bytes")
    return report


def _checks(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(item in WORKER_CHECKS for item in value):
        raise ReportError("the child does not say which checks ran")
    return value


def _finding(item: Any) -> Finding:
    try:
        check, code, severity = int(item["check"]), Code(item["code"]), Severity(item["severity"])
        where = bounded(str(item["where"]), 600)
        expected, got = bounded(str(item["expected"]), 400), bounded(str(item["got"]), 400)
    except (KeyError, TypeError, ValueError) as error:
        raise ReportError("the child's findings hold one of another form") from error
    if check not in WORKER_CHECKS:
        raise ReportError(f"the child's findings hold one of check {check}")
    return Finding(check, code, where, expected, got, severity)
