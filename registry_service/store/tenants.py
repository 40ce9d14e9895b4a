"""Tenants, their tokens and their byte accounts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.rows import namedtuple_row
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from registry_service.domain import limits
from registry_service.domain.errors import ConflictError, NotFoundError, QuotaExceededError
from registry_service.store.database import rows_changed


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One tenant; its name is never given to another.

    ``full_tensors`` says that its adapters may hold whole tensors of the base beside LoRA's.
    """

    id: UUID
    name: str
    state: str
    full_tensors: bool
    created_at: datetime


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token without its secret."""

    tenant_id: UUID
    tenant: str
    id: UUID
    subject: str
    role: str
    created_at: datetime
    created_by: str
    expires_at: datetime
    revoked_at: datetime | None


_AUTHENTICATE = "SELECT * FROM token_authenticate(%s)"
_TENANT_COLUMNS = "id, name, state, full_tensors, created_at"
_TOKEN_COLUMNS = (
    "k.tenant_id, t.name AS tenant, k.id, k.subject, k.role, k.created_at, k.created_by, "
    "k.expires_at, k.revoked_at"
)


def tenant_insert(session: Session, name: str, at: datetime) -> TenantRow:
    """Create a tenant.

    Raises:
        ConflictError: the name was used before.
    """
    tenant_id = uuid4()
    try:
        session.execute(
            text(
                "INSERT INTO tenant (id, name, state, quota_bytes, created_at) "
                "VALUES (:id, :name, 'ACTIVE', :quota, :at)"
            ),
            {"id": tenant_id, "name": name, "quota": limits.TENANT_QUOTA_BYTES, "at": at},
        )
    except IntegrityError as error:
        raise ConflictError(f"tenant '{name}' exists; names are never given twice") from error
    return TenantRow(tenant_id, name, "ACTIVE", full_tensors=False, created_at=at)


def tenant_get(session: Session, name: str, *, lock: bool = False) -> TenantRow:
    """A tenant by name.

    Raises:
        NotFoundError: no such tenant.
    """
    sql = f"SELECT {_TENANT_COLUMNS} FROM tenant WHERE name = :name"
    sql += " FOR UPDATE" if lock else ""
    row = session.execute(text(sql), {"name": name}).one_or_none()
    if row is None:
        raise NotFoundError("not found")
    return TenantRow(*row)


def tenant_known(session: Session, tenant_id: UUID) -> None:
    """Expect that there is a tenant with this id.

    Raises:
        NotFoundError: there is none.
    """
    found = session.execute(text("SELECT 1 FROM tenant WHERE id = :id"), {"id": tenant_id})
    if found.one_or_none() is None:
        raise NotFoundError("not found")


def tenant_ids(session: Session) -> list[UUID]:
    """The ids of all tenants."""
    return list(session.execute(text("SELECT id FROM tenant")).scalars())


def tenant_state_set(session: Session, tenant_id: UUID, state: str) -> None:
    """Set a tenant's state."""
    session.execute(
        text("UPDATE tenant SET state = :state WHERE id = :id"), {"state": state, "id": tenant_id}
    )


def tenant_full_tensors_set(session: Session, tenant_id: UUID, full_tensors: bool) -> None:
    """Allow or forbid whole tensors of the base in a tenant's adapters."""
    session.execute(
        text("UPDATE tenant SET full_tensors = :full_tensors WHERE id = :id"),
        {"full_tensors": full_tensors, "id": tenant_id},
    )


def tenant_page(session: Session, *, after: str, limit: int) -> list[TenantRow]:
    """Tenants by name, after a name."""
    rows = session.execute(
        text(
            f"SELECT {_TENANT_COLUMNS} FROM tenant WHERE name > :after "
            "AND name <> 'platform' ORDER BY name LIMIT :limit"
        ),
        {"after": after, "limit": limit},
    )
    return [TenantRow(*row) for row in rows]


