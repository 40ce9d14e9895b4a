"""Grants that were withdrawn, for as long as a context that was minted under them may hold.

A context carries its grant's epoch, which rises when the grant is withdrawn. The feed tells of that
within a moment; a node that cannot hear it refuses such a context when its minute is over.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

from registry_service.domain import limits
from registry_service.trust.routing_context import RoutingContext

# A context may come from a clock that is ahead, and be judged by one that is behind.
_KEPT: Final = timedelta(seconds=limits.ROUTING_CONTEXT_SECONDS + 2 * limits.CLOCK_SKEW_SECONDS)


class Grant(NamedTuple):
    """Whose right to run which adapter."""

    tenant_id: UUID
    adapter: str
    subject: str


class Withdrawn:
    """Which contexts are of a withdrawn grant. Thread-safe."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._lock = threading.Lock()
        # Of each grant its epoch now, and when that was heard: the longest ago first.
        self._epochs: dict[Grant, tuple[int, datetime]] = {}
        self._unknown_before = datetime.min.replace(tzinfo=UTC)

    def add(self, grant: Grant, epoch: int) -> None:
        """Contexts of this grant under an earlier epoch end."""
        now = self._now()
        with self._lock:
            before, _ = self._epochs.pop(grant, (0, now))
            self._epochs[grant] = max(epoch, before), now
            while next(iter(self._epochs.values()))[1] < now - _KEPT:
                del self._epochs[next(iter(self._epochs))]

    def missed(self) -> None:
        """Something was not heard: of no adapter's context from before is its grant known.

        By a clock that is ahead, what was minted before is from later than now.
        """
        with self._lock:
            self._unknown_before = self._now() + timedelta(seconds=limits.CLOCK_SKEW_SECONDS)

    def knows(self, context: RoutingContext) -> bool:
        """True when it was heard that a context's grant was withdrawn after it was minted.

        A tenant's right to a base is no grant of an adapter, and has no epoch.
        """
        if context.adapter is None:
            return False
        grant = Grant(context.tenant_id, context.adapter, context.subject)
        with self._lock:
            epoch, _ = self._epochs.get(grant, (0, None))
        return context.grant_epoch < epoch

    def unsure_seconds(self, context: RoutingContext) -> int:
        """0, or after how long a context that is minted anew can be judged, where this one cannot.

        At least one second, also where the clock that mints it is behind.
        """
        with self._lock:
            if context.adapter is None or context.issued_at >= self._unknown_before:
                return 0
            return max(1, math.ceil((self._unknown_before - self._now()).total_seconds()))
