"""Jobs for workers: claim, heartbeat, result. A worker's result is untrusted input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from registry_service.domain import limits
from registry_service.domain.canonical import canonical_json
from registry_service.domain.errors import LeaseLostError, MalformedError
from registry_service.domain.findings import Code, Finding, Severity, refused
from registry_service.domain.lifecycle import Event, State
from registry_service.domain.roles import Principal
from registry_service.domain.text import bounded
from registry_service.store import jobs as store
from registry_service.store.artifacts import artifact_advance, artifact_get
from registry_service.store.reviews import report_insert
from registry_service.usecases.bases import catalog_submit
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
    with _held(context, principal, job_id, lease) as (session, job):
        store.job_extend(session, job)


def job_report(
    context: Context, principal: Principal, job_id: UUID, lease: int, report: dict[str, Any]
) -> None:
    """A validation came to its end: keep the report, move the artifact.

    Raises:
        LeaseLostError, MalformedError.
    """
    findings = tuple(_finding(item) for item in report["findings"])
    if len(canonical_json(report)) > limits.REPORT_BYTES:
        raise MalformedError(f"report: expected at most {limits.REPORT_BYTES} bytes")
    with _held(context, principal, job_id, lease) as (session, job):
        if job.kind != "validate":
            raise MalformedError(f"expected a result of a {job.kind} job, got a report")
        artifact_settle(context, session, job, findings, report)


def job_catalog(
    context: Context, principal: Principal, job_id: UUID, lease: int, catalog: dict[str, Any]
) -> None:
    """A catalog was made.

    Raises:
        LeaseLostError, MalformedError.
    """
    with _held(context, principal, job_id, lease) as (_, job):
        if job.kind != "catalog":
            raise MalformedError(f"expected a result of a {job.kind} job, got a catalog")
    catalog_submit(context, principal.subject, job.subject, canonical_json(catalog))
    with _held(context, principal, job_id, lease) as (session, job):
        store.job_finish(session, job, "DONE")


def job_fault(
    context: Context, principal: Principal, job_id: UUID, lease: int, reason: str
) -> None:
    """A fault of ours, not of the artifact's: try again elsewhere, or give the artifact up as lost.

    Raises:
        LeaseLostError: the job is no longer this worker's.
    """
    with _held(context, principal, job_id, lease) as (session, job):
        job_failed(context, session, job, reason)


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


def artifact_settle(
    context: Context,
    session: Session,
    job: store.JobRow,
    findings: tuple[Finding, ...],
    report: dict[str, Any],
) -> None:
    """Keep a report and move its artifact by it; the caller holds the job.

    An artifact that was revoked meanwhile stays where it is: the report is kept all the same.
    """
    now = context.clock.now()
    artifact = artifact_get(session, job.tenant_id, job.subject, lock=True)
    failed = refused(findings)
    report_insert(
        session,
        tenant_id=job.tenant_id,
        artifact_digest=job.subject,
        stage=job.kind,
        attempt=job.attempt,
        worker=job.worker,
        verdict="refuse" if failed else "pass",
        content=report,
        at=now,
    )
    store.job_finish(session, job, "DONE")
    state, passed, refused_event, _ = _EVENTS[job.kind]
    if artifact.state is not state:
        return
    event = refused_event if failed else passed
    artifact_advance(session, artifact, event, actor=job.worker, reason="", at=now)
    if event is Event.SCAN_PASSED:
        store.artifact_job_insert(session, artifact, "validate", now)


def job_failed(context: Context, session: Session, job: store.JobRow, reason: str) -> None:
    """End a failed attempt: queue the job again, or, on its last one, stall the artifact."""
    reason = bounded(reason, limits.REASON_CHARS)
    if job.attempt < job.max_attempts:
        delay = _RETRY_SECONDS * job.attempt
        store.job_finish(session, job, "QUEUED", reason, delay=delay)
        return
    store.job_finish(session, job, "DEAD", reason)
    if job.kind == "catalog":
        return
    artifact = artifact_get(session, job.tenant_id, job.subject, lock=True)
    state, _, _, lost = _EVENTS[job.kind]
    if artifact.state is state:
        artifact_advance(
            session,
            artifact,
            lost,
            actor=job.worker or "sweeper",
            reason=f"attempt {job.attempt} of {job.max_attempts}: {reason}",
            at=context.clock.now(),
        )


def _finding(item: dict[str, Any]) -> Finding:
    try:
        code, severity = Code(item["code"]), Severity(item["severity"])
    except ValueError as error:
        raise MalformedError(f"report: {bounded(str(error))}") from error
    return Finding(item["check"], code, item["where"], item["expected"], item["got"], severity)


@contextmanager
def _held(
    context: Context, principal: Principal, job_id: UUID, lease: int
) -> Iterator[tuple[Session, store.JobRow]]:
    """A transaction in the job's tenant that holds the job for this worker and lease."""
    with system_transaction(context) as session:
        tenant_id = store.job_get(session, job_id).tenant_id
    with tenant_transaction(context, tenant_id) as session:
        job = store.job_held(session, job_id, lease)
        if job.worker != principal.subject:
            raise LeaseLostError("this job is another worker's; drop this result")
        yield session, job


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
