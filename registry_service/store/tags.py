"""Labels and aliases, their history, and who may run an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from registry_service.domain.digests import Digest
from registry_service.domain.errors import ConflictError, NotFoundError


@dataclass(frozen=True, slots=True)
class TagRow:
    """A label (never moves) or an alias (moves by generation) of an adapter."""

    adapter: str
    name: str
    kind: str
    artifact_digest: Digest
    base_digest: Digest
    generation: int
    actor: str
    updated_at: datetime


_COLUMNS = "adapter, name, kind, artifact_digest, base_digest, generation, actor, updated_at"


def adapter_ensure(session: Session, tenant_id: UUID, name: str, at: datetime) -> None:
    """Create the adapter's name in its tenant when it is new."""
    session.execute(
        text(
            "INSERT INTO adapter (tenant_id, name, created_at) VALUES (:tenant_id, :name, :at) "
            "ON CONFLICT DO NOTHING"
        ),
        {"tenant_id": tenant_id, "name": name, "at": at},
    )


def adapter_exists(session: Session, tenant_id: UUID, name: str) -> bool:
    """True when the tenant has an adapter of this name."""
    return bool(
        session.execute(
            text("SELECT 1 FROM adapter WHERE tenant_id = :tenant_id AND name = :name"),
            {"tenant_id": tenant_id, "name": name},
        ).scalar_one_or_none()
    )


def tag_find(
    session: Session, tenant_id: UUID, adapter: str, name: str, *, lock: bool = False
) -> TagRow | None:
    """A label or alias, or None."""
    sql = (
        f"SELECT {_COLUMNS} FROM tag WHERE tenant_id = :tenant_id AND adapter = :adapter "
        "AND name = :name" + (" FOR UPDATE" if lock else "")
    )
    row = session.execute(
        text(sql), {"tenant_id": tenant_id, "adapter": adapter, "name": name}
    ).one_or_none()
    return None if row is None else TagRow(**row._mapping)


def tag_insert(session: Session, tenant_id: UUID, tag: TagRow) -> None:
    """Create a label or alias.

    Raises:
        ConflictError: the name was taken at the same time.
    """
    try:
        session.execute(
            text(
                "INSERT INTO tag (tenant_id, adapter, name, kind, artifact_digest, base_digest, "
                "generation, actor, updated_at) VALUES (:tenant_id, :adapter, :name, :kind, "
                ":artifact_digest, :base_digest, :generation, :actor, :updated_at)"
            ),
            {"tenant_id": tenant_id, **_values(tag)},
        )
    except IntegrityError as error:
        raise ConflictError(f"'{tag.name}' was set at the same time; read it again") from error


def alias_update(session: Session, tenant_id: UUID, tag: TagRow) -> None:
    """Move a locked alias to the next generation."""
    session.execute(
        text(
            "UPDATE tag SET artifact_digest = :artifact_digest, base_digest = :base_digest, "
            "generation = :generation, actor = :actor, updated_at = :updated_at "
            "WHERE tenant_id = :tenant_id AND adapter = :adapter AND name = :name"
        ),
        {"tenant_id": tenant_id, **_values(tag)},
    )


def alias_move_insert(
    session: Session,
    tenant_id: UUID,
    tag: TagRow,
    *,
    previous: str | None,
    reason: str,
    event: UUID,
) -> None:
    """Write one line of an alias's history."""
    session.execute(
        text(
            "INSERT INTO alias_move (tenant_id, adapter, alias, generation, previous_digest, "
            "artifact_digest, base_digest, actor, reason, event_id, at) VALUES (:tenant_id, "
            ":adapter, :name, :generation, :previous, :artifact_digest, :base_digest, :actor, "
            ":reason, :event, :updated_at)"
        ),
        {
            "tenant_id": tenant_id,
            "previous": previous,
            "reason": reason,
            "event": event,
            **_values(tag),
        },
    )


def alias_page(
    session: Session, tenant_id: UUID, adapter: str, *, after: str, limit: int
) -> list[TagRow]:
    """Aliases by name, after a name."""
    rows = session.execute(
        text(
            f"SELECT {_COLUMNS} FROM tag WHERE tenant_id = :tenant_id AND adapter = :adapter "
            "AND kind = 'alias' AND name COLLATE \"C\" > :after "
            'ORDER BY name COLLATE "C" LIMIT :limit'
        ),
        {"tenant_id": tenant_id, "adapter": adapter, "after": after, "limit": limit},
    )
    return [TagRow(**row._mapping) for row in rows]


def tag_names_admitted(
    session: Session, tenant_id: UUID, adapter: str, *, after: str, limit: int
) -> list[str]:
    """Names of labels and aliases of admitted artifacts, in byte order, after a name."""
    return list(
        session.execute(
            text(
                "SELECT g.name FROM tag g JOIN artifact a ON a.tenant_id = g.tenant_id "
                "AND a.digest = g.artifact_digest WHERE g.tenant_id = :tenant_id "
                'AND g.adapter = :adapter AND g.name COLLATE "C" > :after '
                "AND artifact_admitted(a.tenant_id, a.digest, a.base_digest, a.state) "
                'ORDER BY g.name COLLATE "C" LIMIT :limit'
            ),
            {"tenant_id": tenant_id, "adapter": adapter, "after": after, "limit": limit},
        ).scalars()
    )


