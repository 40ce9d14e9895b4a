"""What a node keeps of adapters on its disk: pulled files, within a budget, and sessions' slots.

Files stay when an adapter is unloaded, so that it comes back without being fetched; the least
recently used go when others need their place. Whatever is here of an adapter, its files or its
slots alone, is known by every digest that it may be revoked by.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from gpu_worker.serving import eviction
from gpu_worker.serving.eviction import Bounds, Held, NoRoomError
from gpu_worker.serving.residency import Key
from gpu_worker.serving.store import NodeStore
from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import RegistryError, UnavailableError

_LOG = logging.getLogger(__name__)


class Slots(Protocol):
    """Holds sessions of adapters, on disk and on their way there."""

    def keys(self) -> set[Key]:
        """The adapters that it holds something of."""
        ...

    def remove(self, digest: Digest) -> int:
        """Remove every slot file of an adapter; how many."""
        ...


class Disk:
    """Files and slots of one node. Thread-safe."""

    def __init__(
        self, store: NodeStore, slots: Sequence[Slots], busy: Callable[[], set[Key]]
    ) -> None:
        """``busy`` are the adapters that are loaded, or about to be: their files stay."""
        self._store = store
        self._slots = slots
        self._busy = busy
        # Two loads that make room at once would both count on the same bytes.
        self._planning = threading.Lock()

    def room_make(self, key: Key, size: int) -> None:
        """Make room for ``size`` bytes of a key's files, which count from now on.

        Raises:
            UnavailableError: nothing that may go makes room.
        """
        with self._planning:
            if self._store.folder(key).exists():
                self._store.touch(key)
                return
            stored, busy = self._store.stored(), self._busy()
            held = [Held(item.key, item.size, item.key not in busy, item.used) for item in stored]
            bounds = self._bounds(sum(item.size for item in stored))
            try:
                plan = eviction.room_make(held, key.tenant_id, size, bounds)
            except NoRoomError as error:
                raise UnavailableError(f"no room on the disk: {error}") from error
            for found in plan:
                self._drop(found.key)
                _LOG.info("%s: files removed: %s", found.key.digest, found.reason)
            self._store.expect(key, size)

    def used(self, key: Key) -> None:
        """A key's files were in use until now."""
        self._store.touch(key)

    def forget(self, key: Key) -> None:
        """Remove what a load that failed has fetched."""
        try:
            self._drop(key)
        except RegistryError as error:
            _LOG.warning("%s: files of a failed load stay: %s", key.digest, error.message)

    def purge(self, key: Key) -> int:
        """Remove whatever is here of a revoked key; how many slot files there were.

        Raises:
            UnavailableError: some cannot be removed; asking again goes on.
        """
        files = sum(slots.remove(key.digest) for slots in self._slots)
        self._store.remove(key)
        return files

    def keys(self) -> set[Key]:
        """Every key that something is here of."""
        return {*self._store.keys(), *self._store.revocable_keys(), *self._slot_keys()}

    def holds(self, key: Key) -> bool:
        """True when something is here of a key."""
        return self._store.holds(key) or key in self._slot_keys()

    def revocable(self, key: Key) -> tuple[Digest, ...]:
        """The digests of bytes and content that a key may be revoked by, as far as known."""
        return self._store.revocable(key)

    def _drop(self, key: Key) -> None:
        """Remove files; what they may be revoked by is known for as long as there are slots."""
        self._store.files_remove(key)
        slotted = self._slot_keys()
        for other in self._store.revocable_keys():
            if other not in slotted and not self._store.folder(other).exists():
                self._store.remove(other)

    def _slot_keys(self) -> set[Key]:
        return {key for slots in self._slots for key in slots.keys()}  # noqa: SIM118 - no mapping

    def _bounds(self, taken: int) -> Bounds:
        """What files may take; on a small disk less, so that marks can always be written."""
        size = min(limits.STORE_NODE_BYTES, taken + self._store.free() - limits.STORE_FREE_BYTES)
        return Bounds(
            size=size,
            mark=size,
            adapters=limits.STORED_ADAPTERS,
            tenant_size=limits.STORE_TENANT_BYTES,
            tenant_adapters=limits.STORED_ADAPTERS,
        )
