"""Serving nodes: registration, heartbeat, and the feed that they follow."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import ForbiddenError, RefusedError
from registry_service.domain.names import node_name
from registry_service.domain.roles import PLATFORM, Principal
from registry_service.store import nodes as store
from registry_service.store.bases import base_get
from registry_service.store.catalogs import catalogs_admitted
from registry_service.store.events import event_append, event_last, event_page
from registry_service.store.revocation_list import list_hold
from registry_service.store.tenants import tenant_get
from registry_service.usecases.context import (
    Context,
    principal_reading,
    reading,
    tenant_transaction,
)
from registry_service.usecases.paging import cursor_decode, limit_check, number_decode, page
from registry_service.usecases.placements import placements_renew


def node_register(
    context: Context,
    principal: Principal,
    node: str,
    *,
    base_digest: Digest,
    url: str,
    catalog_digest: Digest,
) -> dict[str, Any]:
    """Register a node, bound to one base; safe to repeat. A token names one node: its subject.

    Raises:
        NotFoundError: an unknown base. RefusedError: its catalog is not an admitted one.
        ForbiddenError: another name than the token's subject.
    """
    node = node_name(node)
    if principal.subject != node:
        raise ForbiddenError(f"expected the node that the token names, '{principal.subject}'")
    now = context.clock.now()
    with tenant_transaction(context, PLATFORM) as session:
        base = base_get(session, base_digest)
        # A catalog that was replaced since stays admitted: its nodes go on until they are renewed.
        admitted = catalogs_admitted(session, base.digest)
        if admitted and catalog_digest not in admitted:
            raise RefusedError(
                f"expected the base's catalog {base.catalog_digest}, got {catalog_digest}"
            )
        store.node_upsert(
            session,
            name=node,
            subject=principal.subject,
            url=url,
            base_digest=base_digest,
            catalog_digest=catalog_digest,
            # It may have been given this one before it was known here.
            fresh_until=list_hold(session).expires_at,
            at=now,
        )
        event_append(
            session,
            tenant_id=PLATFORM,
            kind="node.registered",
            subject=node,
            actor=principal.subject,
            at=now,
            body={"baseModelDigest": base_digest, "url": url},
        )
        row = store.node_get(session, node)
    return _wire(row, now)


def node_heartbeat(
    context: Context,
    principal: Principal,
    node: str,
    *,
    feed_index: int,
    residents: list[dict[str, Any]],
) -> dict[str, Any]:
    """Renew a node's lease; the answer holds what it still has to let go of.

    Raises:
        NotFoundError: not registered. ForbiddenError: another subject's node.
    """
    now = context.clock.now()
    with tenant_transaction(context, PLATFORM) as session:
        row = store.node_get(session, node)
        if row.subject != principal.subject:
            raise ForbiddenError("expected a node of this token, got another's")
    lost = placements_renew(context, row, residents)
    with tenant_transaction(context, PLATFORM) as session:
        store.node_renew(session, node, feed_index=feed_index, residents=residents, at=now)
    with reading(context) as session:
        revoked = _revoked(session, row, residents)
    return {
        "leaseSeconds": limits.NODE_LEASE_SECONDS,
        "revocations": revoked,
        "lostPlacements": lost,
    }


def node_show(context: Context, node: str) -> dict[str, Any]:
    """One node.

    Raises:
        NotFoundError: no such node.
    """
    with reading(context) as session:
        row = store.node_get(session, node)
    return _wire(row, context.clock.now())


def node_list(context: Context, *, cursor: str | None, limit: int) -> dict[str, Any]:
    """Nodes by name."""
    after = cursor_decode(cursor, 1)
    now = context.clock.now()
    with reading(context) as session:
        rows = store.node_page(
            session, after=after[0] if after else "", limit=limit_check(limit) + 1
        )
    return page(rows, limit, wire=lambda row: _wire(row, now), key=lambda row: (row.name,))


def feed_page(context: Context, *, after: int, limit: int = limits.PAGE_ROWS) -> dict[str, Any]:
    """Numbered events of all tenants after an index, without gaps.

    ``next`` is below ``after`` when the log does not reach that far: it was restored from a copy,
    and whoever read further has read what is no more.
    """
    with reading(context) as session:
        items = event_page(session, after=after, limit=limit)
        end = items[-1]["index"] if items else min(after, event_last(session))
    return {"items": items, "next": end}


def audit_list(
    context: Context,
    principal: Principal,
    *,
    tenant: str | None,
    subject: str,
    cursor: str | None,
    limit: int,
) -> dict[str, Any]:
    """The audit trail, oldest first; a tenant's principal sees its tenant's.

    Raises:
        NotFoundError: an unknown tenant, or one the caller is not bound to.
    """
    start = number_decode(cursor) or 0
    with principal_reading(context, principal) as (session, own):
        tenant_id = own
        if tenant is not None:
            tenant_id = PLATFORM if tenant == "platform" else tenant_get(session, tenant).id
            principal.tenant_check(tenant_id)
        rows = event_page(
            session,
            after=start,
            limit=limit_check(limit) + 1,
            tenant_id=tenant_id,
            subject=subject,
        )
    return page(rows, limit, wire=dict, key=lambda row: (str(row["index"]),))


def _revoked(
    session: Session, node: store.NodeRow, residents: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Outstanding acknowledgements, and what a node holds although it is not approved."""
    held = [(resident["tenantId"], resident["adapterDigest"]) for resident in residents]
    # Read first: what is revoked between the two has its own deadline then, and is not cut at once.
    unapproved = store.residents_unapproved(session, held)
    found = {
        (str(row.tenant_id), row.artifact_digest): row.deadline_seconds
        for row in store.revocations_of_node(session, node)
    }
    for key in unapproved:
        found.setdefault(key, 0)
    return [
        {"tenantId": tenant_id, "adapterDigest": digest, "deadlineSeconds": deadline}
        for (tenant_id, digest), deadline in found.items()
    ]


def _wire(row: store.NodeRow, now: datetime) -> dict[str, Any]:
    return {
        "node": row.name,
        "url": row.url,
        "baseModelDigest": row.base_digest,
        "state": "LIVE" if row.lease_until > now else "LOST",
        "lastSeenAt": row.last_seen_at,
        "feedIndex": row.feed_index,
        "residents": row.residents,
    }
