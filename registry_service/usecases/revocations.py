"""Revocation: refused everywhere at commit, REVOKED when no node can hold it any more."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from registry_service.domain.digests import Digest
from registry_service.domain.errors import ForbiddenError, MalformedError, NotFoundError
from registry_service.domain.lifecycle import WITHDRAWN_STATES, Event, State
from registry_service.domain.names import reason_text
from registry_service.domain.roles import Principal
from registry_service.store import nodes as store
from registry_service.store import revocation_list as list_store
from registry_service.store.artifacts import ArtifactRow, artifact_advance, artifact_get
from registry_service.store.events import event_append
from registry_service.store.jobs import job_finish, jobs_open
from registry_service.usecases.context import Context, tenant_scope, tenant_transaction
from registry_service.usecases.revocation_list import revocation_list_issue

_DEADLINE_SECONDS = 24 * 3600


def revoke(
    context: Context,
    principal: Principal,
    tenant: str,
    digest: Digest,
    *,
    reason: str,
    deadline_seconds: int | None,
) -> dict[str, Any]:
    """Revoke an artifact; safe to repeat. The answer names the nodes that are outstanding.

    Without ``deadline_seconds`` requests that run come to their end; 0 cancels them at once.
    Repeated with a deadline that is sooner, that one counts; it is never put off.

    Raises:
        IllegalMoveError: it is REJECTED. MalformedError: a negative or unbounded deadline.
        RefusedError: the list of revocations is full of what has to stay; nothing changed.
    """
    reason = reason_text(reason)
    if deadline_seconds is not None and not 0 <= deadline_seconds <= _DEADLINE_SECONDS:
        raise MalformedError(f"deadlineSeconds: expected 0 to {_DEADLINE_SECONDS}")
    with tenant_scope(context, principal, tenant) as scope:
        artifact = artifact_get(scope.session, scope.tenant.id, digest, lock=True)
        if artifact.state not in WITHDRAWN_STATES:
            _revoke(context, scope.session, artifact, principal, reason, deadline_seconds)
        elif artifact.state is State.REVOKING and deadline_seconds is not None:
            _hasten(context, scope.session, artifact, principal, reason, deadline_seconds)
    drained_settle(context, scope.tenant.id, digest)
    return revocation_show(context, principal, tenant, digest)


def revocation_show(
    context: Context, principal: Principal, tenant: str, digest: Digest
) -> dict[str, Any]:
    """How far a revocation is.

    Raises:
        NotFoundError: there is none.
    """
    with tenant_scope(context, principal, tenant) as scope:
        shown = store.revocation_show(scope.session, scope.tenant.id, digest)
    if shown is None:
        raise NotFoundError("not found")
    return shown


def revocation_acknowledge(
    context: Context,
    principal: Principal,
    node: str,
    *,
    tenant_id: UUID,
    digest: Digest,
    freed_bytes: int,
    purged_blocks: int,
) -> None:
    """A node says that it let go of a revoked artifact; safe to repeat.

    Raises:
        NotFoundError: no such revocation. ForbiddenError: another node's name.
    """
    now = context.clock.now()
    with tenant_transaction(context, tenant_id) as session:
        if store.node_get(session, node).subject != principal.subject:
            raise ForbiddenError("expected a node of this token, got another's")
        if store.revocation_show(session, tenant_id, digest) is None:
            raise NotFoundError("not found")
        if store.revocation_acknowledge(
            session,
            tenant_id=tenant_id,
            digest=digest,
            node=node,
            freed_bytes=freed_bytes,
            purged_blocks=purged_blocks,
            at=now,
        ):
            event_append(
                session,
                tenant_id=tenant_id,
                kind="revocation.acknowledged",
                subject=digest,
                actor=principal.subject,
                at=now,
                body={"node": node, "freedBytes": freed_bytes, "purgedBlocks": purged_blocks},
            )
    drained_settle(context, tenant_id, digest)


def drained_settle(context: Context, tenant_id: UUID, digest: str) -> bool:
    """Move a REVOKING artifact to REVOKED when no node can hold it; True when it moved."""
    with tenant_transaction(context, tenant_id) as session:
        artifact = artifact_get(session, tenant_id, digest, lock=True)
        if artifact.state is not State.REVOKING or store.revocation_outstanding(
            session, tenant_id, digest
        ):
            return False
        artifact_advance(
            session,
            artifact,
            Event.DRAINED,
            actor="sweeper",
            reason="every node acknowledged, or its revocation list expired",
            at=context.clock.now(),
        )
    return True


def _revoke(
    context: Context,
    session: Session,
    artifact: ArtifactRow,
    principal: Principal,
    reason: str,
    deadline_seconds: int | None,
) -> None:
    now = context.clock.now()
    for job in jobs_open(session, artifact.tenant_id, artifact.digest):
        job_finish(session, job, "DONE", "revoked")
    artifact_advance(
        session,
        artifact,
        Event.REVOKED,
        actor=principal.subject,
        reason=reason,
        at=now,
        details={"deadlineSeconds": deadline_seconds},
    )
    list_store.revocation_insert(
        session,
        artifact,
        reason=reason,
        actor=principal.subject,
        every_tenant=principal.is_platform,
        deadline_seconds=deadline_seconds,
        at=now,
    )
    revocation_list_issue(context, session, now)
    # After the list: under its lock it is known how long every node may go on unheard.
    store.revocation_nodes_insert(session, artifact, at=now)


def _hasten(
    context: Context,
    session: Session,
    artifact: ArtifactRow,
    principal: Principal,
    reason: str,
    deadline_seconds: int,
) -> None:
    now = context.clock.now()
    if not list_store.revocation_hasten(
        session, artifact, _since(list_store.revoked_at(session, artifact), now) + deadline_seconds
    ):
        return
    event_append(
        session,
        tenant_id=artifact.tenant_id,
        kind="revocation.hastened",
        subject=artifact.digest,
        actor=principal.subject,
        at=now,
        body={"deadlineSeconds": deadline_seconds, "reason": reason},
    )
    revocation_list_issue(context, session, now)


def _since(start: datetime, now: datetime) -> int:
    return max(0, math.ceil((now - start).total_seconds()))
