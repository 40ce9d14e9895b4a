"""People decide; the last approval that is needed signs the verdict."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from registry_service.domain.digests import Digest
from registry_service.domain.errors import ConflictError, IllegalMoveError, MalformedError
from registry_service.domain.lifecycle import Event, State
from registry_service.domain.names import reason_text
from registry_service.domain.policy import approvals_reached, review_check
from registry_service.domain.roles import Principal
from registry_service.store import reviews as store
from registry_service.store.artifacts import (
    ArtifactRow,
    artifact_advance,
    artifact_files,
    artifact_get,
)
from registry_service.store.bases import base_get
from registry_service.trust.dsse import IN_TOTO, dsse_sign
from registry_service.trust.verdict import VerdictClaims, verdict_statement
from registry_service.usecases.artifacts import artifact_show
from registry_service.usecases.context import Context, Scope, tenant_scope
from registry_service.usecases.paging import cursor_decode, limit_check, page


def review_submit(
    context: Context,
    principal: Principal,
    tenant: str,
    digest: Digest,
    *,
    decision: str,
    reason: str,
) -> dict[str, Any]:
    """Record a reviewer's decision and move the artifact when it decides.

    Raises:
        IllegalMoveError: not in review. ForbiddenError: one's own artifact.
        ConflictError: its base is not usable any more.
    """
    if decision not in ("approve", "reject"):
        raise MalformedError("decision: expected 'approve' or 'reject'")
    reason = reason_text(reason)
    now = context.clock.now()
    with tenant_scope(context, principal, tenant, active=True) as scope:
        artifact = artifact_get(scope.session, scope.tenant.id, digest, lock=True)
        if artifact.state is not State.IN_REVIEW:
            raise IllegalMoveError(
                f"expected an artifact in IN_REVIEW, got one in {artifact.state}"
            )
        review_check(context.policy, artifact.publisher, principal.subject)
        approvals = store.review_insert(
            scope.session,
            artifact,
            reviewer=principal.subject,
            decision=decision,
            reason=reason,
            at=now,
        )
        _decide(context, scope, artifact, principal.subject, decision, reason, approvals)
    return artifact_show(context, principal, tenant, digest)


def review_list(
    context: Context,
    principal: Principal,
    tenant: str,
    digest: Digest,
    *,
    cursor: str | None,
    limit: int,
) -> dict[str, Any]:
    """Decisions on an artifact, oldest first.

    Raises:
        NotFoundError: no such artifact for this caller.
    """
    after = cursor_decode(cursor, 2)
    with tenant_scope(context, principal, tenant) as scope:
        artifact_get(scope.session, scope.tenant.id, digest)
        rows = store.review_list(
            scope.session,
            scope.tenant.id,
            digest,
            after=(after[0], after[1]) if after else None,
            limit=limit_check(limit) + 1,
        )
    return page(rows, limit, wire=dict, key=lambda row: (row["at"].isoformat(), row["reviewer"]))


def _decide(
    context: Context,
    scope: Scope,
    artifact: ArtifactRow,
    actor: str,
    decision: str,
    reason: str,
    approvals: int,
) -> None:
    now = context.clock.now()
    if decision == "reject":
        artifact_advance(
            scope.session, artifact, Event.REJECTED, actor=actor, reason=reason, at=now
        )
    elif approvals_reached(context.policy, approvals):
        _, event_id = artifact_advance(
            scope.session, artifact, Event.APPROVED, actor=actor, reason=reason, at=now
        )
        _verdict_issue(context, scope.session, artifact, event_id, now)


def _verdict_issue(
    context: Context, session: Session, artifact: ArtifactRow, event_id: UUID, now: datetime
) -> None:
    base = base_get(session, artifact.base_digest)
    if base.state != "USABLE" or base.catalog_digest is None:
        raise ConflictError(
            f"expected a usable base, got one that is {base.state}; resolve its catalogs first"
        )
    reports = store.report_list(session, artifact.tenant_id, artifact.digest)
    not_after = now + timedelta(seconds=context.policy.verdict_seconds)
    claims = VerdictClaims(
        adapter_digest=artifact.digest,
        base_digest=artifact.base_digest,
        tenant_id=artifact.tenant_id,
        tenant=artifact.tenant,
        adapter=artifact.adapter,
        files=tuple(
            (file.path, file.digest)
            for file in artifact_files(session, artifact.tenant_id, artifact.digest)
        ),
        catalog_digest=base.catalog_digest,
        policy_digest=context.policy.digest,
        input_attestations=tuple(
            (f"urn:adapter-registry:report:{report['stage']}", report["reportDigest"])
            for report in reports
        ),
        issued_at=now,
        not_after=not_after,
        verifier_id=context.verifier_id,
    )
    signer = context.verdict_signer
    envelope = dsse_sign(IN_TOTO, verdict_statement(claims), signer.sign, signer.key_id)
    store.verdict_put(
        session,
        artifact,
        envelope=envelope,
        policy_digest=context.policy.digest,
        not_after=not_after,
        event_id=event_id,
        at=now,
    )
