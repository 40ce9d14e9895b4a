"""Letting go of residents: revoked, evicted to make room, or no longer ours to hold.

A revoked one drains, is purged with its files, unloaded and acknowledged, and never comes back. A
retired one drains and is unloaded; its files and slots stay.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from gpu_worker.serving import eviction
from gpu_worker.serving.admission import AdapterHost, Clock
from gpu_worker.serving.eviction import Bounds, Held, NoRoomError, Reason, Unloads
from gpu_worker.serving.held_list import HeldList
from gpu_worker.serving.ledger import Category
from gpu_worker.serving.loading import Loaded, Loading
from gpu_worker.serving.residency import Key, Residency, Resident, ResidentState
from gpu_worker.serving.store import NodeStore
from registry_service.domain.digests import Digest
from registry_service.domain.errors import UnavailableError
from registry_service.trust.revocation_list import Revoked

_LOG = logging.getLogger(__name__)
# An eviction that was planned may find its adapter in use again: then it is planned anew.
_PLANS: Final = 8
_REMEMBERED: Final = 4096

Acknowledge = Callable[[Key, int, int], None]
"""Tells the registry that a key is gone, the bytes that became free and the blocks purged."""


class Purges(Protocol):
    """Holds prefix blocks of adapters."""

    def purge(self, key: Key) -> int:
        """Drop every block that was computed with this adapter; how many."""
        ...


class Slots(Protocol):
    """Holds sessions of adapters on disk."""

    def remove(self, digest: Digest) -> int:
        """Remove every slot file of an adapter; how many."""
        ...


@dataclass(frozen=True, slots=True)
class Holders:
    """Whatever may hold something of an adapter when it goes, and who is told that it went."""

    acknowledge: Acknowledge
    purges: Sequence[Purges] = ()
    slots: Sequence[Slots] = ()


@dataclass(frozen=True, slots=True)
class Shelf:
    """What a node holds, under one lock: filled by loads, used by requests, emptied here."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    table: Residency = field(default_factory=Residency)
    loaded: dict[Key, Loaded] = field(default_factory=dict)
    draining: set[Key] = field(default_factory=set)


