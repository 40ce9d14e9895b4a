"""Who may wait at once, and whose turn it is: bounds and turns between tenants."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from uuid import UUID

from gpu_worker.serving.tenant_queue import TenantQueue
from registry_service.domain.errors import TooManyRequestsError, UnavailableError

# A tenant has few while that is no more than this part of what it may have.
_FEW_PART: Final = 8


class Places:
    """Places of one kind, bounded for each tenant and in all. Thread-safe.

    The second half of all is for tenants with few: no number of tenants with more keeps them out.
    """

    def __init__(self, what: str, *, tenant_most: int, most: int) -> None:
        """``what`` names in the plural what takes a place."""
        self._what = what
        self._tenant_most, self._most = tenant_most, most
        self._lock = threading.Lock()
        self._taken: Counter[UUID] = Counter()

    @contextmanager
    def held(self, tenant_id: UUID, count: int = 1) -> Iterator[None]:
        """Hold so many of a tenant's places; they are given back on whichever thread it ends.

        Raises:
            TooManyRequestsError: the tenant has as many as it may. UnavailableError: all are taken.
        """
        self._take(tenant_id, count)
        try:
            yield
        finally:
            with self._lock:
                self._taken[tenant_id] -= count
                if not self._taken[tenant_id]:
                    del self._taken[tenant_id]

    def _take(self, tenant_id: UUID, count: int) -> None:
        with self._lock:
            having = self._taken[tenant_id] + count
            if having > self._tenant_most:
                raise TooManyRequestsError(
                    f"expected at most {self._tenant_most} {self._what} at once for this tenant",
                    retry_after=1,
                )
            most = self._most if having * _FEW_PART <= self._tenant_most else self._most // 2
            if self._taken.total() + count > most:
                raise UnavailableError(
                    f"expected at most {most} {self._what} at once on this node", retry_after=1
                )
            self._taken[tenant_id] = having


class TurnLock:
    """A lock whose waiting tenants take turns, however many wait for one of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting = TenantQueue[object]()
        self._held = False

    @contextmanager
    def held(self, tenant_id: UUID) -> Iterator[None]:
        """Wait for a turn of this tenant, and hold the lock."""
        ticket = object()
        with self._changed:
            self._waiting.put(tenant_id, ticket)
            self._changed.wait_for(lambda: not self._held and self._waiting.peek() is ticket)
            self._held = True
            self._waiting.take()
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()
