"""One load, from what is asked to what is resident, and back. When it fails it leaves nothing.

    verdict → placement → size → room → reserve → room on the disk → read, verify, attach → commit

Memory is reserved before a byte is read, and the place in the pool is taken before the memory.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from gpu_worker.serving.admission import Admission, Admitted
from gpu_worker.serving.disk import Disk
from gpu_worker.serving.eviction import Bounds
from gpu_worker.serving.ledger import Category, LedgerFullError, Reservation
from gpu_worker.serving.loader import Load
from gpu_worker.serving.memory import Ledgers
from gpu_worker.serving.options import LoadLimits
from gpu_worker.serving.residency import Key
from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import (
    ConflictError,
    RefusedError,
    UnavailableError,
)
from registry_service.trust.verdict import VerdictClaims

_LOG = logging.getLogger(__name__)

MakeRoom = Callable[[Key, int, Bounds], None]
"""Unloads what has to go before a key's bytes fit; raises UnavailableError when they cannot."""


class Registry(Protocol):
    """Issues the leases under which a node holds an adapter."""

    def placement_take(self, node: str, tenant: str, digest: str) -> dict[str, object]:
        """Raises ConflictError when as many nodes hold it as it declares."""
        ...

    def placement_release(self, node: str, tenant: str, digest: str) -> None:
        """The node does not hold it any more."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A resident adapter, its line in the ledger, and what takes the load back, files and all."""

    admitted: Admitted
    reservation: Reservation
    undo: ExitStack


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
        self._admission = admission
        self._registry = registry
        self._node = node
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
        claims = self.verdict(load.tenant, load.adapter, key.digest, key.tenant_id)
        with ExitStack() as undo:
            self._placement_take(load)
            undo.callback(self._placement_release, load.tenant, key)
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
        self._placement_release(loaded.admitted.claims.tenant, key)
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

    def _placement_take(self, load: Load) -> None:
        try:
            self._registry.placement_take(self._node, load.tenant, load.key.digest)
        except ConflictError as error:
            raise UnavailableError(
                f"no place for another replica: {error.message}",
                retry_after=limits.NODE_LEASE_SECONDS,
            ) from error

    def _placement_release(self, tenant: str, key: Key) -> None:
        try:
            self._registry.placement_release(self._node, tenant, key.digest)
        except Exception as error:  # noqa: BLE001 - the lease ends by itself: nobody renews it
            _LOG.warning("%s: placement not released: %r", key.digest, error)