class Emptying:
    """Takes residents from the shelf, beside whoever asks for it."""

    def __init__(
        self,
        shelf: Shelf,
        loading: Loading,
        engine: AdapterHost,
        store: NodeStore,
        held: HeldList,
        holders: Holders,
        *,
        now: Clock,
    ) -> None:
        self._changed, self._table = shelf.changed, shelf.table
        self._loaded, self._draining = shelf.loaded, shelf.draining
        self._loading = loading
        self._engine = engine
        self._store = store
        self._held = held
        self._acknowledge = holders.acknowledge
        self._purges = holders.purges
        self._slots = holders.slots
        self._now = now
        self.unloads = Unloads(_REMEMBERED)

    def revoke(self, key: Key, deadline_seconds: float | None) -> None:
        """Refuse a key at once, then drain, purge, unload and acknowledge beside the caller."""
        deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
        with self._changed:
            self._table.revoke(key, deadline)
            self._changed.notify_all()
            if key in self._draining:
                return
            self._draining.add(key)
        threading.Thread(target=self._drain, args=(key,), name="drain", daemon=True).start()

    def placement_lost(self, key: Key) -> None:
        """Other nodes hold this key now: unload it once nobody uses it, beside the caller."""
        with self._changed:
            if self._table.state(key) is not ResidentState.SERVING or key in self._draining:
                return
            self._table.retire(key)
            self._draining.add(key)
            self._changed.notify_all()
        arguments = (key, Reason.PLACEMENT_LOST)
        threading.Thread(target=self._retire, args=arguments, name="retire", daemon=True).start()

    def listed_revoke(self) -> None:
        """Let go of whatever the revocation list names, by any of its digests."""
        stored = self._store.keys()
        with self._changed:
            keys = {item.key for item in self._table.residents()} | set(stored)
            named = {key: self.listed(key) for key in keys}
        for key, entry in named.items():
            if entry is not None:
                self.revoke(key, self.seconds_left(entry))

    def listed(self, key: Key) -> Revoked | None:
        loaded = self._loaded.get(key)
        others = () if loaded is None else loaded.admitted.revocable
        return self._held.find(key.tenant_id, key.digest, *others)

    def seconds_left(self, entry: Revoked) -> float | None:
        if entry.cancel_at is None:
            return None
        return max(0.0, (entry.cancel_at - self._now()).total_seconds())

    def _drain(self, key: Key) -> None:
        try:
            with self._changed:
                loaded = self._wait_while_loading(key) is not None
                if loaded:
                    self._wait_drained(key)
            purged = self._purge(key)
            freed = self._unload(key, Reason.REVOKED) if loaded else 0
            _LOG.info("%s: gone, %d bytes and %d blocks freed", key.digest, freed, purged)
            self._acknowledge(key, freed, purged)
        except Exception:  # noqa: BLE001 - heartbeat and list name it again: it starts over
            _LOG.exception("%s: letting go failed", key.digest)
        finally:
            with self._changed:
                self._draining.discard(key)

    def _purge(self, key: Key) -> int:
        """Drop caches, slots and pulled files, loaded or not; how many blocks there were."""
        blocks = sum(cache.purge(key) for cache in self._purges)
        files = sum(slots.remove(key.digest) for slots in self._slots)
        self._store.remove(key)
        _LOG.info("%s: %d blocks and %d slot files purged", key.digest, blocks, files)
        with self._changed:
            if self._table.state(key) is ResidentState.DRAINING:
                self._table.purge(key)
        return blocks

    def _unload(self, key: Key, reason: Reason) -> int:
        """Unload what nobody uses any more; the bytes of memory that became free."""
        freed = self._loading.unload(key, self._loaded[key])
        with self._changed:
            if self._table.state(key) is ResidentState.DRAINING:
                self._table.purge(key)
            self._table.unload(key)
            self._loaded.pop(key, None)
            self.unloads.count(key, reason)
        _LOG.info("%s: unloaded, %d bytes: %s", key.digest, freed, reason)
        return freed

    def _wait_drained(self, key: Key) -> None:
        cancelled = False
        while self._table.state(key) is ResidentState.DRAINING and not self._table.drained(key):
            deadline = self._table.deadline(key)
            left = None if deadline is None or cancelled else deadline - time.monotonic()
            if left is not None and left <= 0:
                _LOG.info("%s: %d requests cancelled", key.digest, self._engine.cancel(key))
                # One that was between its lease and the engine comes after: look again.
                self._changed.wait(0.05)
                continue
            self._changed.wait(left)

    def _wait_while_loading(self, key: Key) -> ResidentState | None:
        while self._table.state(key) is ResidentState.LOADING:
            self._changed.wait()
        return self._table.state(key)

    def room_make(self, key: Key, need: int, bounds: Bounds) -> None:
        """Unload what has to go before ``need`` bytes of a key fit."""
        for _ in range(_PLANS):
            try:
                plan = eviction.room_make(self._resident_sizes(), key.tenant_id, need, bounds)
            except NoRoomError as error:
                raise UnavailableError(f"no room: {error}") from error
            if all(self._evict(found.key, found.reason) for found in plan):
                return
        raise UnavailableError("no room: what could go came into use again", retry_after=1)

    def trim(self, key: Key) -> None:
        """Keep to the high-water mark after a key was loaded."""
        for found in eviction.trim(self._resident_sizes(), self._loading.bounds, key):
            self._evict(found.key, found.reason)

    def _resident_sizes(self) -> list[Held]:
        """Whatever has a place in the bank, also while it is loaded or let go of."""
        sizes = self._loading.memory.device.by_owner()
        with self._changed:
            return [
                Held(item.key, sizes[item.key][Category.ADAPTER], self._is_idle(item), item.used)
                for item in self._table.residents()
                if Category.ADAPTER in sizes.get(item.key, {})
            ]

    def _is_idle(self, item: Resident) -> bool:
        return item.state is ResidentState.SERVING and item.references == 0

    def _evict(self, key: Key, reason: Reason) -> bool:
        """Unload an idle key now; False when it came into use, or its weights stay."""
        with self._changed:
            held = next((item for item in self._table.residents() if item.key == key), None)
            if held is None or not self._is_idle(held) or key in self._draining:
                return False
            self._table.retire(key)
            self._draining.add(key)
        return self._retire(key, reason)

    def _retire(self, key: Key, reason: Reason) -> bool:
        """Unload a retired key once nobody uses it. Its files and slots stay: it may come back."""
        gone = False
        try:
            with self._changed:
                self._wait_drained(key)
            self._unload(key, reason)
            gone = True
        except Exception:  # noqa: BLE001 - it serves on; whoever wants it gone asks again
            _LOG.exception("%s: unloading failed", key.digest)
        with self._changed:
            self._draining.discard(key)
            revoked = self._table.is_revoked(key)
            if not gone and not revoked:
                self._table.resume(key)
            self._changed.notify_all()
        if revoked:
            # It was revoked meanwhile: what is left of it goes too, and is acknowledged.
            self.revoke(key, None)
        return gone
