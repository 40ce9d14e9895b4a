"""Reading artifacts, and what their owner and operators may do with them besides review."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from registry_service.domain.digests import Digest
from registry_service.domain.errors import MalformedError, NotFoundError
from registry_service.domain.lifecycle import Event, State
from registry_service.domain.names import reason_text
from registry_service.domain.roles import Principal
from registry_service.store.artifacts import (
    ArtifactRow,
    artifact_advance,
    artifact_get,
    artifact_page,
)
from registry_service.store.jobs import artifact_job_insert
from registry_service.store.reviews import report_list, verdict_find
from registry_service.store.tags import labels_of
from registry_service.store.tenants import tenant_get
from registry_service.usecases.comparison import reports_compared
from registry_service.usecases.context import Context, principal_reading, tenant_scope
from registry_service.usecases.paging import cursor_decode, limit_check, page


def artifact_list(
    context: Context,
    principal: Principal,
    *,
    tenant: str | None,
    adapter: str | None,
    state: str | None,
    cursor: str | None,
    limit: int,
) -> dict[str, Any]:
    """Artifacts the caller may see, newest first.

    Raises:
        MalformedError: an unknown state, a foreign cursor.
        NotFoundError: an unknown tenant, or one the caller is not bound to.
    """
    if state is not None and state not in State.__members__:
        raise MalformedError(f"state: expected one of {', '.join(State)}")
    after = cursor_decode(cursor, 2)
    with principal_reading(context, principal) as (session, own):
        tenant_id = own
        if tenant is not None:
            tenant_id = tenant_get(session, tenant).id
            principal.tenant_check(tenant_id)
        rows = artifact_page(
            session,
            tenant_id=tenant_id,
            adapter=adapter,
            state=state,
            after=(after[0], after[1]) if after else None,
            limit=limit_check(limit) + 1,
        )
        labels = labels_of(session, [(row.tenant_id, row.digest) for row in rows])
    return page(
        rows,
        limit,
        wire=lambda row: artifact_wire(row, labels),
        key=lambda row: (row.submitted_at.isoformat(), row.digest),
    )


def artifact_show(
    context: Context, principal: Principal, tenant: str, digest: Digest
) -> dict[str, Any]:
    """One artifact.

    Raises:
        NotFoundError: no such artifact for this caller.
    """
    with tenant_scope(context, principal, tenant) as scope:
        row = artifact_get(scope.session, scope.tenant.id, digest)
        labels = labels_of(scope.session, [(row.tenant_id, row.digest)])
    return artifact_wire(row, labels)


def artifact_reports(
    context: Context,
    principal: Principal,
    tenant: str,
    digest: Digest,
    *,
    cursor: str | None,
    limit: int,
) -> dict[str, Any]:
    """Reports of an artifact, oldest first; the newest scan has the comparison with its aliases'.

    Raises:
        NotFoundError: no such artifact for this caller.
    """
    after = cursor_decode(cursor, 2)
    with tenant_scope(context, principal, tenant) as scope:
        artifact = artifact_get(scope.session, scope.tenant.id, digest)
        rows = report_list(
            scope.session,
            scope.tenant.id,
            digest,
            after=(after[0], after[1]) if after else None,
            limit=limit_check(limit) + 1,
        )
        rows = reports_compared(scope.session, artifact, rows)
    return page(
        rows,
        limit,
        wire=dict,
        key=lambda row: (row["createdAt"].isoformat(), row["reportDigest"]),
    )


def artifact_verdict(context: Context, principal: Principal, tenant: str, digest: Digest) -> bytes:
    """The signed verdict of an admitted artifact.

    Raises:
        NotFoundError: unknown, somebody else's, not admitted, or revoked.
    """
    with tenant_scope(context, principal, tenant, active=True) as scope:
        row = artifact_get(scope.session, scope.tenant.id, digest)
        envelope = verdict_find(scope.session, row) if row.admitted else None
    if envelope is None:
        raise NotFoundError("not found")
    return envelope


def artifact_withdraw(
    context: Context, principal: Principal, tenant: str, digest: Digest, reason: str
) -> dict[str, Any]:
    """The publisher's side takes an artifact out of review.

    Raises:
        IllegalMoveError: it is not in review.
    """
    return _move(context, principal, tenant, digest, Event.WITHDRAWN, reason)


def artifact_requeue(
    context: Context, principal: Principal, tenant: str, digest: Digest, reason: str
) -> dict[str, Any]:
    """Scan a stalled artifact again.

    Raises:
        IllegalMoveError: it is not stalled.
    """
    return _move(context, principal, tenant, digest, Event.REQUEUED, reason)


def _move(
    context: Context, principal: Principal, tenant: str, digest: Digest, event: Event, reason: str
) -> dict[str, Any]:
    reason = reason_text(reason)
    with tenant_scope(context, principal, tenant) as scope:
        row = artifact_get(scope.session, scope.tenant.id, digest, lock=True)
        artifact_advance(
            scope.session,
            row,
            event,
            actor=principal.subject,
            reason=reason,
            at=context.clock.now(),
        )
        if event is Event.REQUEUED:
            artifact_job_insert(scope.session, row, "scan", context.clock.now())
        return _shown(scope.session, scope.tenant.id, digest)


def _shown(session: Session, tenant_id: UUID, digest: Digest) -> dict[str, Any]:
    row = artifact_get(session, tenant_id, digest)
    return artifact_wire(row, labels_of(session, [(tenant_id, digest)]))


def artifact_wire(row: ArtifactRow, labels: dict[tuple[UUID, str], list[str]]) -> dict[str, Any]:
    """An artifact as it crosses the wire."""
    declared = row.declaration
    return {
        "tenant": row.tenant,
        "ownerTenant": str(row.tenant_id),
        "adapterId": row.adapter,
        "adapterDigest": row.digest,
        "baseModelDigest": row.base_digest,
        "peftType": declared["peftType"],
        "rank": declared["rank"],
        "targetModules": declared["targetModules"],
        "maxReplicas": declared["maxReplicas"],
        "state": row.state,
        "revision": row.revision,
        "admitted": row.admitted,
        "labels": labels.get((row.tenant_id, row.digest), []),
        "publisher": row.publisher,
        "submittedAt": row.submitted_at,
        "bytes": row.bytes,
    }
