"""One load, from what is asked to what is resident, and back. When it fails it leaves nothing.

    verdict → placement → size → room → reserve → room on the disk → read, verify, attach → commit

Memory is reserved before a byte is read, and the place in the pool is taken before the memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from uuid import UUID

from gpu_worker.serving.admission import Admission, Admitted
from gpu_worker.serving.disk import Disk
from gpu_worker.serving.eviction import Bounds
from gpu_worker.serving.ledger import Category, LedgerFullError, Reservation
from gpu_worker.serving.loader import Load, plainly
from gpu_worker.serving.memory import Ledgers
from gpu_worker.serving.options import LoadLimits
from gpu_worker.serving.placements import Placements, Registry
from gpu_worker.serving.residency import Key, Residency
from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import RefusedError, UnavailableError
from registry_service.trust.verdict import VerdictClaims

MakeRoom = Callable[[Key, int, Bounds], None]
"""Unloads what has to go before a key's bytes fit; raises UnavailableError when they cannot."""


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

    def load(self, load: Load, make_room: MakeRoom, disk: Disk) -> Loaded:
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
        with ExitStack() as undo:
            self.placements.take(load.tenant, key)
            undo.callback(self.placements.release, key)
            with plainly(key):
                size = self._admission.size(claims)
            if size > self.limits.adapter_bytes:
                raise RefusedError(
                    f"adapter: expected at most {self.limits.adapter_bytes} bytes, got {size}"
                )
            with ExitStack() as passing:
                reservation = self._reserve(key, size, make_room, passing)
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

    def _reserve(self, key: Key, size: int, make_room: MakeRoom, passing: ExitStack) -> Reservation:
        """A row of the bank, whatever part of it will be taken; and until ``passing`` closes, room
        for the files that are read and for what is made of them on the way into the row.
        """
        row, memory = self.memory.row, self.memory
        with self._planning:
            make_room(key, row, self.bounds)
            try:
                for ledger, taken in ((memory.host, size), (memory.device, memory.preparing)):
                    passing.callback(ledger.hold(Category.WORKSPACE, taken, key).release)
                return memory.device.reserve(Category.ADAPTER, row, key)
            except LedgerFullError as error:
                raise UnavailableError(f"the node is full: {error}") from error
