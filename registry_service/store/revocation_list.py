"""The row of the signed revocation list, and what goes into it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from registry_service.domain.manifest import WEIGHT_PATH
from registry_service.store.artifacts import ArtifactRow
from registry_service.trust.revocation_list import Revoked

_WEIGHTS = (
    "(SELECT b.blob_digest FROM artifact_blob b WHERE b.tenant_id = :tenant_id "
    "AND b.artifact_digest = :digest AND b.path = :path)"
)


@dataclass(frozen=True, slots=True)
class ListRow:
    """The list as it was signed; number 0 when none was issued yet."""

    number: int
    envelope: bytes
    issued_at: datetime
    expires_at: datetime


def list_read(session: Session) -> ListRow:
    """The list that stands."""
    return _row(session, "")


def list_hold(session: Session) -> ListRow:
    """The list that stands, and stays until the transaction ends."""
    return _row(session, " FOR SHARE")


def list_lock(session: Session) -> ListRow:
    """The list that stands; whoever gives it out or writes the next one waits."""
    return _row(session, " FOR UPDATE")


def list_put(session: Session, row: ListRow) -> None:
    """Write the next list over a locked one. PostgreSQL refuses a number that does not grow."""
    session.execute(
        text(
            "UPDATE revocation_list SET number = :number, envelope = :envelope, "
            "issued_at = :issued_at, expires_at = :expires_at"
        ),
        {
            "number": row.number,
            "envelope": row.envelope,
            "issued_at": row.issued_at,
            "expires_at": row.expires_at,
        },
    )


@dataclass(frozen=True, slots=True)
class Listable:
    """A revocation that a list names, and whether a full one may leave it out.

    ``place`` counts those of its tenant that may be left out, from 1: the last ones go first.
    """

    entry: Revoked
    stays: bool
    place: int


def list_entries(session: Session) -> tuple[Listable, ...]:
    """What the list names of all tenants' revocations, oldest first."""
    rows = session.execute(text("SELECT * FROM revocations_to_list()"))
    return tuple(Listable(_revoked(row), row.stays, row.place) for row in rows)


def content_is_listed(session: Session, artifact: ArtifactRow) -> bool:
    """True when an artifact's weights or tensors are revoked for its tenant, listed or not."""
    sql = (
        "SELECT EXISTS (SELECT 1 FROM revocations_listed() r "
        "WHERE (r.every_tenant OR r.tenant_id = :tenant_id) "
        f"AND (r.weights_digest = {_WEIGHTS} OR r.content_digest = :content))"
    )
    return bool(session.execute(text(sql), _values(artifact)).scalar_one())


def revocation_insert(
    session: Session,
    artifact: ArtifactRow,
    *,
    reason: str,
    actor: str,
    every_tenant: bool,
    deadline_seconds: int | None,
    at: datetime,
) -> None:
    """Record a revocation with the three digests that it names."""
    session.execute(
        text(
            "INSERT INTO revocation (tenant_id, artifact_digest, base_digest, reason, actor, "
            "deadline_seconds, at, weights_digest, content_digest, every_tenant) VALUES "
            f"(:tenant_id, :digest, :base, :reason, :actor, :deadline, :at, {_WEIGHTS}, :content, "
            ":every_tenant)"
        ),
        _values(artifact)
        | {
            "base": artifact.base_digest,
            "reason": reason,
            "actor": actor,
            "deadline": deadline_seconds,
            "every_tenant": every_tenant,
            "at": at,
        },
    )


def revocation_hasten(session: Session, artifact: ArtifactRow, deadline_seconds: int) -> bool:
    """Bring a revocation's deadline forward; False when it is that soon already."""
    changed = session.execute(
        text(
            "UPDATE revocation SET deadline_seconds = :deadline WHERE tenant_id = :tenant_id "
            "AND artifact_digest = :digest "
            "AND coalesce(deadline_seconds > :deadline, true) RETURNING 1"
        ),
        {
            "deadline": deadline_seconds,
            "tenant_id": artifact.tenant_id,
            "digest": artifact.digest,
        },
    )
    return changed.one_or_none() is not None


def revoked_at(session: Session, artifact: ArtifactRow) -> datetime:
    """When a withdrawn artifact was revoked."""
    at: datetime = session.execute(
        text(
            "SELECT at FROM revocation WHERE tenant_id = :tenant_id AND artifact_digest = :digest"
        ),
        {"tenant_id": artifact.tenant_id, "digest": artifact.digest},
    ).scalar_one()
    return at


def _values(artifact: ArtifactRow) -> dict[str, Any]:
    return {
        "tenant_id": artifact.tenant_id,
        "digest": artifact.digest,
        "path": WEIGHT_PATH,
        "content": artifact.content_digest,
    }


def _row(session: Session, lock: str) -> ListRow:
    row = session.execute(
        text(f"SELECT number, envelope, issued_at, expires_at FROM revocation_list{lock}")
    ).one()
    return ListRow(row.number, bytes(row.envelope), row.issued_at, row.expires_at)


def _revoked(row: Any) -> Revoked:
    return Revoked(
        adapter_digest=row.artifact_digest,
        weights_digest=row.weights_digest,
        content_digest=row.content_digest,
        tenant_id=None if row.every_tenant else row.tenant_id,
        cancel_at=row.cancel_at,
    )
