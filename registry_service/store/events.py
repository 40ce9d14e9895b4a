"""Audit events: appended with the change they record, numbered after it is committed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from uuid import UUID, uuid4

from sqlalchemy import text
from sqlalchemy.orm import Session

from registry_service.store.database import rows_changed

_APPEND = text(
    "INSERT INTO event (tenant_id, id, kind, subject, actor, at, body) "
    "VALUES (:tenant_id, :id, :kind, :subject, :actor, :at, CAST(:body AS jsonb))"
)
_SEQUENCER_LOCK: Final = 7_262_002
# Only committed rows are visible here and only one sequencer holds the lock, so that positions
# have no gaps and none shows up below one that was already readable.
_NUMBER = text(
    "WITH waiting AS ("
    "  SELECT tenant_id, id, row_number() OVER (ORDER BY written) AS n FROM event"
    "  WHERE position IS NULL ORDER BY written LIMIT :batch"
    "), last AS (SELECT coalesce(max(position), 0) AS position FROM event) "
    "UPDATE event SET position = last.position + waiting.n FROM waiting, last "
    "WHERE event.tenant_id = waiting.tenant_id AND event.id = waiting.id"
)
_PAGE = (
    "SELECT e.position, e.id, e.kind, e.subject, e.actor, e.at, e.body, e.tenant_id, "
    "t.name AS tenant FROM event e JOIN tenant t ON t.id = e.tenant_id "
    "WHERE e.position > :after"
)


def event_append(
    session: Session,
    *,
    tenant_id: UUID,
    kind: str,
    subject: str,
    actor: str,
    at: datetime,
    body: Mapping[str, Any],
) -> UUID:
    """Record an event in the transaction of the change it tells of."""
    event_id = uuid4()
    session.execute(
        _APPEND,
        {
            "tenant_id": tenant_id,
            "id": event_id,
            "kind": kind,
            "subject": subject,
            "actor": actor,
            "at": at,
            "body": json.dumps(body),
        },
    )
    return event_id


def events_number(session: Session, batch: int = 1000) -> int:
    """Give the next positions to committed events; the number of events done.

    Returns 0 at once when another sequencer holds the lock.
    """
    held = session.execute(
        text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": _SEQUENCER_LOCK}
    ).scalar_one()
    if not held:
        return 0
    return rows_changed(session, _NUMBER, {"batch": batch})


def event_last(session: Session) -> int:
    """The last position that was given; 0 when there is none."""
    last: int = session.execute(text("SELECT coalesce(max(position), 0) FROM event")).scalar_one()
    return last


def event_page(
    session: Session, *, after: int, limit: int, tenant_id: UUID | None = None, subject: str = ""
) -> list[dict[str, Any]]:
    """Numbered events after a position, oldest first, in their wire form."""
    sql = _PAGE
    values: dict[str, Any] = {"after": after, "limit": limit}
    if tenant_id is not None:
        sql += " AND e.tenant_id = :tenant_id"
        values["tenant_id"] = tenant_id
    if subject:
        sql += " AND e.subject = :subject"
        values["subject"] = subject
    rows = session.execute(text(sql + " ORDER BY e.position LIMIT :limit"), values)
    return [
        {
            "index": row.position,
            "id": str(row.id),
            "kind": row.kind,
            "tenant": row.tenant,
            "tenantId": str(row.tenant_id),
            "subject": row.subject,
            "actor": row.actor,
            "at": row.at,
            "body": row.body,
        }
        for row in rows
    ]
