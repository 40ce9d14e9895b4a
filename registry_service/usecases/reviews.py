"""People decide; the last approval that is needed signs the verdict."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from registry_service.domain.digests import Digest, digest_parse
from registry_service.domain.errors import ConflictError, IllegalMoveError, MalformedError
from registry_service.domain.lifecycle import Event, State
from registry_service.domain.names import reason_text
from registry_service.domain.policy import AdmissionPolicy, approvals_reached, review_check
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
from registry_service.usecases.context import Context, Scope, policy_of, tenant_scope
from registry_service.usecases.paging import cursor_decode, limit_check, page
from registry_service.usecases.revocation_list import listed_check


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
        ConflictError: its base is not usable any more, or the tenant's policy is stricter by now
            than the one that the scan ran under. RefusedError: its bytes are revoked.
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
        listed_check(scope.session, artifact)
        _, event_id = artifact_advance(
            scope.session, artifact, Event.APPROVED, actor=actor, reason=reason, at=now
        )
        _verdict_issue(context, scope, artifact, event_id, now)


def _verdict_issue(
    context: Context, scope: Scope, artifact: ArtifactRow, event_id: UUID, now: datetime
) -> None:
    session = scope.session
    base = base_get(session, artifact.base_digest)
    if base.state != "USABLE" or base.catalog_digest is None:
        raise ConflictError(
            f"expected a usable base, got one that is {base.state}; resolve its catalogs first"
        )
    reports = store.report_list(session, artifact.tenant_id, artifact.digest)
    scan = [report for report in reports if report["stage"] == "scan"][-1]["measurements"]
    policy = _policy_scanned_under(context, scope, scan)
    not_after = now + timedelta(seconds=policy.verdict_seconds)
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
        catalog_digest=digest_parse(scan["catalogDigest"]),
        policy_digest=policy.digest,
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
        policy_digest=policy.digest,
        not_after=not_after,
        event_id=event_id,
        at=now,
    )


def _policy_scanned_under(context: Context, scope: Scope, scan: dict[str, Any]) -> AdmissionPolicy:
    """The rules that the artifact passed the scan under; the tenant's of now must not be stricter.

    Raises:
        ConflictError: what the scan allowed is forbidden to this tenant by now.
    """
    full_tensors = scan["fullTensors"]
    policy = policy_of(context, scope.tenant)
    if full_tensors and not policy.full_tensors:
        raise ConflictError(
            "expected an artifact that was scanned under the tenant's policy of now, got one "
            "scanned while full tensors were allowed; reject it, or ask an operator to allow them "
            "again ('adapterctl tenant policy')"
        )
    return replace(policy, full_tensors=full_tensors)
