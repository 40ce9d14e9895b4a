"""Serving nodes and what is outstanding of each revocation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session

from registry_service.domain import limits
from registry_service.domain.errors import NotFoundError
from registry_service.domain.lifecycle import State
from registry_service.store.artifacts import ArtifactRow
from registry_service.store.database import rows_changed


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One serving node. It is LIVE while its heartbeat lease runs."""

    name: str
    subject: str
    url: str
    base_digest: str
    catalog_digest: str
    feed_index: int
    residents: list[dict[str, Any]]
    registered_at: datetime
    last_seen_at: datetime
    lease_until: datetime
    fresh_until: datetime


_UPSERT = text(
    "INSERT INTO node (name, subject, url, base_digest, catalog_digest, registered_at, "
    "last_seen_at, lease_until, fresh_until) VALUES (:name, :subject, :url, :base, :catalog, :at, "
    ":at, :at + make_interval(secs => :lease), :fresh_until) ON CONFLICT (name) DO UPDATE SET "
    "url = :url, base_digest = :base, catalog_digest = :catalog, registered_at = :at, "
    "last_seen_at = :at, lease_until = EXCLUDED.lease_until, "
    "fresh_until = greatest(node.fresh_until, EXCLUDED.fresh_until)"
)
# A node is heard while its lease runs, and may serve unheard until its revocation list expires. Its
# clock may be behind by as much as a list may come from its future.
SERVING_UNTIL: Final = (
    f"greatest(n.lease_until, n.fresh_until + make_interval(secs => {limits.CLOCK_SKEW_SECONDS}))"
)


def node_upsert(
    session: Session,
    *,
    name: str,
    subject: str,
    url: str,
    base_digest: str,
    catalog_digest: str,
    fresh_until: datetime,
    at: datetime,
) -> None:
    """Register a node, or register it anew; it may serve by a list until ``fresh_until``."""
    values = {
        "name": name,
        "subject": subject,
        "url": url,
        "base": base_digest,
        "catalog": catalog_digest,
        "fresh_until": fresh_until,
        "at": at,
        "lease": limits.NODE_LEASE_SECONDS,
    }
    session.execute(_UPSERT, values)


def node_get(session: Session, name: str) -> NodeRow:
    """One node.

    Raises:
        NotFoundError: no such node.
    """
    row = session.execute(text("SELECT * FROM node WHERE name = :name"), {"name": name})
    found = row.one_or_none()
    if found is None:
        raise NotFoundError("not found")
    return NodeRow(**found._mapping)


def node_renew(
    session: Session, name: str, *, feed_index: int, residents: list[dict[str, Any]], at: datetime
) -> None:
    """Renew a node's lease and keep what it reports."""
    session.execute(
        text(
            "UPDATE node SET feed_index = :feed_index, residents = CAST(:residents AS jsonb), "
            "last_seen_at = :at, lease_until = :at + make_interval(secs => :lease) "
            "WHERE name = :name"
        ),
        {
            "feed_index": feed_index,
            "residents": json.dumps(residents),
            "at": at,
            "lease": limits.NODE_LEASE_SECONDS,
            "name": name,
        },
    )


