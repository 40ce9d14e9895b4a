"""Names become digests, and digests become bytes, for admitted artifacts only."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from registry_service.domain.digests import Digest, is_digest
from registry_service.domain.errors import NotFoundError
from registry_service.domain.lifecycle import WITHDRAWN_STATES
from registry_service.domain.policy import tenant_active_check
from registry_service.domain.roles import Principal, Role
from registry_service.store.artifacts import ArtifactRow, artifact_find, artifacts_with_blob
from registry_service.store.blobs import blob_size
from registry_service.store.tags import reference_resolve, tag_find, tag_names_admitted
from registry_service.usecases.context import Context, lookup, tenant_scope

# Who may read an artifact before it is admitted: those who check it.
_CHECKERS = frozenset({Role.VALIDATOR, Role.REVIEWER})


def resolve(
    context: Context, principal: Principal, tenant: str, adapter: str, reference: str
) -> dict[str, Any]:
    """What a serving node needs to know of a reference.

    Raises:
        NotFoundError: unknown, somebody else's, not admitted, or revoked: one answer.
    """
    with lookup(context) as connection:
        found = reference_resolve(connection, tenant, adapter, reference)
    principal.tenant_check(found.tenant_id)
    tenant_active_check(found.tenant_state)
    return {
        "tenant": tenant,
        "tenantId": str(found.tenant_id),
        "adapter": adapter,
        "reference": reference,
        "kind": found.kind,
        "generation": found.generation,
        "adapterDigest": found.digest,
        "baseModelDigest": found.base_digest,
        "tokenizerDigest": found.tokenizer_digest,
        "chatTemplateDigest": found.chat_template_digest,
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

    A publisher reads what it has pushed until an artifact holds it.

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


def blob_known(context: Context, principal: Principal, tenant: str, digest: Digest) -> int:
    """For a publisher, so that it need not send a blob twice: the size of one of its tenant's.

    Raises:
        NotFoundError: the tenant has no such blob.
    """
    with tenant_scope(context, principal, tenant, active=True) as scope:
        size = blob_size(scope.session, scope.tenant.id, digest)
    if size is None:
        raise NotFoundError("not found")
    return size


def tag_names(
    context: Context, principal: Principal, tenant: str, adapter: str, *, after: str, limit: int
) -> list[str]:
    """Labels and aliases of admitted artifacts, in byte order.

    Raises:
        NotFoundError: none at all, or no such adapter for this caller.
    """
    with tenant_scope(context, principal, tenant, active=True) as scope:
        names = tag_names_admitted(
            scope.session, scope.tenant.id, adapter, after=after, limit=limit
        )
    if not names and not after:
        raise NotFoundError("not found")
    return names


def _may_pull(principal: Principal, artifact: ArtifactRow) -> bool:
    if artifact.admitted:
        return True
    return principal.role in _CHECKERS and artifact.state not in WITHDRAWN_STATES
