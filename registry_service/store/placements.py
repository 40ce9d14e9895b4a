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

_UNTIL = "CAST(:at AS timestamptz) + make_interval(secs => :seconds)"
_OTHERS = text(
    "SELECT count(*) FROM placement WHERE tenant_id = :tenant_id AND artifact_digest = :digest "
    "AND node <> :node"
)
# Grants of different artifacts would count past each other, and past a renewal at the last moment:
# those of a base come one by one.
_POOL_LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended('pool ' || :base, 0))")
# A node that is heard does not hold what it does not renew, and one that is not heard may serve it
# until its revocation list expires.
_END = text("SELECT placements_end(:base, :tenant_id, :digest, :at, :skew)")
_POOL_HELD = text("SELECT held, of_tenant FROM pool_held(:base, :tenant_id, :digest, :node)")
_GRANT = text(
    "INSERT INTO placement (tenant_id, artifact_digest, node, lease_until) "
    f"VALUES (:tenant_id, :digest, :node, {_UNTIL}) "
    "ON CONFLICT (tenant_id, artifact_digest, node) DO UPDATE "
    "SET lease_until = EXCLUDED.lease_until RETURNING lease_until"
)
_RENEW = text(
    f"UPDATE placement p SET lease_until = {_UNTIL} "
    "FROM unnest(CAST(:tenants AS uuid[]), CAST(:digests AS text[])) AS held (tenant_id, digest) "
    "WHERE p.node = :node AND p.tenant_id = held.tenant_id AND p.artifact_digest = held.digest "
    "RETURNING p.tenant_id, p.artifact_digest"
)
_RELEASE = text(
    "DELETE FROM placement WHERE tenant_id = :tenant_id AND artifact_digest = :digest "
    "AND node = :node"
)


@dataclass(frozen=True, slots=True)
class PoolHeld:
    """Adapters that the nodes of a base hold, each node's counted: in all, and of one tenant."""

    held: int
    of_tenant: int


def pool_lock(session: Session, base: str) -> None:
    """Let nobody else grant or renew a lease on the nodes of a base until the commit."""
    session.execute(_POOL_LOCK, {"base": base})


def placements_end(
    session: Session, base: str, *, tenant_id: UUID, digest: str, at: datetime
) -> None:
    """End the leases of a pool and of an artifact that lapsed: what is left is what counts.

    So no renewal brings back what a grant did not count. The caller holds the pool's lock.
    """
    values = {"base": base, "tenant_id": tenant_id, "digest": digest, "at": at}
    session.execute(_END, values | {"skew": limits.CLOCK_SKEW_SECONDS})


def pool_held(session: Session, base: str, *, tenant_id: UUID, digest: str, node: str) -> PoolHeld:
    """What a pool holds beside one node's lease on one artifact."""
    values = {"base": base, "tenant_id": tenant_id, "digest": digest, "node": node}
    row = session.execute(_POOL_HELD, values).one()
    return PoolHeld(row.held, row.of_tenant)


def placement_others(session: Session, *, tenant_id: UUID, digest: str, node: str) -> int:
    """How many other nodes hold an artifact."""
    values = {"tenant_id": tenant_id, "digest": digest, "node": node}
    return int(session.execute(_OTHERS, values).scalar_one())


def placement_grant(
    session: Session, *, tenant_id: UUID, digest: str, node: str, at: datetime
) -> datetime:
    """Grant or renew a node's lease; its end. The caller has made sure that there is a place."""
    values = {
        "tenant_id": tenant_id,
        "digest": digest,
        "node": node,
        "at": at,
        "seconds": limits.NODE_LEASE_SECONDS,
    }
    until: datetime = session.execute(_GRANT, values).scalar_one()
    return until


def placements_renew(
    session: Session, node: str, held: Sequence[tuple[UUID, str]], at: datetime
) -> set[tuple[UUID, str]]:
    """Renew those of a node's leases that nobody ended; which ones they were.

    The caller holds the lock of the node's pool.
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
