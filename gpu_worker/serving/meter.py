"""Who a request is, and what it used: pure values.

The tuple is made once, from the verified routing context, and travels with the request through
queue, batch, cancellation, meter, logs and traces. Nothing makes another one on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple
from uuid import UUID

from registry_service.domain.digests import Digest
from registry_service.trust.routing_context import RoutingContext


class RequestTuple(NamedTuple):
    """Whose request it is, and what it runs; ``adapter_digest`` may be the base marker."""

    tenant_id: UUID
    base_digest: Digest
    adapter_digest: Digest
    tokenizer_digest: Digest

    def fields(self) -> dict[str, str]:
        """The tuple as logs and traces carry it."""
        return {
            "tenantId": str(self.tenant_id),
            "baseDigest": self.base_digest,
            "adapterDigest": self.adapter_digest,
            "tokenizerDigest": self.tokenizer_digest,
        }


def who_fields(who: RequestTuple | None) -> dict[str, str]:
    """The fields of a tuple that may not be known."""
    return {} if who is None else who.fields()


def request_tuple(context: RoutingContext) -> RequestTuple:
    """The tuple of a verified context."""
    return RequestTuple(
        context.tenant_id,
        context.base_digest,
        context.adapter_digest,
        context.tokenizer_digest,
    )


@dataclass(frozen=True, slots=True)
class Amount:
    """Requests and tokens. ``reused`` tokens are those of ``prompt`` that were not computed."""

    requests: int = 0
    prompt: int = 0
    completion: int = 0
    reused: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Meter:
    """What each tuple used in this run. The caller serializes its calls."""

    def __init__(self) -> None:
        self._used: dict[RequestTuple, Amount] = {}
        self._changed: dict[RequestTuple, int] = {}
        self._changes = 0

    def count(self, who: RequestTuple, amount: Amount) -> None:
        """Add what a request used, however it ended."""
        self._used[who] = self._used.get(who, Amount()) + amount
        self._changes += 1
        self._changed[who] = self._changes

    def used(self) -> dict[RequestTuple, Amount]:
        """Everything in this run."""
        return dict(self._used)

    def since(self, change: int) -> tuple[dict[RequestTuple, Amount], int]:
        """The totals that changed after ``change``, and the number of the last change.

        Totals, not differences: told twice, they are counted once.
        """
        found = {who: self._used[who] for who, at in self._changed.items() if at > change}
        return found, self._changes

    def run_end(self, change: int) -> dict[RequestTuple, Amount]:
        """The totals that changed after ``change``; from now on it counts another run."""
        found, _ = self.since(change)
        self._used.clear()
        self._changed.clear()
        return found

    def __len__(self) -> int:
        return len(self._used)