@dataclass(frozen=True, slots=True)
class ResolvedRow:
    """A reference bound to an admitted artifact. ``generation`` is None for a digest."""

    tenant_id: UUID
    tenant_state: str
    kind: str
    generation: int | None
    digest: Digest
    base_digest: Digest
    tokenizer_digest: Digest
    chat_template_digest: Digest


_RESOLVE = "SELECT * FROM resolve_admitted(%s, %s, %s)"


def reference_resolve(
    connection: psycopg.Connection[Any], tenant: str, adapter: str, reference: str
) -> ResolvedRow:
    """The admitted artifact that a digest, label or alias of a tenant's adapter names.

    Raises:
        NotFoundError: unknown, not admitted, or revoked: one answer.
    """
    with connection.cursor(row_factory=class_row(ResolvedRow)) as cursor:
        row = cursor.execute(_RESOLVE, (tenant, adapter, reference)).fetchone()
    if row is None:
        raise NotFoundError("not found")
    return row


def labels_of(
    session: Session, digests: list[tuple[UUID, str]]
) -> dict[tuple[UUID, str], list[str]]:
    """Labels and aliases of several artifacts, by (tenant, digest)."""
    if not digests:
        return {}
    rows = session.execute(
        text(
            "SELECT tenant_id, artifact_digest, name FROM tag "
            "WHERE artifact_digest = ANY(:digests) ORDER BY name"
        ),
        {"digests": [digest for _, digest in digests]},
    )
    result: dict[tuple[UUID, str], list[str]] = {}
    for row in rows:
        result.setdefault((row.tenant_id, row.artifact_digest), []).append(row.name)
    return result


def alias_history(
    session: Session, tenant_id: UUID, adapter: str, alias: str, *, before: int, limit: int
) -> list[dict[str, Any]]:
    """Moves of an alias, newest first, below a generation."""
    rows = session.execute(
        text(
            "SELECT generation, previous_digest, artifact_digest, base_digest, actor, reason, at "
            "FROM alias_move WHERE tenant_id = :tenant_id AND adapter = :adapter "
            "AND alias = :alias AND generation < :before ORDER BY generation DESC LIMIT :limit"
        ),
        {
            "tenant_id": tenant_id,
            "adapter": adapter,
            "alias": alias,
            "before": before,
            "limit": limit,
        },
    )
    return [
        {
            "generation": row.generation,
            "previousDigest": row.previous_digest,
            "adapterDigest": row.artifact_digest,
            "baseModelDigest": row.base_digest,
            "actor": row.actor,
            "reason": row.reason,
            "at": row.at,
        }
        for row in rows
    ]


def grant_set(
    session: Session, tenant_id: UUID, adapter: str, subject: str, *, active: bool, at: datetime
) -> dict[str, Any]:
    """Give or withdraw a grant; withdrawing raises its epoch, so older contexts end.

    Raises:
        NotFoundError: no such adapter, or no grant to withdraw.
    """
    if not adapter_exists(session, tenant_id, adapter):
        raise NotFoundError("not found")
    sql = (
        "INSERT INTO adapter_grant (tenant_id, adapter, subject, epoch, active, updated_at) "
        "VALUES (:tenant_id, :adapter, :subject, 1, true, :at) "
        "ON CONFLICT (tenant_id, adapter, subject) DO UPDATE SET active = true, updated_at = :at "
        "RETURNING subject, epoch, active"
        if active
        else "UPDATE adapter_grant SET active = false, epoch = epoch + 1, updated_at = :at "
        "WHERE tenant_id = :tenant_id AND adapter = :adapter AND subject = :subject AND active "
        "RETURNING subject, epoch, active"
    )
    row = session.execute(
        text(sql), {"tenant_id": tenant_id, "adapter": adapter, "subject": subject, "at": at}
    ).one_or_none()
    if row is None:
        raise NotFoundError("not found")
    return dict(row._mapping)


def grant_find(
    session: Session, tenant_id: UUID, adapter: str, subject: str
) -> dict[str, Any] | None:
    """A grant, or None."""
    row = session.execute(
        text(
            "SELECT subject, epoch, active FROM adapter_grant WHERE tenant_id = :tenant_id "
            "AND adapter = :adapter AND subject = :subject"
        ),
        {"tenant_id": tenant_id, "adapter": adapter, "subject": subject},
    ).one_or_none()
    return None if row is None else dict(row._mapping)


def _values(tag: TagRow) -> dict[str, Any]:
    return {name: getattr(tag, name) for name in TagRow.__slots__}
