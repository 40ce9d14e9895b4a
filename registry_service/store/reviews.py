"""Reports, reviews and verdicts of an artifact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import text
from sqlalchemy.orm import Session

from registry_service.domain.canonical import canonical_json
from registry_service.domain.digests import digest_of
from registry_service.store.artifacts import ArtifactRow


def report_insert(
    session: Session,
    *,
    tenant_id: UUID,
    artifact_digest: str,
    stage: str,
    attempt: int,
    worker: str,
    verdict: str,
    content: dict[str, Any],
    at: datetime,
) -> str:
    """Keep a report; its digest."""
    digest = digest_of(canonical_json(content))
    session.execute(
        text(
            "INSERT INTO report (tenant_id, id, artifact_digest, stage, attempt, worker, verdict, "
            "digest, content, created_at) VALUES (:tenant_id, :id, :artifact, :stage, :attempt, "
            ":worker, :verdict, :digest, CAST(:content AS jsonb), :at)"
        ),
        {
            "tenant_id": tenant_id,
            "id": uuid4(),
            "artifact": artifact_digest,
            "stage": stage,
            "attempt": attempt,
            "worker": worker,
            "verdict": verdict,
            "digest": digest,
            "content": json.dumps(content),
            "at": at,
        },
    )
    return digest


def report_list(
    session: Session,
    tenant_id: UUID,
    artifact_digest: str,
    *,
    after: tuple[str, str] | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Reports of an artifact, oldest first, after the cursor (created at, digest), in wire form."""
    values: dict[str, Any] = {"tenant_id": tenant_id, "digest": artifact_digest, "limit": limit}
    where = ""
    if after is not None:
        where = "AND (created_at, digest) > (CAST(:at AS timestamptz), :last) "
        values["at"], values["last"] = after
    rows = session.execute(
        text(
            "SELECT stage, attempt, worker, verdict, digest, content, created_at FROM report "
            f"WHERE tenant_id = :tenant_id AND artifact_digest = :digest {where}"
            "ORDER BY created_at, digest LIMIT :limit"
        ),
        values,
    )
    return [
        {
            "stage": row.stage,
            "attempt": row.attempt,
            "worker": row.worker,
            "createdAt": row.created_at,
            "verdict": row.verdict,
            "reportDigest": row.digest,
            **row.content,
        }
        for row in rows
    ]


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """The newest report of one stage of an artifact, without its findings."""

    artifact_digest: str
    stage: str
    digest: str
    created_at: datetime
    measurements: dict[str, Any]


def measured_list(session: Session, tenant_id: UUID, digests: Sequence[str]) -> list[MeasuredRow]:
    """The measurements in the newest report of each stage of several artifacts."""
    rows = session.execute(
        text(
            "SELECT DISTINCT ON (artifact_digest, stage) artifact_digest, stage, digest, "
            "created_at, content->'measurements' AS measurements FROM report "
            "WHERE tenant_id = :tenant_id AND artifact_digest = ANY(:digests) "
            "ORDER BY artifact_digest, stage, created_at DESC, digest"
        ),
        {"tenant_id": tenant_id, "digests": list(digests)},
    )
    return [MeasuredRow(**row._mapping) for row in rows]


def review_insert(
    session: Session,
    artifact: ArtifactRow,
    *,
    reviewer: str,
    decision: str,
    reason: str,
    at: datetime,
) -> int:
    """Record one person's decision on this stay in review; the number of approvals there are."""
    session.execute(
        text(
            "INSERT INTO review (tenant_id, artifact_digest, revision, reviewer, decision, "
            "reason, at) VALUES (:tenant_id, :digest, :revision, :reviewer, :decision, :reason, "
            ":at) ON CONFLICT DO NOTHING"
        ),
        {
            "tenant_id": artifact.tenant_id,
            "digest": artifact.digest,
            "revision": artifact.revision,
            "reviewer": reviewer,
            "decision": decision,
            "reason": reason,
            "at": at,
        },
    )
    return int(
        session.execute(
            text(
                "SELECT count(*) FROM review WHERE tenant_id = :tenant_id "
                "AND artifact_digest = :digest AND revision = :revision AND decision = 'approve'"
            ),
            {
                "tenant_id": artifact.tenant_id,
                "digest": artifact.digest,
                "revision": artifact.revision,
            },
        ).scalar_one()
    )


def review_list(
    session: Session,
    tenant_id: UUID,
    artifact_digest: str,
    *,
    after: tuple[str, str] | None,
    limit: int,
) -> list[dict[str, Any]]:
    """Decisions on an artifact, oldest first, after the cursor (at, reviewer)."""
    values: dict[str, Any] = {"tenant_id": tenant_id, "digest": artifact_digest, "limit": limit}
    where = ""
    if after is not None:
        where = "AND (at, reviewer) > (CAST(:at AS timestamptz), :last) "
        values["at"], values["last"] = after
    rows = session.execute(
        text(
            "SELECT reviewer, decision, reason, at FROM review "
            f"WHERE tenant_id = :tenant_id AND artifact_digest = :digest {where}"
            "ORDER BY at, reviewer LIMIT :limit"
        ),
        values,
    )
    return [dict(row._mapping) for row in rows]


def verdict_put(
    session: Session,
    artifact: ArtifactRow,
    *,
    envelope: bytes,
    policy_digest: str,
    not_after: datetime,
    event_id: UUID,
    at: datetime,
) -> None:
    """Keep the signed verdict of an (artifact, base) pair."""
    session.execute(
        text(
            "INSERT INTO verdict (tenant_id, artifact_digest, base_digest, envelope, "
            "policy_digest, not_after, event_id, created_at) VALUES (:tenant_id, :digest, :base, "
            ":envelope, :policy, :not_after, :event_id, :at) "
            "ON CONFLICT (tenant_id, artifact_digest, base_digest) DO UPDATE SET "
            "envelope = :envelope, policy_digest = :policy, not_after = :not_after, "
            "event_id = :event_id, created_at = :at"
        ),
        {
            "tenant_id": artifact.tenant_id,
            "digest": artifact.digest,
            "base": artifact.base_digest,
            "envelope": envelope,
            "policy": policy_digest,
            "not_after": not_after,
            "event_id": event_id,
            "at": at,
        },
    )


def verdict_find(session: Session, artifact: ArtifactRow) -> bytes | None:
    """The signed verdict of an artifact on its base, or None."""
    envelope = session.execute(
        text(
            "SELECT envelope FROM verdict WHERE tenant_id = :tenant_id "
            "AND artifact_digest = :digest AND base_digest = :base"
        ),
        {
            "tenant_id": artifact.tenant_id,
            "digest": artifact.digest,
            "base": artifact.base_digest,
        },
    ).scalar_one_or_none()
    return None if envelope is None else bytes(envelope)
