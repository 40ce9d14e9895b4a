"""What slots tell: one typed event for each thing that happens to a page."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from registry_service.domain.digests import Digest

_LOG = logging.getLogger(__name__)


class SlotEventKind(StrEnum):
    """What happened to a page."""

    SAVED = "saved"
    NOT_SAVED = "not saved"
    RESTORED = "restored"
    REFUSED = "refused"
    TRIMMED = "trimmed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class SlotEvent:
    """One event. It holds no tokens. ``page`` is 0 where there is none; the index has no tenant.

    ``reason`` is a ``Refusal``'s text where a page was refused; ``tokens`` is how many
    were restored.
    """

    kind: SlotEventKind
    page: int
    tenant_id: UUID | None = None
    adapter_digest: Digest | None = None
    reason: str = ""
    expected: str = ""
    got: str = ""
    tokens: int = 0


def event_log(event: SlotEvent) -> None:
    """Write an event to the log."""
    parts = [
        f"{name} {value}"
        for name, value in (
            ("tenant", event.tenant_id),
            ("adapter", event.adapter_digest),
            ("reason", event.reason),
            ("expected", event.expected),
            ("got", event.got),
            ("tokens", event.tokens),
        )
        if value
    ]
    _LOG.info("slot page %d: %s: %s", event.page, event.kind, ", ".join(parts))