def bytes_reserve(session: Session, tenant_id: UUID, count: int) -> None:
    """Take ``count`` bytes of the quota before they arrive.

    Raises:
        QuotaExceededError: stored and reserved bytes would exceed the quota.
    """
    done = rows_changed(
        session,
        text(
            "UPDATE tenant SET reserved_bytes = reserved_bytes + :count WHERE id = :id "
            "AND stored_bytes + reserved_bytes + :count <= quota_bytes"
        ),
        {"count": count, "id": tenant_id},
    )
    if not done:
        raise QuotaExceededError(
            f"{count} more bytes exceed the tenant's quota; remove artifacts or ask an operator"
        )


def bytes_settle(session: Session, tenant_id: UUID, *, reserved: int, stored: int) -> None:
    """Give back ``reserved`` bytes and count ``stored`` bytes (either may be 0)."""
    session.execute(
        text(
            "UPDATE tenant SET reserved_bytes = reserved_bytes - :reserved, "
            "stored_bytes = stored_bytes + :stored WHERE id = :id"
        ),
        {"reserved": reserved, "stored": stored, "id": tenant_id},
    )


def token_insert(
    session: Session,
    *,
    tenant_id: UUID,
    secret_hash: bytes,
    subject: str,
    role: str,
    actor: str,
    at: datetime,
    expires_at: datetime,
) -> UUID:
    """Store a token's hash."""
    token_id = uuid4()
    session.execute(
        text(
            "INSERT INTO token (tenant_id, id, hash, subject, role, created_at, created_by, "
            "expires_at) VALUES (:tenant_id, :id, :hash, :subject, :role, :at, :actor, "
            ":expires_at)"
        ),
        {
            "tenant_id": tenant_id,
            "id": token_id,
            "hash": secret_hash,
            "subject": subject,
            "role": role,
            "at": at,
            "actor": actor,
            "expires_at": expires_at,
        },
    )
    return token_id


def token_revoke(session: Session, token_id: UUID, at: datetime) -> TokenRow:
    """Withdraw a token of the transaction's tenant; safe to repeat.

    Raises:
        NotFoundError: no such token.
    """
    session.execute(
        text("UPDATE token SET revoked_at = :at WHERE id = :id AND revoked_at IS NULL"),
        {"id": token_id, "at": at},
    )
    row = session.execute(
        text(
            f"SELECT {_TOKEN_COLUMNS} FROM token k JOIN tenant t ON t.id = k.tenant_id "
            "WHERE k.id = :id"
        ),
        {"id": token_id},
    ).one_or_none()
    if row is None:
        raise NotFoundError("not found")
    return TokenRow(**row._mapping)


def token_page(session: Session, *, after: tuple[str, str] | None, limit: int) -> list[TokenRow]:
    """Tokens newest first, after the cursor (created at, id)."""
    values: dict[str, Any] = {"limit": limit}
    where = "true"
    if after is not None:
        where = "(k.created_at, k.id) < (CAST(:at AS timestamptz), CAST(:id AS uuid))"
        values["at"], values["id"] = after
    sql = (
        f"SELECT {_TOKEN_COLUMNS} FROM token k JOIN tenant t ON t.id = k.tenant_id WHERE {where} "
        "ORDER BY k.created_at DESC, k.id DESC LIMIT :limit"
    )
    return [TokenRow(**row._mapping) for row in session.execute(text(sql), values)]


def token_tenant(session: Session, token_id: UUID) -> UUID:
    """The tenant of a token, read across tenants.

    Raises:
        NotFoundError: no such token.
    """
    found = session.execute(
        text("SELECT tenant_id FROM token WHERE id = :id"), {"id": token_id}
    ).scalar_one_or_none()
    if found is None:
        raise NotFoundError("not found")
    return UUID(str(found))


def token_authenticate(connection: psycopg.Connection[Any], secret_hash: bytes) -> Any | None:
    """The one look-up of a request: principal fields of an unexpired or expired token, or None."""
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute(_AUTHENTICATE, (secret_hash,)).fetchone()
