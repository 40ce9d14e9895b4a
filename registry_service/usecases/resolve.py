"""Names become digests, and digests become bytes, for admitted artifacts only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from registry_service.domain.digests import Digest, is_digest
from registry_service.domain.errors import NotFoundError
from registry_service.domain.lifecycle import WITHDRAWN_STATES
from registry_service.domain.roles import Principal, Role
from registry_service.store.artifacts import ArtifactRow, artifact_find, artifacts_with_blob
from registry_service.store.bases import base_find
from registry_service.store.blobs import blob_size
from registry_service.store.tags import TagRow, tag_find, tag_page
from registry_service.usecases.context import Context, tenant_scope

# Who may read an artifact before it is admitted: those who check it.
_CHECKERS = frozenset({Role.VALIDATOR, Role.REVIEWER})


@dataclass(frozen=True, slots=True)
class Resolved:
    """A reference bound to an artifact; ``tag`` is None for a digest."""

    artifact: ArtifactRow
    tag: TagRow | None


def reference_resolve(session: Session, tenant_id: UUID, adapter: str, reference: str) -> Resolved:
    """The admitted artifact that a digest, label or alias names.

    Raises:
        NotFoundError: unknown, not admitted, or revoked: one answer.
    """
    tag = None
    digest = reference
    if not is_digest(reference):
        tag = tag_find(session, tenant_id, adapter, reference)
        if tag is None:
            raise NotFoundError("not found")
        digest = tag.artifact_digest
    artifact = artifact_find(session, tenant_id, digest)
    if artifact is None or artifact.adapter != adapter or not artifact.admitted:
        raise NotFoundError("not found")
    return Resolved(artifact, tag)


def resolve(
    context: Context, principal: Principal, tenant: str, adapter: str, reference: str
) -> dict[str, Any]:
    """What a serving node needs to know of a reference.

    Raises:
        NotFoundError: unknown, somebody else's, not admitted, or revoked: one answer.
    """
    with tenant_scope(context, principal, tenant, active=True) as scope:
        found = reference_resolve(scope.session, scope.tenant.id, adapter, reference)
        base = base_find(scope.session, found.artifact.base_digest)
    if base is None:
        raise NotFoundError("not found")
    tag, artifact = found.tag, found.artifact
    return {
        "tenant": artifact.tenant,
        "tenantId": str(artifact.tenant_id),
        "adapter": adapter,
        "reference": reference,
        "kind": "digest" if tag is None else tag.kind,
        "generation": None if tag is None else tag.generation,
        "adapterDigest": artifact.digest,
        "baseModelDigest": artifact.base_digest,
        "tokenizerDigest": artifact.declaration["tokenizerDigest"],
        "chatTemplateDigest": artifact.declaration["chatTemplateDigest"],
    }


def manifest_pull(
    context: Context, principal: Principal, tenant: str, adapter: str, reference: str
) -> tuple[Digest, bytes]:
    """The manifest that a reference names.

    Raises:
        NotFoundError: the caller may not pull it: one answer.
    """
    with tenant_scope(context, principal, tenant, active=True) as scope:
        digest = reference
        if not is_digest(reference):
            tag = tag_find(scope.session, scope.tenant.id, adapter, reference)
            digest = "" if tag is None else tag.artifact_digest
        artifact = artifact_find(scope.session, scope.tenant.id, digest)
    if artifact is None or artifact.adapter != adapter or not _may_pull(principal, artifact):
        raise NotFoundError("not found")
    return artifact.digest, artifact.manifest


def blob_pull(
    context: Context, principal: Principal, tenant: str, adapter: str, digest: Digest
) -> tuple[UUID, int]:
    """Where a blob of the adapter is: the tenant's id and the size in bytes.

    A publisher may ask for any blob of its tenant, so that it need not send it twice.

    Raises:
        NotFoundError: no artifact that the caller may pull holds it.
    """
    with tenant_scope(context, principal, tenant, active=True) as scope:
        size = blob_size(scope.session, scope.tenant.id, digest)
        if size is None:
            raise NotFoundError("not found")
        holders = artifacts_with_blob(scope.session, scope.tenant.id, digest)
    if principal.role is Role.PUBLISHER and not holders:
        return scope.tenant.id, size
    for artifact in holders:
        if artifact.adapter == adapter and _may_pull(principal, artifact):
            return scope.tenant.id, size
    raise NotFoundError("not found")


def tag_names(
    context: Context, principal: Principal, tenant: str, adapter: str, *, after: str, limit: int
) -> list[str]:
    """Labels and aliases that name something the caller may pull, in byte order.

    Raises:
        NotFoundError: no such adapter for this caller.
    """
    with tenant_scope(context, principal, tenant, active=True) as scope:
        tags = tag_page(
            scope.session, scope.tenant.id, adapter, after=after, limit=limit, kind=None
        )
        names = []
        for tag in tags:
            artifact = artifact_find(scope.session, scope.tenant.id, tag.artifact_digest)
            if artifact is not None and _may_pull(principal, artifact):
                names.append(tag.name)
    if not names and not after:
        raise NotFoundError("not found")
    return names


def _may_pull(principal: Principal, artifact: ArtifactRow) -> bool:
    if artifact.admitted:
        return True
    return principal.role in _CHECKERS and artifact.state not in WITHDRAWN_STATES
