"""Placement leases: an artifact is held by at most as many nodes as it declares (maxReplicas).

All nodes of a base, its pool, hold no more adapters than the service allows, and of each tenant no
more than its part.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    PlacementTakenError,
    PoolFullError,
    PoolTenantFullError,
    RefusedError,
)
from registry_service.domain.roles import Principal
from registry_service.store import placements as store
from registry_service.store.artifacts import ArtifactRow, artifact_get
from registry_service.store.nodes import NodeRow, node_get
from registry_service.usecases.context import (
    Context,
    system_transaction,
    tenant_scope,
    tenant_transaction,
)

# What a node reports of an adapter that it holds, or is about to.
_HELD = frozenset({"LOADING", "SERVING", "DRAINING"})
_SERVING = "SERVING"


def placement_take(
    context: Context, principal: Principal, node: str, tenant: str, digest: Digest
) -> dict[str, Any]:
    """Let a node hold an artifact for a while; safe to repeat.

    Raises:
        PlacementTakenError: maxReplicas other nodes hold it. PoolFullError, PoolTenantFullError:
        the nodes of its base hold as many adapters as they may, in all or of this tenant.
        NotFoundError: an unknown node, or nothing admitted under this digest. RefusedError: another
        base than the node's. ForbiddenError: another node's name.
    """
    with tenant_scope(context, principal, tenant, active=True) as scope:
        row = node_get(scope.session, node)
        _own_check(row, principal)
        return _granted(context, scope.session, scope.tenant.id, row, digest)


def placement_release(
    context: Context, principal: Principal, node: str, tenant: str, digest: Digest
) -> None:
    """A node does not hold an artifact any more; safe to repeat.

    Raises:
        NotFoundError: an unknown node or tenant. ForbiddenError: another node's name.
    """
    with tenant_scope(context, principal, tenant) as scope:
        _own_check(node_get(scope.session, node), principal)
        store.placement_release(scope.session, tenant_id=scope.tenant.id, digest=digest, node=node)


def placements_renew(
    context: Context, node: NodeRow, residents: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Renew the leases of what a node reports; those that it lost, in wire form.

    A lease that lapsed is given back when nobody took the place meanwhile. Renew before the
    node is heard of: from then on, what it does not renew is ended.
    """
    held = [
        (UUID(item["tenantId"]), Digest(item["adapterDigest"]))
        for item in residents
        if item["state"] in _HELD
    ]
    if not held:
        return []
    with system_transaction(context) as session:
        store.pool_lock(session, node.base_digest)
        renewed = store.placements_renew(session, node.name, held, context.clock.now())
    serving = {
        (UUID(item["tenantId"]), Digest(item["adapterDigest"]))
        for item in residents
        if item["state"] == _SERVING
    }
    return [
        {"tenantId": str(tenant_id), "adapterDigest": digest}
        for tenant_id, digest in sorted(serving - renewed)
        if not _given_back(context, node, tenant_id, digest)
    ]


def _given_back(context: Context, node: NodeRow, tenant_id: UUID, digest: Digest) -> bool:
    with tenant_transaction(context, tenant_id) as session:
        try:
            _granted(context, session, tenant_id, node, digest)
        except (ConflictError, NotFoundError, RefusedError):
            return False
    return True


def _granted(
    context: Context, session: Session, tenant_id: UUID, node: NodeRow, digest: Digest
) -> dict[str, Any]:
    artifact = artifact_get(session, tenant_id, digest, lock=True)
    if not artifact.admitted:
        raise NotFoundError("not found")
    if artifact.base_digest != node.base_digest:
        raise RefusedError(
            f"expected an artifact of this node's base {node.base_digest}, "
            f"got one of {artifact.base_digest}"
        )
    _place_check(context, session, artifact, node)
    until = store.placement_grant(
        session, tenant_id=tenant_id, digest=digest, node=node.name, at=context.clock.now()
    )
    return {
        "node": node.name,
        "tenantId": tenant_id,
        "adapterDigest": digest,
        "expiresAt": until,
        "leaseSeconds": limits.NODE_LEASE_SECONDS,
    }


def _place_check(context: Context, session: Session, artifact: ArtifactRow, node: NodeRow) -> None:
    """There is a place for it on this node; it stays free until the commit.

    Its own replicas come first: a node that heard of a full pool might give up another adapter.
    """
    owner, digest, base = artifact.tenant_id, artifact.digest, node.base_digest
    store.pool_lock(session, base)
    at = context.clock.now()
    store.placements_end(session, base, tenant_id=owner, digest=digest, at=at)
    found = store.pool_held(session, base, tenant_id=owner, digest=digest, node=node.name)
    others = store.placement_others(session, tenant_id=owner, digest=digest, node=node.name)
    replicas = int(artifact.declaration["maxReplicas"])
    if others >= replicas:
        raise PlacementTakenError(
            f"expected fewer than {replicas} other nodes that hold it, got {others}; "
            "send requests to one of them, or publish with a larger maxReplicas"
        )
    for refusal, what, held, most in (
        (PoolTenantFullError, "of this tenant ", found.of_tenant, context.pool_tenant_adapters),
        (PoolFullError, "", found.held, context.pool_adapters),
    ):
        if held >= most:
            raise refusal(
                f"expected fewer than {most} adapters {what}on the nodes of this base, got {held}; "
                "ask the operator for a larger limit, or for requests spread over fewer nodes"
            )


def _own_check(node: NodeRow, principal: Principal) -> None:
    if node.subject != principal.subject:
        raise ForbiddenError("expected a node of this token, got another's")
