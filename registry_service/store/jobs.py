"""Jobs: one table, claimed with SKIP LOCKED, fenced by a lease number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import text
from sqlalchemy.orm import Session

from registry_service.domain import limits
from registry_service.domain.errors import LeaseLostError, NotFoundError
from registry_service.store.artifacts import ArtifactRow


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job. ``subject`` is the artifact's digest, or the base's for a catalog."""

    tenant_id: UUID
    tenant: str
    id: UUID
    kind: str
    subject: str
    adapter: str
    base_digest: str
    state: str
    lease: int
    lease_until: datetime
    attempt: int
    max_attempts: int
    worker: str
    fault: str
    created_at: datetime


_COLUMNS = (
    "j.tenant_id, t.name AS tenant, j.id, j.kind, j.subject, j.adapter, j.base_digest, j.state, "
    "j.lease, j.lease_until, j.attempt, j.max_attempts, j.worker, j.fault, j.created_at"
)
_INSERT = text(
    "INSERT INTO job (tenant_id, id, kind, subject, adapter, base_digest, state, lease_until, "
    "max_attempts, created_at) VALUES (:tenant_id, :id, :kind, :subject, :adapter, :base_digest, "
    "'QUEUED', :at, :max_attempts, :at)"
)
# Oldest first; a running job whose lease ran out is taken over while it has attempts left. The
# lease number grows with each claim: a late worker's number no longer matches. A catalog counts
# once a worker, so a worker that made one in the base's present round leaves the job to others.
_CLAIM = text(
    "UPDATE job SET state = 'RUNNING', lease = lease + 1, attempt = attempt + 1, worker = :worker, "
    "lease_until = now() + make_interval(secs => :seconds) WHERE id = ("
    "  SELECT id FROM job WHERE state IN ('QUEUED', 'RUNNING') AND lease_until <= now()"
    "  AND attempt < max_attempts AND kind = ANY(:kinds)"
    "  AND (CAST(:bases AS text[]) IS NULL OR base_digest = ANY(:bases))"
    "  AND NOT (kind = 'catalog' AND EXISTS (SELECT 1 FROM catalog_maker m JOIN base b"
    "    ON b.digest = m.base_digest AND b.round = m.round"
    "    WHERE m.base_digest = job.base_digest AND m.worker = :worker))"
    "  ORDER BY created_at FOR UPDATE SKIP LOCKED LIMIT 1) RETURNING id"
)


def job_insert(
    session: Session,
    *,
    tenant_id: UUID,
    kind: str,
    subject: str,
    adapter: str,
    base_digest: str,
    at: datetime,
    max_attempts: int = limits.JOB_ATTEMPTS,
) -> UUID:
    """Queue a job. At most one open job a kind and subject (unique index)."""
    job_id = uuid4()
    session.execute(
        _INSERT,
        {
            "tenant_id": tenant_id,
            "id": job_id,
            "kind": kind,
            "subject": subject,
            "adapter": adapter,
            "base_digest": base_digest,
            "at": at,
            "max_attempts": max_attempts,
        },
    )
    return job_id


def artifact_job_insert(session: Session, artifact: ArtifactRow, kind: str, at: datetime) -> UUID:
    """Queue a job for an artifact that has just moved to where it wants one."""
    return job_insert(
        session,
        tenant_id=artifact.tenant_id,
        kind=kind,
        subject=artifact.digest,
        adapter=artifact.adapter,
        base_digest=artifact.base_digest,
        at=at,
    )


def job_claim(
    session: Session,
    *,
    worker: str,
    kinds: Sequence[str],
    bases: Sequence[str] | None,
    seconds: float = limits.JOB_LEASE_SECONDS,
) -> JobRow | None:
    """Claim the oldest job of ``kinds`` (for one of ``bases``, when given), or None."""
    job_id = session.execute(
        _CLAIM,
        {
            "worker": worker,
            "kinds": list(kinds),
            "bases": None if bases is None else list(bases),
            "seconds": seconds,
        },
    ).scalar_one_or_none()
    return None if job_id is None else job_get(session, job_id)


