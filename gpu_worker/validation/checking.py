"""All checks of one adapter in their order. Runs in the child, and knows nothing of processes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gpu_worker.validation.checks.c09_bytes import bytes_check
from gpu_worker.validation.checks.c10_values import values_check
from gpu_worker.validation.checks.c11_load import load_check
from gpu_worker.validation.checks.c12_effect import effect_check, effect_inputs, logits_of
from gpu_worker.validation.checks.c14_resident import resident_check
from gpu_worker.validation.checks.c15_load_time import load_time_check
from gpu_worker.validation.checks.candidate import Candidate, CheckFaultError, FileFact
from gpu_worker.validation.loading import LoadedBase
from registry_service.domain import limits
from registry_service.domain.findings import Finding, Severity, refused

_SIGNIFICANT_DIGITS: Final = 9


def adapter_check(base: LoadedBase, job: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a job: ``{"findings", "measurements"}``, or ``{"fault": reason}``."""
    files = tuple(FileFact(f["path"], f["digest"], int(f["size"])) for f in job["files"])
    candidate = Candidate(Path(job["dir"]), files)
    measurements: dict[str, Any] = {"checksRun": [], "baseLoadSeconds": base.seconds}
    started = time.perf_counter()
    try:
        findings = _run(base, candidate, measurements)
    except CheckFaultError as error:
        return {"fault": str(error)[: limits.REASON_CHARS]}
    except MemoryError:
        return {"fault": "memory ran out"}
    measurements["checkSeconds"] = time.perf_counter() - started
    return {"findings": _bounded(findings), "measurements": _plain(measurements)}


def _run(base: LoadedBase, candidate: Candidate, measurements: dict[str, Any]) -> list[Finding]:
    """Each check needs what the one before it has proven: the first refusal ends the run."""
    findings = bytes_check(candidate)
    measurements["checksRun"].append(9)
    if refused(findings):
        return findings
    found, measurements["spectrum"] = values_check(candidate, base.model)
    findings += found
    measurements["checksRun"].append(10)
    if refused(findings):
        return findings
    tokens = effect_inputs(candidate, base.model)
    before = logits_of(base.model, tokens)
    found, loaded = load_check(candidate, base.model, base.parameters_digest, base.device)
    findings += found
    measurements["checksRun"].append(11)
    if refused(findings) or loaded is None:
        return findings
    found, measurements["effect"] = effect_check(loaded.model, tokens, before)
    findings += found
    found, measurements["residentBytes"] = resident_check(candidate, loaded.model)
    findings += found + load_time_check(loaded.seconds, base.device)
    measurements["loadSeconds"] = loaded.seconds
    measurements["checksRun"] += [12, 14, 15]
    return findings


def _bounded(findings: list[Finding]) -> list[dict[str, Any]]:
    # Refusals first, so that a cut never turns a refusal into a pass.
    ordered = sorted(findings, key=lambda finding: finding.severity is not Severity.REFUSE)
    return [finding.to_json() for finding in ordered[: limits.REPORT_FINDINGS]]


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it: no NaN, no infinity, numbers cut to nine digits."""
    if isinstance(value, Mapping):
        return {str(key)[: limits.TENSOR_NAME_CHARS]: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return "infinite"
        return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
    return value
