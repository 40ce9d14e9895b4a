"""What waits, by tenant: tenants take turns, and what one of them waits for comes in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar
from uuid import UUID

_T = TypeVar("_T")


class TenantQueue(Generic[_T]):
    """The tenant that had the last turn comes behind all that wait by then, however much it waits
    for. The caller serializes its calls.
    """

    def __init__(self) -> None:
        # In the order of the turns.
        self._waiting: dict[UUID, deque[_T]] = {}
        self._last: UUID | None = None

    def __len__(self) -> int:
        return sum(len(items) for items in self._waiting.values())

    def __iter__(self) -> Iterator[_T]:
        return (item for items in self._waiting.values() for item in items)

    def of_tenant(self, tenant_id: UUID) -> int:
        """How much a tenant waits for."""
        return len(self._waiting.get(tenant_id, ()))

    def put(self, tenant_id: UUID, item: _T) -> None:
        """Let this wait as its tenant's last."""
        self._waiting.setdefault(tenant_id, deque()).append(item)

    def peek(self) -> _T:
        """What ``take`` would take. Something has to wait."""
        return self._waiting[self._turn()][0]

    def take(self) -> _T:
        """The first of the tenant whose turn it is. Something has to wait."""
        tenant_id = self._last = self._turn()
        items = self._waiting[tenant_id]
        item = items.popleft()
        if not items:
            del self._waiting[tenant_id]
        return item

    def remove(self, tenant_id: UUID, leaves: Callable[[_T], bool]) -> list[_T]:
        """Those of a tenant that leave, which wait no more."""
        items = self._waiting.get(tenant_id, deque())
        gone = [item for item in items if leaves(item)]
        if len(gone) == len(items):
            self._waiting.pop(tenant_id, None)
        else:
            self._waiting[tenant_id] = deque(item for item in items if not leaves(item))
        return gone

    def clear(self) -> None:
        """Nothing waits any more."""
        self._waiting.clear()

    def _turn(self) -> UUID:
        if self._last is not None and (items := self._waiting.pop(self._last, None)):
            self._waiting[self._last] = items
        return next(iter(self._waiting))
