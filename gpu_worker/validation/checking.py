"""All checks of one adapter in their order. Runs in the child, and knows nothing of processes."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from gpu_worker.validation.checks.c09_bytes import bytes_check
from gpu_worker.validation.checks.c10_spectrum import spectrum_check
from gpu_worker.validation.checks.c10_values import values_check
from gpu_worker.validation.checks.c11_load import load_check
from gpu_worker.validation.checks.c12_effect import effect_check
from gpu_worker.validation.checks.c13_mixed_batch import mixed_batch_check
from gpu_worker.validation.checks.c14_resident import resident_check
from gpu_worker.validation.checks.c15_load_time import load_time_check
from gpu_worker.validation.checks.candidate import (
    WEIGHT_PATH,
    Candidate,
    CheckFaultError,
    FileFact,
)
from gpu_worker.validation.checks.inputs import inputs_make, logits_of
from gpu_worker.validation.loading import LoadedBase
from registry_service.domain import limits
from registry_service.domain.findings import WORKER_CHECKS, Finding, Severity, refused
from registry_service.domain.safetensors_header import HEADER_PREFIX_BYTES, header_parse
from registry_service.domain.tensor_content import content_digest

_SIGNIFICANT_DIGITS: Final = 9


def adapter_check(base: LoadedBase, job: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a job: ``{"findings", "measurements"}``, or ``{"fault": reason}``."""
    files = tuple(FileFact(f["path"], f["digest"], int(f["size"])) for f in job["files"])
    candidate = Candidate(Path(job["dir"]), files)
    measurements: dict[str, Any] = {"checksRun": [], "baseLoadSeconds": base.seconds}
    started = time.perf_counter()
    if base.device == "cuda":
        _exactness_ask()
    try:
        # Libraries warn of what the checks look at themselves.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            findings = _run(base, candidate, measurements)
    except CheckFaultError as error:
        return {"fault": str(error)[: limits.REASON_CHARS]}
    except MemoryError:
        return {"fault": "memory ran out"}
    measurements["checkSeconds"] = time.perf_counter() - started
    return {"findings": _bounded(findings), "measurements": _plain(measurements)}


def _exactness_ask() -> None:
    """On CUDA: sums in one order and products in full width, so that equal inputs answer equally.

    For the whole process, which is a child that ends with its one job.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def _run(base: LoadedBase, candidate: Candidate, measurements: dict[str, Any]) -> list[Finding]:
    """Each check needs what the one before it has proven: the first refusal ends the run.

    The order is that of the numbers but for two: the spectrum of check 10 needs the loaded model,
    and a failed check 13 leaves a model that no other check may use.
    """
    findings = bytes_check(candidate, base.quantization)
    measurements["checksRun"].append(9)
    if refused(findings):
        return findings
    findings += values_check(candidate)
    measurements["checksRun"].append(10)
    if refused(findings):
        return findings
    measurements["contentDigest"] = _content(candidate)
    inputs = inputs_make(candidate, base.model)
    before = logits_of(base.model, inputs)
    found, loaded = load_check(candidate, base.model, base.parameters_digest, base.device)
    findings += found
    measurements["checksRun"].append(11)
    if refused(findings) or loaded is None:
        return findings
    model = loaded.model
    measurements["loadSeconds"] = loaded.seconds
    for name, (found, measured) in {
        "spectrum": spectrum_check(candidate, model),
        "effect": effect_check(model, inputs, before),
        "residentBytes": resident_check(candidate, model),
        "mixedBatch": mixed_batch_check(model, inputs),
    }.items():
        findings += found
        measurements[name] = measured
    findings += load_time_check(loaded.seconds, base.device)
    measurements["checksRun"] = list(WORKER_CHECKS)
    return findings


def _content(candidate: Candidate) -> str:
    header, _ = header_parse(candidate.weights[:HEADER_PREFIX_BYTES], len(candidate.weights))
    if header is None:
        raise CheckFaultError(f"{WEIGHT_PATH}: admitted by the scan, and its header is not read")
    return content_digest(header, candidate.weights)


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
