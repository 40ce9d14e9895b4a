"""The memory that sessions take beside lanes: pages that are read, and states that are saved.

It is reserved before it is taken. What all sessions take at once, and what one tenant's do, is a
part of what the ledger had free at first: the rest stays for loads, and for other tenants.
"""

from __future__ import annotations

import threading
from collections import Counter
from uuid import UUID

from gpu_worker.serving.ledger import Category, Ledger, LedgerFullError, Owner, Reservation
from gpu_worker.serving.residency import Key
from registry_service.domain import limits


class SlotMemory:
    """Sessions' part of a ledger. Thread-safe; all sizes are in bytes."""

    def __init__(self, ledger: Ledger) -> None:
        free = ledger.free(Category.KV)
        self._ledger = ledger
        self._most = free * limits.SLOT_MEMORY_PERCENT // 100
        self._tenant_most = free * limits.SLOT_TENANT_MEMORY_PERCENT // 100
        self._lock = threading.Lock()
        self._held: Counter[UUID] = Counter()

    def reserve(self, size: int, owner: Owner) -> Room:
        """Claim memory before it is taken.

        Raises:
            LedgerFullError: more than the ledger, all sessions or the tenant's have left.
        """
        tenant = owner.tenant_id if isinstance(owner, Key) else owner
        with self._lock:
            left = min(self._most - self._held.total(), self._tenant_most - self._held[tenant])
            if size > left:
                raise LedgerFullError(Category.KV, size, left)
            reservation = self._ledger.reserve(Category.KV, size, owner)
            self._held[tenant] += size
        return Room(self, reservation, tenant, size)

    def give_back(self, tenant: UUID, size: int) -> None:
        """So much is a tenant's no more. Called by its rooms."""
        with self._lock:
            self._held -= Counter({tenant: size})


class Room:
    """Memory that was reserved. One holder at a time has it."""

    def __init__(
        self, memory: SlotMemory, reservation: Reservation, tenant: UUID, size: int
    ) -> None:
        self._memory, self._reservation = memory, reservation
        self._tenant, self._size = tenant, size

    def commit(self, size: int) -> None:
        """Say how much of it was taken; the rest is free again."""
        self._reservation.commit(size)
        self._memory.give_back(self._tenant, self._size - size)

    def release(self) -> None:
        """Give all of it back. A second time does nothing."""
        self._memory.give_back(self._tenant, self._reservation.release())


class Held:
    """The memory of a state that a turn has, until so many sequences are done with it."""

    def __init__(self, sequences: int = 1) -> None:
        self.room: Room | None = None
        self._left = sequences

    def less(self) -> None:
        """One sequence is done with it. Called on the model's thread."""
        self._left -= 1
        if self._left <= 0:
            self.release()

    def release(self) -> None:
        """The state is gone, or never came. On any thread, and as often as one likes."""
        room, self.room = self.room, None
        if room is not None:
            room.release()
