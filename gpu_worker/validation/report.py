"""A child's answer becomes a report: untrusted input, parsed and bounded before it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from registry_service.domain import limits
from registry_service.domain.canonical import canonical_json
from registry_service.domain.findings import Code, Finding, Severity
from registry_service.domain.text import bounded

_MEASUREMENTS: Final = 256
_WORKER_CHECKS: Final = range(9, 16)


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
    report = {
        "findings": [_finding(item).to_json() for item in findings],
        "device": device,
        "versions": dict(versions),
        "sandbox": sandbox,
        "measurements": measurements,
    }
    if len(canonical_json(report)) > limits.REPORT_BYTES:
        raise ReportError(f"the child's report is over {limits.REPORT_BYTES} bytes")
    return report


def _finding(item: Any) -> Finding:
    try:
        check, code, severity = int(item["check"]), Code(item["code"]), Severity(item["severity"])
        where = bounded(str(item["where"]), 600)
        expected, got = bounded(str(item["expected"]), 400), bounded(str(item["got"]), 400)
    except (KeyError, TypeError, ValueError) as error:
        raise ReportError("the child's findings hold one of another form") from error
    if check not in _WORKER_CHECKS:
        raise ReportError(f"the child's findings hold one of check {check}")
    return Finding(check, code, where, expected, got, severity)
