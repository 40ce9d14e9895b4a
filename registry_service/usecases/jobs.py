"""Jobs for workers: claim, heartbeat, result. A worker's result is untrusted input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from registry_service.domain import limits
from registry_service.domain.canonical import canonical_json
from registry_service.domain.digests import Digest, digest_parse
from registry_service.domain.errors import LeaseLostError, MalformedError
from registry_service.domain.findings import (
    WORKER_CHECKS,
    Check,
    Code,
    Finding,
    Severity,
    refused,
    review,
)
from registry_service.domain.lifecycle import Event, State
from registry_service.domain.roles import Principal
from registry_service.domain.text import bounded
from registry_service.store import jobs as store
from registry_service.store.artifacts import ArtifactRow, artifact_advance, artifact_get
from registry_service.store.reviews import report_insert
from registry_service.usecases.catalogs import catalog_submit
from registry_service.usecases.context import (
    Context,
    reading,
    system_transaction,
    tenant_transaction,
)
from registry_service.usecases.paging import cursor_decode, limit_check, page

_WORKER_KINDS = ("validate", "catalog")
_RETRY_SECONDS = 3
# What a job that ended means for its artifact: (from, passed, failed, lost).
_EVENTS = {
    "scan": (State.SCANNING, Event.SCAN_PASSED, Event.SCAN_FAILED, Event.SCAN_LOST),
    "validate": (
        State.VALIDATING,
        Event.VALIDATION_PASSED,
        Event.VALIDATION_FAILED,
        Event.VALIDATION_LOST,
    ),
}


def job_claim(
    context: Context, principal: Principal, *, kinds: Sequence[str], bases: Sequence[str]
) -> dict[str, Any] | None:
    """Give the oldest fitting job to a worker, or None.

    Raises:
        MalformedError: a kind that workers do not do.
    """
    if not kinds or any(kind not in _WORKER_KINDS for kind in kinds):
        raise MalformedError(f"kinds: expected some of {', '.join(_WORKER_KINDS)}")
    with system_transaction(context) as session:
        job = store.job_claim(session, worker=principal.subject, kinds=kinds, bases=bases)
    return None if job is None else job_wire(job)


def job_heartbeat(context: Context, principal: Principal, job_id: UUID, lease: int) -> None:
    """Renew a lease.

    Raises:
        LeaseLostError: the job is no longer this worker's.
    """
    with job_holding(context, job_id, lease, principal.subject) as held:
        store.job_extend(held.session, held.job)


def job_report(
    context: Context, principal: Principal, job_id: UUID, lease: int, report: dict[str, Any]
) -> None:
    """A validation came to its end: keep the report, move the artifact.

    A worker's report is untrusted: it speaks of the worker's checks only, and without a refusal it
    has to say that all of them ran.

    Raises:
        LeaseLostError, MalformedError.
    """
    findings = tuple(_finding(item) for item in report["findings"])
    _evidence_check(report, findings)
    content_digest = _content_digest(report)
    if report["sandbox"] is not True:
        findings += (review(Check.LOAD, Code.NO_SANDBOX, "worker", "a sandboxed process", "none"),)
        report = {**report, "findings": [finding.to_json() for finding in findings]}
    if len(canonical_json(report)) > limits.REPORT_BYTES:
        raise MalformedError(f"report: expected at most {limits.REPORT_BYTES} bytes")
    with job_holding(context, job_id, lease, principal.subject) as held:
        if held.job.kind != "validate":
            raise MalformedError(f"expected a result of a {held.job.kind} job, got a report")
        job_settle(context, held, findings, report, content_digest)


def job_catalog(
    context: Context, principal: Principal, job_id: UUID, lease: int, catalog: dict[str, Any]
) -> None:
    """A catalog was made.

    Raises:
        LeaseLostError, MalformedError.
    """
    worker = principal.subject
    with job_holding(context, job_id, lease, worker) as held:
        if held.job.kind != "catalog":
            raise MalformedError(f"expected a result of a {held.job.kind} job, got a catalog")
    content = canonical_json(catalog)
    catalog_submit(context, worker, held.job.subject, content, job=(job_id, lease))


def job_fault(
    context: Context, principal: Principal, job_id: UUID, lease: int, reason: str
) -> None:
    """A fault of ours, not of the artifact's: try again elsewhere, or give the artifact up as lost.

    Raises:
        LeaseLostError: the job is no longer this worker's.
    """
    with job_holding(context, job_id, lease, principal.subject) as held:
        job_failed(context, held, reason)


def job_list(
    context: Context, *, state: str | None, cursor: str | None, limit: int
) -> dict[str, Any]:
    """Jobs of all tenants, newest first."""
    after = cursor_decode(cursor, 2)
    with reading(context) as session:
        rows = store.job_page(
            session,
            after=(after[0], after[1]) if after else None,
            limit=limit_check(limit) + 1,
            state=state,
        )
    return page(
        rows, limit, wire=_full_wire, key=lambda row: (row.created_at.isoformat(), str(row.id))
    )


@dataclass(frozen=True)
class Holding:
    """A transaction that holds a job and, for all but catalogs, its artifact."""

    session: Session
    job: store.JobRow
    artifact: ArtifactRow | None


@contextmanager
def job_holding(context: Context, job_id: UUID, lease: int, worker: str) -> Iterator[Holding]:
    """Hold a job for the worker and lease that have it.

    The artifact's lock comes before the job's, as in a revocation, so that neither waits for the
    other.

    Raises:
        LeaseLostError: the job is over, or another worker's.
    """
    with system_transaction(context) as session:
        known = store.job_get(session, job_id)
    with tenant_transaction(context, known.tenant_id) as session:
        artifact = None
        if known.kind in _EVENTS:
            artifact = artifact_get(session, known.tenant_id, known.subject, lock=True)
        job = store.job_held(session, job_id, lease)
        if job.worker != worker:
            raise LeaseLostError("this job is another worker's; drop this result")
        yield Holding(session, job, artifact)


def job_settle(
    context: Context,
    held: Holding,
    findings: tuple[Finding, ...],
    report: dict[str, Any],
    content_digest: Digest | None = None,
) -> None:
    """Keep a report and move its artifact by it; with the content digest, where it found one.

    An artifact that was revoked meanwhile stays where it is: the report is kept all the same.
    """
    now = context.clock.now()
    failed = refused(findings)
    report_insert(
        held.session,
        tenant_id=held.job.tenant_id,
        artifact_digest=held.job.subject,
        stage=held.job.kind,
        attempt=held.job.attempt,
        worker=held.job.worker,
        verdict="refuse" if failed else "pass",
        content=report,
        at=now,
    )
    store.job_finish(held.session, held.job, "DONE")
    state, passed, refused_event, _ = _EVENTS[held.job.kind]
    if held.artifact is None or held.artifact.state is not state:
        return
    event = refused_event if failed else passed
    artifact_advance(
        held.session,
        held.artifact,
        event,
        actor=held.job.worker,
        reason="",
        at=now,
        content_digest=content_digest,
    )
    if event is Event.SCAN_PASSED:
        store.artifact_job_insert(held.session, held.artifact, "validate", now)


def job_failed(context: Context, held: Holding, reason: str) -> None:
    """End a failed attempt: queue the job again, or, on its last one, stall the artifact."""
    job, artifact = held.job, held.artifact
    reason = bounded(reason, limits.REASON_CHARS)
    if job.attempt < job.max_attempts:
        delay = _RETRY_SECONDS * job.attempt
        store.job_finish(held.session, job, "QUEUED", reason, delay=delay)
        return
    store.job_finish(held.session, job, "DEAD", reason)
    if artifact is None:
        return
    state, _, _, lost = _EVENTS[job.kind]
    if artifact.state is state:
        artifact_advance(
            held.session,
            artifact,
            lost,
            actor=job.worker or "sweeper",
            reason=f"attempt {job.attempt} of {job.max_attempts}: {reason}",
            at=context.clock.now(),
        )


def _evidence_check(report: dict[str, Any], findings: tuple[Finding, ...]) -> None:
    if any(finding.check not in WORKER_CHECKS for finding in findings):
        raise MalformedError("report: expected findings of the worker's checks only")
    if not refused(findings) and tuple(report["checks"]) != WORKER_CHECKS:
        raise MalformedError(
            f"report: expected all of checks {', '.join(map(str, WORKER_CHECKS))} to have run"
        )


def _content_digest(report: dict[str, Any]) -> Digest | None:
    found = report["measurements"].get("contentDigest")
    return None if found is None else digest_parse(found, "report: measurements: contentDigest")


def _finding(item: dict[str, Any]) -> Finding:
    try:
        code, severity = Code(item["code"]), Severity(item["severity"])
    except ValueError as error:
        raise MalformedError(f"report: {bounded(str(error))}") from error
    return Finding(item["check"], code, item["where"], item["expected"], item["got"], severity)


def job_wire(job: store.JobRow) -> dict[str, Any]:
    """A claimed job as a worker sees it."""
    return {
        "id": str(job.id),
        "kind": job.kind,
        "lease": job.lease,
        "leaseSeconds": limits.JOB_LEASE_SECONDS,
        "attempt": job.attempt,
        "maxAttempts": job.max_attempts,
        "tenant": job.tenant,
        "tenantId": str(job.tenant_id),
        "adapter": job.adapter,
        "adapterDigest": job.subject if job.kind != "catalog" else None,
        "baseModelDigest": job.base_digest,
    }


def _full_wire(job: store.JobRow) -> dict[str, Any]:
    return {
        **job_wire(job),
        "state": job.state,
        "worker": job.worker,
        "fault": job.fault,
        "createdAt": job.created_at,
    }
