"""Routing contexts: who a request is and which digest it runs, signed for one node and one minute.

Deny by default: without a grant of this subject for this adapter there is no context. The base
alone is for tenants that it is granted to.
"""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any, Final, cast

import psycopg

from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import NotFoundError
from registry_service.domain.names import node_name, subject_name
from registry_service.domain.roles import Principal
from registry_service.store.bases import base_find, base_granted
from registry_service.store.nodes import node_get
from registry_service.store.tags import grant_find, reference_resolve
from registry_service.trust.routing_context import (
    BASE_MARKER,
    RoutingContext,
    routing_context_sign,
)
from registry_service.usecases.context import Context, Scope, tenant_scope

_LIFETIME: Final = timedelta(seconds=limits.ROUTING_CONTEXT_SECONDS)


def routing_context_mint(
    context: Context,
    principal: Principal,
    *,
    tenant: str,
    adapter: str | None,
    reference: str | None,
    node: str,
    body_digest: Digest,
    session_id: str,
    subject: str,
) -> dict[str, Any]:
    """Mint a context for a subject's request on a live node.

    Raises:
        NotFoundError: no such adapter, node or grant, not admitted, or revoked: one answer.
    """
    node, subject = node_name(node), subject_name(subject)
    now = context.clock.now()
    with tenant_scope(context, principal, tenant, active=True) as scope:
        row = node_get(scope.session, node)
        base = base_find(scope.session, row.base_digest)
        if base is None or row.lease_until <= now or base.state != "USABLE":
            raise NotFoundError("not found")
        if adapter is None:
            if not base_granted(scope.session, scope.tenant.id, base.digest):
                raise NotFoundError("not found")
            target = (BASE_MARKER, base.tokenizer_digest, base.chat_template_digest, 0)
        else:
            target = _target(scope, adapter, reference or "", subject, base.digest)
        adapter_digest, tokenizer, template, epoch = target
        minted = RoutingContext(
            tenant_id=scope.tenant.id,
            tenant=scope.tenant.name,
            subject=subject,
            session_id=session_id,
            adapter=adapter,
            base_digest=base.digest,
            adapter_digest=adapter_digest,
            tokenizer_digest=tokenizer,
            chat_template_digest=template,
            grant_epoch=epoch,
            node=node,
            jti=str(uuid.uuid4()),
            issued_at=now,
            expires_at=now + _LIFETIME,
            body_digest=body_digest,
        )
    token = routing_context_sign(minted, context.verifier_id, context.routing_signer)
    return {
        "routingContext": token,
        "adapterDigest": adapter_digest,
        "expiresAt": minted.expires_at,
    }


def _target(
    scope: Scope, adapter: str, reference: str, subject: str, base_digest: str
) -> tuple[Digest, Digest, Digest, int]:
    grant = grant_find(scope.session, scope.tenant.id, adapter, subject)
    if grant is None or not grant["active"]:
        raise NotFoundError("not found")
    # In the transaction's own connection.
    connection = cast(
        "psycopg.Connection[Any]", scope.session.connection().connection.driver_connection
    )
    found = reference_resolve(connection, scope.tenant.name, adapter, reference)
    if found.base_digest != base_digest:
        raise NotFoundError("not found")
    return (
        found.digest,
        found.tokenizer_digest,
        found.chat_template_digest,
        grant["epoch"],
    )
