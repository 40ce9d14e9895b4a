"""Tenants and tokens: who there is, and who may ask."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from registry_service.domain import limits
from registry_service.domain.errors import MalformedError, UnauthenticatedError
from registry_service.domain.names import reason_text, subject_name, tenant_name
from registry_service.domain.roles import (
    PLATFORM,
    PLATFORM_ROLES,
    TENANT_ROLES,
    Principal,
    Role,
)
from registry_service.store.events import event_append
from registry_service.store.tenants import (
    TenantRow,
    TokenRow,
    tenant_full_tensors_set,
    tenant_get,
    tenant_insert,
    tenant_page,
    tenant_state_set,
    token_authenticate,
    token_insert,
    token_page,
    token_revoke,
    token_tenant,
)
from registry_service.usecases.context import (
    Context,
    lookup,
    principal_reading,
    reading,
    tenant_scope,
    tenant_transaction,
)
from registry_service.usecases.paging import cursor_decode, limit_check, page

_PREFIX = "art_"


def authenticate(context: Context, secret: str) -> Principal:
    """The principal of a token: one look-up by SHA-256.

    Raises:
        UnauthenticatedError: unknown, expired or withdrawn, or its tenant is suspended.
    """
    with lookup(context) as connection:
        row = token_authenticate(connection, _hash(secret))
    now = context.clock.now()
    if row is None or row.revoked_at is not None or row.expires_at <= now:
        raise UnauthenticatedError(
            "expected a valid token, got an unknown, expired or withdrawn one"
        )
    if row.tenant_state != "ACTIVE":
        raise UnauthenticatedError("the tenant of this token is suspended")
    return Principal(row.id, row.subject, Role(row.role), row.tenant_id, row.tenant)


def token_create(
    context: Context,
    actor: str,
    *,
    subject: str,
    role: str,
    tenant: str | None,
    seconds: int = limits.TOKEN_TTL_SECONDS,
) -> dict[str, Any]:
    """Make a token; its secret is in the answer and nowhere else.

    Raises:
        MalformedError: a role that needs a tenant without one, or the reverse.
        NotFoundError: no such tenant.
    """
    kind = _role(role, tenant)
    subject = subject_name(subject)
    if not 1 <= seconds <= limits.TOKEN_TTL_SECONDS:
        raise MalformedError(
            f"expiresInSeconds: expected 1 to {limits.TOKEN_TTL_SECONDS}, got {seconds}"
        )
    secret = _PREFIX + secrets.token_urlsafe(32)
    now = context.clock.now()
    tenant_id = PLATFORM
    if tenant is not None:
        with tenant_transaction(context, PLATFORM) as session:
            tenant_id = tenant_get(session, tenant_name(tenant)).id
    with tenant_transaction(context, tenant_id) as session:
        token_id = token_insert(
            session,
            tenant_id=tenant_id,
            secret_hash=_hash(secret),
            subject=subject,
            role=kind,
            actor=actor,
            at=now,
            expires_at=now + timedelta(seconds=seconds),
        )
        event_append(
            session,
            tenant_id=tenant_id,
            kind="token.created",
            subject=str(token_id),
            actor=actor,
            at=now,
            body={"subject": subject, "role": kind},
        )
    return {
        "id": str(token_id),
        "token": secret,
        "subject": subject,
        "role": kind,
        "tenant": tenant,
        "createdAt": now,
        "createdBy": actor,
        "expiresAt": now + timedelta(seconds=seconds),
        "revokedAt": None,
    }


def token_withdraw(context: Context, actor: str, token_id: UUID) -> dict[str, Any]:
    """Withdraw a token at once; safe to repeat.

    Raises:
        NotFoundError: no such token.
    """
    with reading(context) as session:
        tenant_id = token_tenant(session, token_id)
    now = context.clock.now()
    with tenant_transaction(context, tenant_id) as session:
        row = token_revoke(session, token_id, now)
        if row.revoked_at == now:
            event_append(
                session,
                tenant_id=tenant_id,
                kind="token.revoked",
                subject=str(token_id),
                actor=actor,
                at=now,
                body={"subject": row.subject, "role": row.role},
            )
    return _token(row)


def token_list(
    context: Context, principal: Principal, *, cursor: str | None, limit: int
) -> dict[str, Any]:
    """Tokens without their secrets, newest first."""
    after = cursor_decode(cursor, 2)
    with principal_reading(context, principal) as (session, _):
        rows = token_page(
            session, after=(after[0], after[1]) if after else None, limit=limit_check(limit) + 1
        )
    return page(rows, limit, wire=_token, key=lambda row: (row.created_at.isoformat(), str(row.id)))


def tenant_create(context: Context, actor: str, name: str) -> dict[str, Any]:
    """Create a tenant.

    Raises:
        ConflictError: the name is or was in use.
    """
    name = tenant_name(name)
    now = context.clock.now()
    with tenant_transaction(context, PLATFORM) as session:
        row = tenant_insert(session, name, now)
        _tenant_event(session, "tenant.created", row, actor, now, {})
    return _tenant(row)


def tenant_suspend(context: Context, actor: str, name: str, reason: str) -> dict[str, Any]:
    """Suspend a tenant: its tokens end, and it publishes, resolves and runs nothing.

    Raises:
        NotFoundError: no such tenant.
    """
    reason = reason_text(reason)
    now = context.clock.now()
    with tenant_transaction(context, PLATFORM) as session:
        row = tenant_get(session, tenant_name(name), lock=True)
        if row.state == "ACTIVE":
            tenant_state_set(session, row.id, "SUSPENDED")
            _tenant_event(session, "tenant.suspended", row, actor, now, {"reason": reason})
    return _tenant(replace(row, state="SUSPENDED"))


def tenant_policy_set(
    context: Context, principal: Principal, name: str, *, full_tensors: bool, reason: str
) -> dict[str, Any]:
    """Set what a tenant's adapters may hold; it counts for what is scanned from now on.

    The event stands in the tenant's own log: it changes what the tenant may publish.

    Raises:
        NotFoundError: no such tenant.
    """
    reason = reason_text(reason)
    now = context.clock.now()
    with tenant_scope(context, principal, tenant_name(name)) as scope:
        row = tenant_get(scope.session, scope.tenant.name, lock=True)
        if row.full_tensors != full_tensors:
            tenant_full_tensors_set(scope.session, row.id, full_tensors)
            event_append(
                scope.session,
                tenant_id=row.id,
                kind="tenant.policy_set",
                subject=str(row.id),
                actor=principal.subject,
                at=now,
                body={"name": row.name, "fullTensors": full_tensors, "reason": reason},
            )
    return _tenant(replace(row, full_tensors=full_tensors))


def tenant_list(context: Context, *, cursor: str | None, limit: int) -> dict[str, Any]:
    """Tenants by name."""
    after = cursor_decode(cursor, 1)
    with reading(context) as session:
        rows = tenant_page(session, after=after[0] if after else "", limit=limit_check(limit) + 1)
    return page(rows, limit, wire=_tenant, key=lambda row: (row.name,))


def _tenant_event(
    session: Any, kind: str, row: TenantRow, actor: str, at: Any, body: dict[str, Any]
) -> None:
    event_append(
        session,
        tenant_id=PLATFORM,
        kind=kind,
        subject=str(row.id),
        actor=actor,
        at=at,
        body={"name": row.name, **body},
    )


def _role(role: str, tenant: str | None) -> Role:
    try:
        kind = Role(role)
    except ValueError as error:
        raise MalformedError(f"role: expected one of {', '.join(Role)}") from error
    if kind in TENANT_ROLES and tenant is None:
        raise MalformedError(f"role {kind}: expected a tenant, got none")
    if kind in PLATFORM_ROLES and tenant is not None:
        raise MalformedError(f"role {kind}: belongs to the platform, expected no tenant")
    return kind


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _tenant(row: TenantRow) -> dict[str, Any]:
    return {
        "id": str(row.id),
        "name": row.name,
        "state": row.state,
        "fullTensors": row.full_tensors,
        "createdAt": row.created_at,
    }


def _token(row: TokenRow) -> dict[str, Any]:
    return {
        "id": str(row.id),
        "subject": row.subject,
        "role": row.role,
        "tenant": None if row.tenant_id == PLATFORM else row.tenant,
        "createdAt": row.created_at,
        "createdBy": row.created_by,
        "expiresAt": row.expires_at,
        "revokedAt": row.revoked_at,
    }
