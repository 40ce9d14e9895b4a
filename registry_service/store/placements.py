"""Placement leases: which nodes may hold an artifact. One row per artifact and node.

The nodes of one base are a pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session

from registry_service.domain import limits
from registry_service.store.nodes import SERVING_UNTIL

_UNTIL = "CAST(:at AS timestamptz) + make_interval(secs => :seconds)"
# A node that is heard does not hold what it does not renew; one that is not heard may serve it
# until its revocation list expires.
_LAPSED = text(
    "DELETE FROM placement p USING node n WHERE p.tenant_id = :tenant_id "
    "AND p.artifact_digest = :digest AND p.lease_until <= :at AND n.name = p.node "
    f"AND (n.lease_until > :at OR {SERVING_UNTIL} <= :at)"
)
_OTHERS = text(
    "SELECT count(*) FROM placement WHERE tenant_id = :tenant_id AND artifact_digest = :digest "
    "AND node <> :node"
)
# Grants of different artifacts would count past each other, and past a renewal at the last moment:
# those of a base come one by one.
_POOL_LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended('pool ' || :base, 0))")
_POOL_HELD = text(
    "SELECT held, of_tenant FROM pool_held(:base, :tenant_id, :digest, :node, :at, :skew)"
)
_GRANT = text(
    "INSERT INTO placement (tenant_id, artifact_digest, node, lease_until) "
    f"VALUES (:tenant_id, :digest, :node, {_UNTIL}) "
    "ON CONFLICT (tenant_id, artifact_digest, node) DO UPDATE "
    "SET lease_until = EXCLUDED.lease_until RETURNING lease_until"
)
# Only what others count still: what lapsed may have been given to them.
_RENEW = text(
    f"UPDATE placement p SET lease_until = {_UNTIL} "
    "FROM unnest(CAST(:tenants AS uuid[]), CAST(:digests AS text[])) AS held (tenant_id, digest), "
    "node n WHERE p.node = :node AND p.tenant_id = held.tenant_id "
    "AND p.artifact_digest = held.digest AND n.name = p.node "
    f"AND (p.lease_until > :at OR (n.lease_until <= :at AND {SERVING_UNTIL} > :at)) "
    "RETURNING p.tenant_id, p.artifact_digest"
)
_RELEASE = text(
    "DELETE FROM placement WHERE tenant_id = :tenant_id AND artifact_digest = :digest "
    "AND node = :node"
)


def placement_grant(
    session: Session, *, tenant_id: UUID, digest: str, node: str, replicas: int, at: datetime
) -> datetime | None:
    """Grant or renew a node's lease; its end, or None when ``replicas`` other nodes hold theirs.

    The caller holds the artifact's row lock. Leases that ended are deleted first: a renewal that
    comes at the same moment either was before it, and is counted, or finds its row gone.
    """
    values = {
        "tenant_id": tenant_id,
        "digest": digest,
        "node": node,
        "at": at,
        "seconds": limits.NODE_LEASE_SECONDS,
    }
    session.execute(_LAPSED, values)
    if session.execute(_OTHERS, values).scalar_one() >= replicas:
        return None
    until: datetime = session.execute(_GRANT, values).scalar_one()
    return until


@dataclass(frozen=True, slots=True)
class PoolHeld:
    """Adapters that the nodes of a base hold, each node's counted: in all, and of one tenant."""

    held: int
    of_tenant: int


def pool_lock(session: Session, base: str) -> None:
    """Let nobody else grant or renew a lease on the nodes of a base until the commit."""
    session.execute(_POOL_LOCK, {"base": base})


def pool_held(
    session: Session, base: str, *, tenant_id: UUID, digest: str, node: str, at: datetime
) -> PoolHeld:
    """What a pool holds beside one node's lease on one artifact. The caller has its lock."""
    row = session.execute(
        _POOL_HELD,
        {
            "base": base,
            "tenant_id": tenant_id,
            "digest": digest,
            "node": node,
            "at": at,
            "skew": limits.CLOCK_SKEW_SECONDS,
        },
    ).one()
    return PoolHeld(row.held, row.of_tenant)


def placements_renew(
    session: Session, node: str, held: Sequence[tuple[UUID, str]], at: datetime
) -> set[tuple[UUID, str]]:
    """Renew those of a node's leases that did not lapse; which ones they were.

    The caller has the lock of the node's pool.
    """
    values = {
        "node": node,
        "tenants": [str(tenant_id) for tenant_id, _ in held],
        "digests": [digest for _, digest in held],
        "at": at,
        "seconds": limits.NODE_LEASE_SECONDS,
    }
    return {(row.tenant_id, row.artifact_digest) for row in session.execute(_RENEW, values)}


def placement_release(session: Session, *, tenant_id: UUID, digest: str, node: str) -> None:
    """End a node's lease, if it has one."""
    session.execute(_RELEASE, {"tenant_id": tenant_id, "digest": digest, "node": node})
