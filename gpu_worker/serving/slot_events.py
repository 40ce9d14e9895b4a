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


def event_log(
    event: SlotEvent, base_digest: Digest | None = None, tokenizer_digest: Digest | None = None
) -> None:
    """Write an event to the log, with the tuple of the requests that it is about.

    A node has one base and one tokenizer, which the event does not name.
    """
    fields = {
        "tenantId": event.tenant_id and str(event.tenant_id),
        "baseDigest": base_digest,
        "adapterDigest": event.adapter_digest,
        "tokenizerDigest": tokenizer_digest,
        "page": event.page,
        "reason": event.reason,
        "expected": event.expected,
        "got": event.got,
        "tokens": event.tokens,
    }
    _LOG.info(
        "slot page %d: %s%s",
        event.page,
        event.kind,
        event.reason and f": {event.reason}",
        extra={
            "event": f"slot.{event.kind.replace(' ', '_')}",
            **{name: value for name, value in fields.items() if value},
        },
    )
