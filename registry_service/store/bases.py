"""Base models, their kept files, the catalogs that workers made of them, and grants to tenants."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from registry_service.domain.digests import Digest, is_digest
from registry_service.domain.errors import ConflictError, NotFoundError
from registry_service.store.database import rows_changed


@dataclass(frozen=True, slots=True)
class BaseRow:
    """One base model. It is USABLE once two workers made the same catalog of it.

    ``round`` numbers the collections of catalogs; ``remaking`` says that this round's is to
    replace the admitted one.
    """

    digest: Digest
    name: str
    manifest: bytes
    tokenizer_digest: Digest
    chat_template_digest: Digest
    quantization: str
    state: str
    catalog_digest: Digest | None
    statement: bytes | None
    round: int
    remaking: bool
    created_at: datetime
    created_by: str


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A file of a base that the registry keeps whole (``file``) or only the header of."""

    path: str
    kind: str
    digest: Digest
    content: bytes


def base_insert(session: Session, base: BaseRow, files: tuple[BaseFile, ...]) -> bool:
    """Store a base; False when this very base (digest and name) is already there.

    Raises:
        ConflictError: the name or the digest is taken by another.
    """
    found = session.execute(
        text("SELECT digest, name FROM base WHERE digest = :digest OR name = :name"),
        {"digest": base.digest, "name": base.name},
    ).all()
    if [(row.digest, row.name) for row in found] == [(base.digest, base.name)]:
        return False
    try:
        session.execute(
            text(
                "INSERT INTO base (digest, name, manifest, tokenizer_digest, "
                "chat_template_digest, quantization, state, created_at, created_by) VALUES "
                "(:digest, :name, :manifest, :tokenizer, :template, :quantization, 'PENDING', "
                ":at, :by)"
            ),
            {
                "digest": base.digest,
                "name": base.name,
                "manifest": base.manifest,
                "tokenizer": base.tokenizer_digest,
                "template": base.chat_template_digest,
                "quantization": base.quantization,
                "at": base.created_at,
                "by": base.created_by,
            },
        )
    except IntegrityError as error:
        raise ConflictError(
            f"base '{base.name}' or its digest is registered as another base; choose a new name"
        ) from error
    for file in files:
        session.execute(
            text(
                "INSERT INTO base_file (base_digest, path, kind, digest, content) "
                "VALUES (:base, :path, :kind, :digest, :content)"
            ),
            {
                "base": base.digest,
                "path": file.path,
                "kind": file.kind,
                "digest": file.digest,
                "content": file.content,
            },
        )
    return True


def base_find(session: Session, reference: str, *, lock: bool = False) -> BaseRow | None:
    """A base by name or digest, or None."""
    column = "digest" if is_digest(reference) else "name"
    sql = f"SELECT * FROM base WHERE {column} = :reference" + (" FOR UPDATE" if lock else "")
    row = session.execute(text(sql), {"reference": reference}).one_or_none()
    return None if row is None else _base(row)


def base_get(session: Session, reference: str, *, lock: bool = False) -> BaseRow:
    """A base by name or digest.

    Raises:
        NotFoundError: no such base.
    """
    base = base_find(session, reference, lock=lock)
    if base is None:
        raise NotFoundError("not found")
    return base


def base_page(
    session: Session, *, after: str, limit: int, tenant_id: UUID | None = None
) -> list[BaseRow]:
    """Bases by name, after a name; for a tenant only those granted to it."""
    sql = "SELECT * FROM base b WHERE name > :after "
    values: dict[str, Any] = {"after": after, "limit": limit}
    if tenant_id is not None:
        sql += (
            "AND EXISTS (SELECT 1 FROM base_grant g WHERE g.base_digest = b.digest "
            "AND g.tenant_id = :tenant_id) "
        )
        values["tenant_id"] = tenant_id
    rows = session.execute(text(sql + "ORDER BY name LIMIT :limit"), values)
    return [_base(row) for row in rows]


def base_file_get(session: Session, digest: str, path: str) -> BaseFile:
    """A kept file of a base.

    Raises:
        NotFoundError: no such file.
    """
    row = session.execute(
        text(
            "SELECT path, kind, digest, content FROM base_file "
            "WHERE base_digest = :digest AND path = :path"
        ),
        {"digest": digest, "path": path},
    ).one_or_none()
    if row is None:
        raise NotFoundError("not found")
    return BaseFile(row.path, row.kind, row.digest, bytes(row.content))


def base_grant_insert(
    session: Session, *, tenant_id: UUID, digest: str, actor: str, at: datetime
) -> bool:
    """Let a tenant see and use a base; False when it could already."""
    done = rows_changed(
        session,
        text(
            "INSERT INTO base_grant (tenant_id, base_digest, created_at, created_by) "
            "VALUES (:tenant_id, :digest, :at, :actor) ON CONFLICT DO NOTHING"
        ),
        {"tenant_id": tenant_id, "digest": digest, "at": at, "actor": actor},
    )
    return bool(done)


def base_granted(session: Session, tenant_id: UUID, digest: str) -> bool:
    """True when the tenant may use the base."""
    return bool(
        session.execute(
            text("SELECT 1 FROM base_grant WHERE tenant_id = :tenant_id AND base_digest = :digest"),
            {"tenant_id": tenant_id, "digest": digest},
        ).scalar_one_or_none()
    )


def base_grants(session: Session, digest: str) -> list[str]:
    """Names of the tenants that may use the base, as far as this session can see them."""
    return list(
        session.execute(
            text(
                "SELECT t.name FROM base_grant g JOIN tenant t ON t.id = g.tenant_id "
                "WHERE g.base_digest = :digest ORDER BY t.name"
            ),
            {"digest": digest},
        ).scalars()
    )


def _base(row: Any) -> BaseRow:
    values = dict(row._mapping)
    for name in ("manifest", "statement"):
        values[name] = None if values[name] is None else bytes(values[name])
    return BaseRow(**values)