def residents_unapproved(
    session: Session, residents: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Of what a node reports (tenant id, digest), what is unknown or not approved."""
    rows = session.execute(
        text(
            "SELECT held.tenant_id, held.digest FROM unnest(CAST(:tenants AS uuid[]), "
            "CAST(:digests AS text[])) WITH ORDINALITY AS held (tenant_id, digest, place) "
            "LEFT JOIN artifact a ON a.tenant_id = held.tenant_id AND a.digest = held.digest "
            "WHERE a.state IS DISTINCT FROM :approved ORDER BY held.place"
        ),
        {
            "tenants": [tenant_id for tenant_id, _ in residents],
            "digests": [digest for _, digest in residents],
            "approved": State.APPROVED,
        },
    )
    return [(str(row.tenant_id), row.digest) for row in rows]


def node_page(session: Session, *, after: str, limit: int) -> list[NodeRow]:
    """Nodes by name, after a name."""
    rows = session.execute(
        text("SELECT * FROM node WHERE name > :after ORDER BY name LIMIT :limit"),
        {"after": after, "limit": limit},
    )
    return [NodeRow(**row._mapping) for row in rows]


def node_fresh(session: Session, name: str, until: datetime) -> None:
    """Remember until when a node may serve by the list that it was given, if it is registered."""
    session.execute(
        text("UPDATE node SET fresh_until = :until WHERE name = :name AND fresh_until < :until"),
        {"until": until, "name": name},
    )


def revocation_nodes_insert(session: Session, artifact: ArtifactRow, *, at: datetime) -> None:
    """Record as outstanding every node of the artifact's base that may be serving."""
    session.execute(
        text(
            "INSERT INTO revocation_node (tenant_id, artifact_digest, node) "
            "SELECT :tenant_id, :digest, n.name FROM node n WHERE n.base_digest = :base "
            f"AND {SERVING_UNTIL} > :at"
        ),
        {
            "tenant_id": artifact.tenant_id,
            "digest": artifact.digest,
            "base": artifact.base_digest,
            "at": at,
        },
    )


def revocation_show(session: Session, tenant_id: UUID, digest: str) -> dict[str, Any] | None:
    """A revocation with its nodes in wire form, or None."""
    values = {"tenant_id": tenant_id, "digest": digest}
    row = session.execute(
        text(
            "SELECT r.artifact_digest, a.state, r.reason, r.actor, r.at, r.deadline_seconds "
            "FROM revocation r JOIN artifact a ON a.tenant_id = r.tenant_id "
            "AND a.digest = r.artifact_digest "
            "WHERE r.tenant_id = :tenant_id AND r.artifact_digest = :digest"
        ),
        values,
    ).one_or_none()
    if row is None:
        return None
    nodes = session.execute(
        text(
            "SELECT o.node, o.acknowledged_at, o.freed_bytes, o.purged_blocks, CASE "
            "WHEN o.acknowledged_at IS NOT NULL THEN 'ACKNOWLEDGED' "
            f"WHEN {SERVING_UNTIL} > now() THEN 'OUTSTANDING' ELSE 'LOST' END AS state "
            "FROM revocation_node o JOIN node n ON n.name = o.node "
            "WHERE o.tenant_id = :tenant_id AND o.artifact_digest = :digest ORDER BY o.node"
        ),
        values,
    )
    return {
        "adapterDigest": row.artifact_digest,
        "state": row.state,
        "reason": row.reason,
        "actor": row.actor,
        "at": row.at,
        "deadlineSeconds": row.deadline_seconds,
        "nodes": [
            {
                "node": n.node,
                "state": n.state,
                "acknowledgedAt": n.acknowledged_at,
                "freedBytes": n.freed_bytes,
                "purgedBlocks": n.purged_blocks,
            }
            for n in nodes
        ],
    }


def revocation_acknowledge(
    session: Session,
    *,
    tenant_id: UUID,
    digest: str,
    node: str,
    freed_bytes: int,
    purged_blocks: int,
    at: datetime,
) -> bool:
    """Record a node's acknowledgement; False when it was not outstanding there."""
    done = rows_changed(
        session,
        text(
            "UPDATE revocation_node SET acknowledged_at = :at, freed_bytes = :freed, "
            "purged_blocks = :purged WHERE tenant_id = :tenant_id AND artifact_digest = :digest "
            "AND node = :node AND acknowledged_at IS NULL"
        ),
        {
            "at": at,
            "freed": freed_bytes,
            "purged": purged_blocks,
            "tenant_id": tenant_id,
            "digest": digest,
            "node": node,
        },
    )
    return bool(done)


_OUTSTANDING = (
    "SELECT 1 FROM revocation_node o JOIN node n ON n.name = o.node "
    "WHERE o.tenant_id = r.tenant_id AND o.artifact_digest = r.artifact_digest "
    f"AND o.acknowledged_at IS NULL AND {SERVING_UNTIL} > now()"
)


def revocation_outstanding(session: Session, tenant_id: UUID, digest: str) -> bool:
    """True while a node that may be serving has not acknowledged."""
    return bool(
        session.execute(
            text(
                f"SELECT EXISTS ({_OUTSTANDING}) FROM revocation r "
                "WHERE r.tenant_id = :tenant_id AND r.artifact_digest = :digest"
            ),
            {"tenant_id": tenant_id, "digest": digest},
        ).scalar_one()
    )


def revocations_drained(session: Session) -> list[Any]:
    """Revocations (tenant_id, artifact_digest) in REVOKING that no node holds up."""
    return list(
        session.execute(
            text(
                "SELECT r.tenant_id, r.artifact_digest FROM revocation r JOIN artifact a "
                "ON a.tenant_id = r.tenant_id AND a.digest = r.artifact_digest "
                f"WHERE a.state = 'REVOKING' AND NOT EXISTS ({_OUTSTANDING})"
            )
        )
    )


def revocations_of_node(session: Session, node: NodeRow) -> list[Any]:
    """What a node still has to acknowledge: (tenant_id, artifact_digest, deadline_seconds).

    The deadline is what is left of it now.
    """
    return list(
        session.execute(
            text(
                "SELECT o.tenant_id, o.artifact_digest, CASE WHEN r.deadline_seconds IS NOT NULL "
                "THEN greatest(0, ceil(r.deadline_seconds - extract(epoch FROM now() - r.at)))"
                "::integer END AS deadline_seconds FROM revocation_node o "
                "JOIN revocation r ON r.tenant_id = o.tenant_id "
                "AND r.artifact_digest = o.artifact_digest "
                "WHERE o.node = :node AND o.acknowledged_at IS NULL ORDER BY r.at"
            ),
            {"node": node.name},
        )
    )
