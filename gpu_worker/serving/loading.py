"""One load, from what is asked to what is resident, and back. When it fails it leaves nothing.

    verdict → size → placement → room → reserve → room on the disk → read, verify, attach → commit

Memory is reserved before a byte is read, and the place in the pool is taken before the memory. What
is too large to be loaded takes none: for a place in a full pool another adapter goes.
"""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

from gpu_worker.serving.admission import Admission, Admitted
from gpu_worker.serving.disk import Disk
from gpu_worker.serving.eviction import Bounds
from gpu_worker.serving.ledger import Category, LedgerFullError, Reservation
from gpu_worker.serving.loader import Load, plainly
from gpu_worker.serving.memory import Ledgers
from gpu_worker.serving.options import LoadLimits
from gpu_worker.serving.placements import NoPlaceError, Placements, Registry
from gpu_worker.serving.residency import Key, Residency
from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import RefusedError, UnavailableError
from registry_service.trust.verdict import VerdictClaims


class Room(Protocol):
    """Unloads what has to go before a key is loaded."""

    def room_make(self, key: Key, need: int, bounds: Bounds) -> None:
        """Until ``need`` bytes fit. Raises UnavailableError when they cannot."""
        ...

    def place_make(self, key: Key, *, own: bool) -> bool:
        """One, for its place in the pool (``own``: of the key's tenant); False when none may go."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A resident adapter, its line in the ledger, and what takes the load back, files and all."""

    admitted: Admitted
    reservation: Reservation
    undo: ExitStack


@dataclass(frozen=True, slots=True)
class Shelf:
    """What a node holds, under one lock: filled by loads, used by requests, emptied."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    table: Residency = field(default_factory=Residency)
    loaded: dict[Key, Loaded] = field(default_factory=dict)
    draining: set[Key] = field(default_factory=set)


class Loading:
    """Does loads, on whichever thread asks; several at once."""

    def __init__(
        self,
        admission: Admission,
        memory: Ledgers,
        registry: Registry,
        *,
        node: str,
        load_limits: LoadLimits,
    ) -> None:
        self.memory = memory
        self.limits = load_limits
        self.placements = Placements(registry, node)
        self._admission = admission
        # Two loads that look for room at once would both count on the same bytes.
        self._planning = threading.Lock()

    def load(self, load: Load, room: Room, disk: Disk) -> Loaded:
        """Load an adapter.

        Raises:
            NotFoundError: not admitted, or revoked. RefusedError: it must not or cannot run here.
            UnavailableError: not now: no place in the pool, no room, or no answer.
        """
        key = load.key
        # A load that failed may have weights left that the engine did not let go of then.
        self._admission.detach(key)
        with plainly(key):
            claims = self.verdict(load.tenant, load.adapter, key.digest, key.tenant_id)
            size = self._admission.size(claims)
        if size > self.limits.adapter_bytes:
            raise RefusedError(
                f"adapter: expected at most {self.limits.adapter_bytes} bytes, got {size}"
            )
        with ExitStack() as undo:
            self._place(load, room)
            undo.callback(self.placements.release, key)
            with ExitStack() as passing:
                reservation = self._reserve(key, size, room, passing)
                undo.callback(reservation.release)
                undo.callback(disk.forget, key)
                undo.callback(self._admission.detach, key)
                disk.room_make(key, size)
                with plainly(key):
                    admitted = self._admission.load(claims, self.limits.rank)
            reservation.commit(admitted.size)
            return Loaded(admitted, reservation, undo.pop_all())

    def verdict(
        self, tenant: str, adapter: str, digest: Digest, tenant_id: UUID | None
    ) -> VerdictClaims:
        """What the registry admitted under a digest, verified.

        Raises:
            NotFoundError: not admitted, or revoked. UntrustedError: it does not hold here.
        """
        return self._admission.verdict(tenant, adapter, digest, tenant_id)

    def unload(self, key: Key, loaded: Loaded) -> int:
        """Let an adapter go: weights, line in the ledger, place in the pool; the bytes it held.

        Asked again after a fault at any step, it goes on there.

        Raises:
            EngineError: it is in use; nothing changed.
        """
        self._admission.detach(key)
        loaded.reservation.release()
        self.placements.release(key)
        return loaded.admitted.size

    @property
    def bounds(self) -> Bounds:
        """What adapters may take on this node: whole rows of the bank."""
        row, adapters = self.memory.row, self.limits.adapters
        return Bounds(
            size=self.memory.device.bank,
            mark=row * math.ceil(adapters * limits.ADAPTER_MARK_PERCENT / 100),
            adapters=adapters,
            # Without a bound of its own a tenant may have all of them, and ask for one more.
            tenant_size=self.limits.tenant_bytes or self.memory.device.bank + row,
            tenant_adapters=self.limits.tenant_adapters,
        )

    def _place(self, load: Load, room: Room) -> None:
        """Take a place in the pool; in one that is full, that of an adapter that lies idle here.

        Once only: who comes first has what was given back, and that may be another node.
        """
        try:
            self.placements.take(load.tenant, load.key)
        except NoPlaceError as error:
            if not (
                room.place_make(load.key, own=error.of_tenant) and self.placements.returned_wait()
            ):
                raise
            self.placements.take(load.tenant, load.key)

    def _reserve(self, key: Key, size: int, room: Room, passing: ExitStack) -> Reservation:
        """A row of the bank, whatever part of it will be taken; and until ``passing`` closes, room
        for the files that are read and for what is made of them on the way into the row.
        """
        row, memory = self.memory.row, self.memory
        with self._planning:
            room.room_make(key, row, self.bounds)
            try:
                for ledger, taken in ((memory.host, size), (memory.device, memory.preparing)):
                    passing.callback(ledger.hold(Category.WORKSPACE, taken, key).release)
                return memory.device.reserve(Category.ADAPTER, row, key)
            except LedgerFullError as error:
                raise UnavailableError(f"the node is full: {error}") from error