def job_get(session: Session, job_id: UUID, *, lock: bool = False) -> JobRow:
    """One job.

    Raises:
        NotFoundError: no such job.
    """
    sql = f"SELECT {_COLUMNS} FROM job j JOIN tenant t ON t.id = j.tenant_id WHERE j.id = :id"
    sql += " FOR UPDATE OF j" if lock else ""
    row = session.execute(text(sql), {"id": job_id}).one_or_none()
    if row is None:
        raise NotFoundError("not found")
    return _job(row)


def job_held(session: Session, job_id: UUID, lease: int) -> JobRow:
    """Lock a running job whose lease number is ``lease``.

    Raises:
        LeaseLostError: it was given to another worker, or is over.
    """
    job = job_get(session, job_id, lock=True)
    if job.state != "RUNNING" or job.lease != lease:
        raise LeaseLostError(
            f"expected the holder of lease {job.lease} of a running job, got lease {lease} "
            f"({job.state}); drop this result"
        )
    return job


def job_extend(session: Session, job: JobRow, seconds: float = limits.JOB_LEASE_SECONDS) -> None:
    """Renew a held job's lease."""
    session.execute(
        text(
            "UPDATE job SET lease_until = now() + make_interval(secs => :seconds) "
            "WHERE tenant_id = :tenant_id AND id = :id"
        ),
        {"seconds": seconds, "tenant_id": job.tenant_id, "id": job.id},
    )


def job_finish(
    session: Session, job: JobRow, state: str, fault: str = "", *, delay: float = 0
) -> None:
    """End a job (DONE, DEAD) or give it back (QUEUED: claimable after ``delay`` seconds)."""
    session.execute(
        text(
            "UPDATE job SET state = :state, fault = :fault, "
            "lease_until = now() + make_interval(secs => :delay) "
            "WHERE tenant_id = :tenant_id AND id = :id"
        ),
        {
            "state": state,
            "fault": fault,
            "delay": delay,
            "tenant_id": job.tenant_id,
            "id": job.id,
        },
    )


def job_postpone(session: Session, job: JobRow, reason: str, *, seconds: float) -> None:
    """Give a job back that could not begin: the attempt does not count."""
    session.execute(
        text(
            "UPDATE job SET state = 'QUEUED', attempt = attempt - 1, fault = :reason, "
            "lease_until = now() + make_interval(secs => :seconds) "
            "WHERE tenant_id = :tenant_id AND id = :id"
        ),
        {"reason": reason, "seconds": seconds, "tenant_id": job.tenant_id, "id": job.id},
    )


def jobs_open(session: Session, tenant_id: UUID, subject: str) -> list[JobRow]:
    """Open jobs of one subject, locked."""
    sql = (
        f"SELECT {_COLUMNS} FROM job j JOIN tenant t ON t.id = j.tenant_id "
        "WHERE j.tenant_id = :tenant_id AND j.subject = :subject "
        "AND j.state IN ('QUEUED', 'RUNNING') FOR UPDATE OF j"
    )
    rows = session.execute(text(sql), {"tenant_id": tenant_id, "subject": subject})
    return [_job(row) for row in rows]


def jobs_dead(session: Session) -> list[JobRow]:
    """Running jobs whose lease ran out on their last attempt."""
    sql = (
        f"SELECT {_COLUMNS} FROM job j JOIN tenant t ON t.id = j.tenant_id "
        "WHERE j.state = 'RUNNING' AND j.lease_until <= now() AND j.attempt >= j.max_attempts"
    )
    return [_job(row) for row in session.execute(text(sql))]


def job_page(
    session: Session, *, after: tuple[str, str] | None, limit: int, state: str | None
) -> list[JobRow]:
    """Jobs newest first, after the cursor (created at, id)."""
    values: dict[str, Any] = {"limit": limit}
    where = "true"
    if state is not None:
        where, values["state"] = "j.state = :state", state
    if after is not None:
        where += " AND (j.created_at, j.id) < (CAST(:at AS timestamptz), CAST(:id AS uuid))"
        values["at"], values["id"] = after
    sql = (
        f"SELECT {_COLUMNS} FROM job j JOIN tenant t ON t.id = j.tenant_id WHERE {where} "
        "ORDER BY j.created_at DESC, j.id DESC LIMIT :limit"
    )
    return [_job(row) for row in session.execute(text(sql), values)]


def _job(row: Any) -> JobRow:
    return JobRow(**row._mapping)
