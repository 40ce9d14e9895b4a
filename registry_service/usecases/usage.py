"""Usage: nodes report what tenants used, and a tenant sees its own."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from registry_service.domain.errors import ForbiddenError
from registry_service.domain.roles import Principal
from registry_service.store import usage as store
from registry_service.store.nodes import node_get
from registry_service.store.tenants import tenant_known
from registry_service.usecases.context import Context, reading, tenant_scope, tenant_transaction
from registry_service.usecases.paging import cursor_decode, limit_check, page


def usage_report(
    context: Context, principal: Principal, node: str, *, run: UUID, items: list[dict[str, Any]]
) -> None:
    """Keep the totals of one run of a node; safe to repeat.

    Raises:
        NotFoundError: an unknown node or tenant. ForbiddenError: another subject's node.
    """
    with reading(context) as session:
        row = node_get(session, node)
    if row.subject != principal.subject:
        raise ForbiddenError("expected a node of this token, got another's")
    by_tenant: dict[UUID, list[dict[str, Any]]] = {}
    for item in items:
        by_tenant.setdefault(UUID(item["tenantId"]), []).append(item)
    for tenant_id, theirs in by_tenant.items():
        with tenant_transaction(context, tenant_id) as session:
            tenant_known(session, tenant_id)
            store.usage_keep(
                session,
                tenant_id=tenant_id,
                node=row.name,
                run=run,
                base_digest=row.base_digest,
                items=theirs,
                at=context.clock.now(),
            )


def usage_list(
    context: Context, principal: Principal, tenant: str, *, cursor: str | None, limit: int
) -> dict[str, Any]:
    """What a tenant used, by adapter and base.

    Raises:
        NotFoundError: no such tenant, or the caller is bound to another one.
    """
    after = cursor_decode(cursor, 2) or ("", "")
    with tenant_scope(context, principal, tenant) as scope:
        rows = store.usage_page(
            scope.session,
            scope.tenant.id,
            after=(after[0], after[1]),
            limit=limit_check(limit) + 1,
        )
    return page(
        rows, limit, wire=_wire, key=lambda row: (str(row.adapter_digest), str(row.base_digest))
    )


def _wire(row: Any) -> dict[str, Any]:
    return {
        "adapterDigest": row.adapter_digest,
        "baseModelDigest": row.base_digest,
        "requests": row.requests,
        "promptTokens": row.prompt_tokens,
        "completionTokens": row.completion_tokens,
        "reusedTokens": row.reused_tokens,
    }
