"""Letting go of residents: revoked, evicted to make room, or no longer ours to hold.

A revoked one drains, is purged with its files, unloaded and acknowledged, and never comes back. A
retired one drains and is unloaded; its files and slots stay. What a fault stops half way goes on
from there: a revocation when heartbeat or list name it again, the other with the next heartbeat.
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
from gpu_worker.serving.disk import Disk
from gpu_worker.serving.eviction import Bounds, Held, NoRoomError, Reason, Unloads
from gpu_worker.serving.held_list import HeldList
from gpu_worker.serving.ledger import Category
from gpu_worker.serving.loading import Loaded, Loading
from gpu_worker.serving.residency import Key, Residency, Resident, ResidentState
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


@dataclass(frozen=True, slots=True)
class Holders:
    """Whatever may hold something of an adapter when it goes, and who is told that it went."""

    acknowledge: Acknowledge
    disk: Disk
    purges: Sequence[Purges] = ()


@dataclass(slots=True)
class _Gone:
    """What went of a revoked key so far: bytes of memory, and blocks."""

    freed: int = 0
    purged: int = 0


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
        held: HeldList,
        holders: Holders,
        *,
        now: Clock,
    ) -> None:
        self._changed, self._table = shelf.changed, shelf.table
        self._loaded, self._draining = shelf.loaded, shelf.draining
        self._loading = loading
        self._engine = engine
        self._held = held
        self._acknowledge = holders.acknowledge
        self._disk = holders.disk
        self._purges = holders.purges
        self._now = now
        # Until they are acknowledged: a second try after a fault goes on with what went before it.
        self._gone: dict[Key, _Gone] = {}
        # Why each retired one goes, until it has gone.
        self._retired: dict[Key, Reason] = {}
        self.unloads = Unloads(_REMEMBERED)

    def revoke(self, key: Key, deadline_seconds: float | None) -> None:
        """Refuse a key at once, then drain, purge, unload and acknowledge beside the caller."""
        deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
        with self._changed:
            self._table.revoke(key, deadline)
            self._changed.notify_all()
            if key not in self._draining:
                self._beside(key, self._drain)

    def placement_lost(self, key: Key) -> None:
        """Other nodes hold this key now: unload it once nobody uses it, beside the caller."""
        with self._changed:
            if self._retire_begin(key, Reason.PLACEMENT_LOST):
                self._beside(key, self._retire)

    def go_on(self) -> None:
        """Unload what was retired and stayed because of a fault, beside the caller."""
        with self._changed:
            for key in tuple(self._retired):
                if key not in self._draining:
                    self._beside(key, self._retire)

    def listed_revoke(self) -> None:
        """Let go of whatever the revocation list names, by any of its digests."""
        kept = self._disk.keys()
        with self._changed:
            keys = {item.key for item in self._table.residents()} | kept
        for key in keys:
            entry = self.listed(key)
            if entry is not None:
                self.revoke(key, self.seconds_left(entry))

    def listed(self, key: Key) -> Revoked | None:
        """What the held list says of a key, by any of its digests."""
        return self._held.find(key.tenant_id, key.digest, *self._disk.revocable(key))

    def seconds_left(self, entry: Revoked) -> float | None:
        """Until the requests of a revoked key are cancelled; None when they never are."""
        if entry.cancel_at is None:
            return None
        return max(0.0, (entry.cancel_at - self._now()).total_seconds())

    def _beside(self, key: Key, let_go: Callable[[Key], object]) -> None:
        """Let go of a key on a thread of its own, the only one that does."""
        self._draining.add(key)
        try:
            threading.Thread(target=let_go, args=(key,), name="drain", daemon=True).start()
        except Exception:  # noqa: BLE001 - it is refused from now on; the next call lets it go
            self._draining.discard(key)
            _LOG.exception("%s: letting go cannot begin", key.digest)

    def _drain(self, key: Key) -> None:
        try:
            with self._changed:
                gone = self._gone.setdefault(key, _Gone())
                self._wait_while_loading(key)
                loaded = key in self._loaded
                if loaded:
                    self._wait_drained(key)
                    gone.freed = self._loaded[key].admitted.size
            self._purge(key, gone)
            if loaded:
                self._unload(key, Reason.REVOKED)
            _LOG.info("%s: gone, %d bytes and %d blocks", key.digest, gone.freed, gone.purged)
            self._acknowledge(key, gone.freed, gone.purged)
            self._gone.pop(key)
        except Exception:  # noqa: BLE001 - heartbeat and list name it again: it goes on
            _LOG.exception("%s: letting go failed", key.digest)
        finally:
            with self._changed:
                self._draining.discard(key)

    def _purge(self, key: Key, gone: _Gone) -> None:
        """Drop caches, slots and pulled files, loaded or not."""
        for cache in self._purges:
            gone.purged += cache.purge(key)
        files = self._disk.purge(key)
        _LOG.info("%s: %d blocks and %d slot files purged", key.digest, gone.purged, files)
        with self._changed:
            if self._table.state(key) is ResidentState.DRAINING:
                self._table.purge(key)

    def _unload(self, key: Key, reason: Reason) -> None:
        """Unload what nobody uses any more."""
        freed = self._loading.unload(key, self._loaded[key])
        with self._changed:
            if self._table.state(key) is ResidentState.DRAINING:
                self._table.purge(key)
            if self._table.state(key) is ResidentState.PURGED:
                self._table.unload(key)
            self._loaded.pop(key, None)
            self._retired.pop(key, None)
            self.unloads.count(key, reason)
        _LOG.info("%s: unloaded, %d bytes: %s", key.digest, freed, reason)

    def _wait_drained(self, key: Key) -> None:
        while self._table.state(key) is ResidentState.DRAINING and not self._table.drained(key):
            deadline = self._table.deadline(key)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                _LOG.info("%s: %d requests cancelled", key.digest, self._engine.cancel(key))
                # One that was between its lease and the engine comes after: look again.
                self._changed.wait(0.05)
                continue
            self._changed.wait(left)

    def _wait_while_loading(self, key: Key) -> None:
        while self._table.state(key) is ResidentState.LOADING:
            self._changed.wait()

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
            if held is None or not self._is_idle(held) or not self._retire_begin(key, reason):
                return False
            self._draining.add(key)
        return self._retire(key)

    def _retire_begin(self, key: Key, reason: Reason) -> bool:
        """Take no more requests for a serving key; True when it is to be unloaded."""
        if self._table.state(key) is not ResidentState.SERVING or key in self._draining:
            return False
        self._table.retire(key)
        self._retired[key] = reason
        self._changed.notify_all()
        return True

    def _retire(self, key: Key) -> bool:
        """Unload a retired key once nobody uses it. Its files and slots stay: it may come back."""
        try:
            with self._changed:
                reason = self._retired[key]
                self._wait_drained(key)
            self._unload(key, reason)
            self._disk.used(key)
        except Exception:  # noqa: BLE001 - it serves nobody; the next heartbeat goes on with it
            _LOG.exception("%s: unloading failed", key.digest)
        with self._changed:
            self._draining.discard(key)
            gone = key not in self._loaded
            revoked = self._table.is_revoked(key)
            self._changed.notify_all()
        if revoked:
            # It was revoked meanwhile: what is left of it goes too, and is acknowledged.
            self.revoke(key, None)
        return gone
