"""Artifacts and their moves. A move and its event are written by ``artifact_advance`` alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session

from registry_service.domain.digests import Digest
from registry_service.domain.errors import NotFoundError
from registry_service.domain.lifecycle import Event, State, advance
from registry_service.domain.manifest import FileEntry
from registry_service.store.database import rows_changed
from registry_service.store.events import event_append


@dataclass(frozen=True, slots=True)
class ArtifactRow:
    """One artifact as it stands, with its tenant's name."""

    tenant_id: UUID
    tenant: str
    digest: Digest
    adapter: str
    base_digest: Digest
    manifest: bytes
    declaration: dict[str, Any]
    publisher: str
    bytes: int
    state: State
    revision: int
    submitted_at: datetime
    admitted: bool
    content_digest: Digest | None


_COLUMNS = (
    "a.tenant_id, t.name AS tenant, a.digest, a.adapter, a.base_digest, a.manifest, "
    "a.declaration, a.publisher, a.bytes, a.state, a.revision, a.submitted_at, "
    "a.content_digest, "
    "artifact_admitted(a.tenant_id, a.digest, a.base_digest, a.state) AS admitted"
)
_FROM = " FROM artifact a JOIN tenant t ON t.id = a.tenant_id "
_ONE = text(f"SELECT {_COLUMNS}{_FROM}WHERE a.tenant_id = :tenant_id AND a.digest = :digest")
_ONE_LOCKED = text(f"{_ONE.text} FOR UPDATE OF a")
_INSERT = text(
    "INSERT INTO artifact (tenant_id, digest, adapter, base_digest, manifest, declaration, "
    "publisher, bytes, state, revision, submitted_at) VALUES (:tenant_id, :digest, :adapter, "
    ":base_digest, :manifest, CAST(:declaration AS jsonb), :publisher, :bytes, 'NEW', 0, :at) "
    "ON CONFLICT (tenant_id, digest) DO NOTHING"
)
_INSERT_FILE = text(
    "INSERT INTO artifact_blob (tenant_id, artifact_digest, path, blob_digest, size, media_type) "
    "VALUES (:tenant_id, :artifact_digest, :path, :blob_digest, :size, :media_type)"
)
_MOVE = text(
    "INSERT INTO move (tenant_id, artifact_digest, revision, previous_revision, from_state, "
    "event, to_state, actor, reason, event_id, at) VALUES (:tenant_id, :digest, :revision, "
    ":previous, :from_state, :event, :to_state, :actor, :reason, :event_id, :at)"
)
_STATE = text(
    "UPDATE artifact SET state = :state, revision = :revision, "
    "content_digest = coalesce(:content_digest, content_digest) "
    "WHERE tenant_id = :tenant_id AND digest = :digest"
)


def artifact_find(session: Session, tenant_id: UUID, digest: str) -> ArtifactRow | None:
    """The artifact, or None."""
    row = session.execute(_ONE, {"tenant_id": tenant_id, "digest": digest}).one_or_none()
    return None if row is None else _artifact(row)


def artifact_get(
    session: Session, tenant_id: UUID, digest: str, *, lock: bool = False
) -> ArtifactRow:
    """The artifact; with ``lock``, its row lock is held to the end of the transaction.

    Raises:
        NotFoundError: no such artifact in this tenant.
    """
    sql = _ONE_LOCKED if lock else _ONE
    row = session.execute(sql, {"tenant_id": tenant_id, "digest": digest}).one_or_none()
    if row is None:
        raise NotFoundError("not found")
    return _artifact(row)


def artifact_insert(
    session: Session,
    *,
    tenant_id: UUID,
    digest: Digest,
    adapter: str,
    base_digest: Digest,
    manifest: bytes,
    declaration: dict[str, Any],
    publisher: str,
    files: Sequence[FileEntry],
    config: FileEntry,
    at: datetime,
) -> bool:
    """Create the artifact in NEW with the root of its moves; False when it already exists.

    ``config`` is the manifest's config blob; it is kept beside the files under an empty path.
    """
    created = rows_changed(
        session,
        _INSERT,
        {
            "tenant_id": tenant_id,
            "digest": digest,
            "adapter": adapter,
            "base_digest": base_digest,
            "manifest": manifest,
            "declaration": json.dumps(declaration),
            "publisher": publisher,
            "bytes": sum(file.size for file in files),
            "at": at,
        },
    )
    if not created:
        return False
    for file in (*files, config):
        session.execute(
            _INSERT_FILE,
            {
                "tenant_id": tenant_id,
                "artifact_digest": digest,
                "path": file.path,
                "blob_digest": file.digest,
                "size": file.size,
                "media_type": file.media_type,
            },
        )
    _move_insert(
        session,
        tenant_id=tenant_id,
        digest=digest,
        revision=0,
        previous=0,
        states=("NEW", "created", "NEW"),
        actor=publisher,
        reason="",
        at=at,
        adapter=adapter,
    )
    return True


