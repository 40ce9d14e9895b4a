"""Rows of blobs and uploads; the bytes themselves are in the blob store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session

from registry_service.domain import limits
from registry_service.domain.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class UploadRow:
    """An upload in progress: a session with an age limit, not an artifact."""

    tenant_id: UUID
    id: UUID
    adapter: str
    reserved_bytes: int
    created_at: datetime
    expires_at: datetime


def upload_insert(
    session: Session, *, tenant_id: UUID, upload_id: UUID, adapter: str, at: datetime
) -> None:
    """Open an upload."""
    session.execute(
        text(
            "INSERT INTO upload (tenant_id, id, adapter, reserved_bytes, created_at, expires_at) "
            "VALUES (:tenant_id, :id, :adapter, 0, :at, :at + make_interval(secs => :age))"
        ),
        {
            "tenant_id": tenant_id,
            "id": upload_id,
            "adapter": adapter,
            "at": at,
            "age": limits.UPLOAD_AGE_SECONDS,
        },
    )


def upload_get(
    session: Session, tenant_id: UUID, adapter: str, upload_id: UUID, *, lock: bool = False
) -> UploadRow:
    """An unexpired upload of this adapter.

    Raises:
        NotFoundError: no such upload.
    """
    sql = (
        "SELECT * FROM upload WHERE tenant_id = :tenant_id AND id = :id AND adapter = :adapter "
        "AND expires_at > now()" + (" FOR UPDATE" if lock else "")
    )
    row = session.execute(
        text(sql), {"tenant_id": tenant_id, "id": upload_id, "adapter": adapter}
    ).one_or_none()
    if row is None:
        raise NotFoundError("no such upload, or it is over its age; start a new one")
    return UploadRow(**row._mapping)


def upload_exists(session: Session, tenant_id: UUID, upload_id: UUID) -> bool:
    """True while there is a row of this upload."""
    return bool(
        session.execute(
            text("SELECT 1 FROM upload WHERE tenant_id = :tenant_id AND id = :id"),
            {"tenant_id": tenant_id, "id": upload_id},
        ).scalar_one_or_none()
    )


def uploads_open(session: Session, tenant_id: UUID) -> int:
    """How many uploads the tenant has open."""
    return int(
        session.execute(
            text("SELECT count(*) FROM upload WHERE tenant_id = :tenant_id"),
            {"tenant_id": tenant_id},
        ).scalar_one()
    )


def blob_lock(session: Session, tenant_id: UUID, digest: str) -> None:
    """Hold a blob's bytes and row together to the end of the transaction."""
    session.execute(
        text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"),
        {"key": f"{tenant_id} {digest}"},
    )


def upload_reserve(session: Session, upload: UploadRow, total: int) -> None:
    """Record the bytes that are reserved for an upload in all."""
    session.execute(
        text("UPDATE upload SET reserved_bytes = :total WHERE tenant_id = :tenant_id AND id = :id"),
        {"total": total, "tenant_id": upload.tenant_id, "id": upload.id},
    )


def upload_delete(session: Session, tenant_id: UUID, upload_id: UUID) -> int:
    """End an upload; the bytes that were reserved for it."""
    reserved = session.execute(
        text(
            "DELETE FROM upload WHERE tenant_id = :tenant_id AND id = :id RETURNING reserved_bytes"
        ),
        {"tenant_id": tenant_id, "id": upload_id},
    ).scalar_one_or_none()
    return int(reserved or 0)


def uploads_expired(session: Session, limit: int = 100) -> list[UploadRow]:
    """Uploads over their age, of all tenants."""
    rows = session.execute(
        text("SELECT * FROM upload WHERE expires_at <= now() LIMIT :limit"), {"limit": limit}
    )
    return [UploadRow(**row._mapping) for row in rows]


def blob_size(session: Session, tenant_id: UUID, digest: str) -> int | None:
    """The size of a blob that the tenant has, or None."""
    size = session.execute(
        text("SELECT size FROM blob WHERE tenant_id = :tenant_id AND digest = :digest"),
        {"tenant_id": tenant_id, "digest": digest},
    ).scalar_one_or_none()
    return None if size is None else int(size)


def blob_ensure(session: Session, *, tenant_id: UUID, digest: str, size: int, at: datetime) -> bool:
    """Record a stored blob and renew its lease; True when it is new to the tenant."""
    row = session.execute(
        text(
            "INSERT INTO blob (tenant_id, digest, size, lease_until, created_at) VALUES "
            "(:tenant_id, :digest, :size, :at + make_interval(secs => :lease), :at) "
            "ON CONFLICT (tenant_id, digest) DO UPDATE SET lease_until = EXCLUDED.lease_until "
            "RETURNING (xmax = 0) AS created"
        ),
        {
            "tenant_id": tenant_id,
            "digest": digest,
            "size": size,
            "at": at,
            "lease": limits.BLOB_LEASE_SECONDS,
        },
    ).one()
    return bool(row.created)


def blob_sizes_locked(
    session: Session, tenant_id: UUID, digests: Sequence[str], at: datetime
) -> dict[str, int]:
    """Sizes of those of ``digests`` that the tenant has; their leases are renewed.

    The row locks hold off a sweeper until the artifact that refers to them is committed.
    """
    rows = session.execute(
        text(
            "UPDATE blob SET lease_until = :at + make_interval(secs => :lease) "
            "WHERE tenant_id = :tenant_id AND digest = ANY(:digests) RETURNING digest, size"
        ),
        {
            "tenant_id": tenant_id,
            "digests": list(digests),
            "at": at,
            "lease": limits.BLOB_LEASE_SECONDS,
        },
    )
    return {row.digest: row.size for row in rows}


def blobs_unreferenced(session: Session, limit: int = 100) -> list[Any]:
    """Blobs (tenant_id, digest) of all tenants that nothing points to and whose lease is over."""
    return list(
        session.execute(
            text(
                "SELECT b.tenant_id, b.digest FROM blob b WHERE b.lease_until <= now() "
                "AND NOT EXISTS (SELECT 1 FROM artifact_blob a WHERE a.tenant_id = b.tenant_id "
                "AND a.blob_digest = b.digest) LIMIT :limit"
            ),
            {"limit": limit},
        )
    )


def blob_delete(session: Session, tenant_id: UUID, digest: str) -> int | None:
    """Delete an unreferenced blob row past its lease; its size, or None when it came into use."""
    size = session.execute(
        text(
            "DELETE FROM blob b WHERE tenant_id = :tenant_id AND digest = :digest "
            "AND lease_until <= now() AND NOT EXISTS (SELECT 1 FROM artifact_blob a "
            "WHERE a.tenant_id = b.tenant_id AND a.blob_digest = b.digest) RETURNING size"
        ),
        {"tenant_id": tenant_id, "digest": digest},
    ).scalar_one_or_none()
    return None if size is None else int(size)