def artifact_advance(
    session: Session,
    artifact: ArtifactRow,
    event: Event,
    *,
    actor: str,
    reason: str,
    at: datetime,
    details: Mapping[str, Any] | None = None,
    content_digest: Digest | None = None,
) -> tuple[State, UUID]:
    """Move a locked artifact and write the event of it; the new state and the event's id.

    ``details`` are added to the event's body; ``content_digest`` is kept where one is given.

    Raises:
        IllegalMoveError: the lifecycle has no such move.
    """
    to_state = advance(artifact.state, event)
    revision = artifact.revision + 1
    event_id = _move_insert(
        session,
        tenant_id=artifact.tenant_id,
        digest=artifact.digest,
        revision=revision,
        previous=artifact.revision,
        states=(artifact.state, event, to_state),
        actor=actor,
        reason=reason,
        at=at,
        adapter=artifact.adapter,
        details=details,
    )
    session.execute(
        _STATE,
        {
            "tenant_id": artifact.tenant_id,
            "digest": artifact.digest,
            "state": to_state,
            "revision": revision,
            "content_digest": content_digest,
        },
    )
    return to_state, event_id


def artifact_page(
    session: Session,
    *,
    tenant_id: UUID | None,
    adapter: str | None,
    state: str | None,
    after: tuple[str, str] | None,
    limit: int,
) -> list[ArtifactRow]:
    """Artifacts newest first, after the cursor (submitted at, digest)."""
    where, values = ["true"], {"limit": limit}  # type: tuple[list[str], dict[str, Any]]
    for name, value in (("tenant_id", tenant_id), ("adapter", adapter), ("state", state)):
        if value is not None:
            where.append(f"a.{name} = :{name}")
            values[name] = value
    if after is not None:
        where.append("(a.submitted_at, a.digest) < (CAST(:at AS timestamptz), :digest)")
        values["at"], values["digest"] = after
    sql = (
        f"SELECT {_COLUMNS}{_FROM}WHERE {' AND '.join(where)} "
        "ORDER BY a.submitted_at DESC, a.digest DESC LIMIT :limit"
    )
    return [_artifact(row) for row in session.execute(text(sql), values)]


def artifact_files(session: Session, tenant_id: UUID, digest: str) -> list[FileEntry]:
    """The artifact's files, ordered by path."""
    rows = session.execute(
        text(
            "SELECT path, blob_digest, size, media_type FROM artifact_blob "
            "WHERE tenant_id = :tenant_id AND artifact_digest = :digest AND path <> '' "
            "ORDER BY path"
        ),
        {"tenant_id": tenant_id, "digest": digest},
    )
    return [FileEntry(r.path, Digest(r.blob_digest), r.size, r.media_type) for r in rows]


def artifacts_with_blob(session: Session, tenant_id: UUID, blob_digest: str) -> list[ArtifactRow]:
    """All artifacts of the tenant that hold this blob."""
    sql = (
        f"SELECT {_COLUMNS}{_FROM}WHERE a.tenant_id = :tenant_id AND EXISTS "
        "(SELECT 1 FROM artifact_blob b WHERE b.tenant_id = a.tenant_id "
        "AND b.artifact_digest = a.digest AND b.blob_digest = :blob_digest)"
    )
    values = {"tenant_id": tenant_id, "blob_digest": blob_digest}
    return [_artifact(row) for row in session.execute(text(sql), values)]


def _move_insert(
    session: Session,
    *,
    tenant_id: UUID,
    digest: Digest,
    revision: int,
    previous: int,
    states: tuple[str, str, str],
    actor: str,
    reason: str,
    at: datetime,
    adapter: str,
    details: Mapping[str, Any] | None = None,
) -> UUID:
    from_state, event, to_state = states
    event_id = event_append(
        session,
        tenant_id=tenant_id,
        kind=f"artifact.{event}",
        subject=digest,
        actor=actor,
        at=at,
        body={
            "adapter": adapter,
            "from": from_state,
            "to": to_state,
            "revision": revision,
            "reason": reason,
            **(details or {}),
        },
    )
    session.execute(
        _MOVE,
        {
            "tenant_id": tenant_id,
            "digest": digest,
            "revision": revision,
            "previous": previous,
            "from_state": from_state,
            "event": event,
            "to_state": to_state,
            "actor": actor,
            "reason": reason,
            "event_id": event_id,
            "at": at,
        },
    )
    return event_id


def _artifact(row: Any) -> ArtifactRow:
    return ArtifactRow(
        tenant_id=row.tenant_id,
        tenant=row.tenant,
        digest=row.digest,
        adapter=row.adapter,
        base_digest=row.base_digest,
        manifest=bytes(row.manifest),
        declaration=row.declaration,
        publisher=row.publisher,
        bytes=row.bytes,
        state=State(row.state),
        revision=row.revision,
        submitted_at=row.submitted_at,
        admitted=row.admitted,
        content_digest=row.content_digest,
    )
