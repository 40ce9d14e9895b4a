"""Letting go of residents: revoked, evicted for another one, or no longer ours to hold.

A revoked one drains, is purged with its files, unloaded and acknowledged, and never comes back. A
retired one drains and is unloaded; its files and slots stay. What a fault stops half way goes on
from there: a revocation when heartbeat or list name it again, the other with the next heartbeat.
A revocation of what is not here takes nothing, and is acknowledged when the heartbeat's answer says
that the service waits for that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gpu_worker.serving import eviction
from gpu_worker.serving.admission import AdapterHost, Clock
from gpu_worker.serving.disk import Disk
from gpu_worker.serving.eviction import Bounds, Held, NoRoomError, Reason, Unloads
from gpu_worker.serving.held_list import HeldList
from gpu_worker.serving.keyed_executor import KeyedExecutor
from gpu_worker.serving.ledger import Category
from gpu_worker.serving.loading import Loading, Shelf
from gpu_worker.serving.residency import Key, Resident, ResidentState
from registry_service.domain.errors import UnavailableError
from registry_service.trust.revocation_list import Revoked

_LOG = logging.getLogger(__name__)
# An eviction that was planned may find its adapter in use again: then it is planned anew.
_PLANS: Final = 8
_REMEMBERED: Final = 4096
_THREADS: Final = 2
_LOOK_SECONDS: Final = 0.05

Acknowledge = Callable[[Key, int, int], None]
"""Tells the registry that a key is gone, the bytes that became free and the blocks purged.

It raises what kept the registry from hearing it.
"""


class Purges(Protocol):
    """Holds KV of adapters in memory: prefix blocks, or states that are to be saved."""

    def purge(self, key: Key) -> int:
        """Drop all that was computed with this adapter, and keep none of it; how many blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Holders:
    """Whatever may hold something of an adapter when it goes, and who is told that it went."""

    acknowledge: Acknowledge
    disk: Disk
    purges: Sequence[Purges] = ()


@dataclass(slots=True)
class _Gone:
    """What went of a revoked key so far: bytes of memory, and blocks; ``whole`` when all of it."""

    freed: int = 0
    purged: int = 0
    whole: bool = False


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
        # What waits for requests that run takes no thread, and what waits for an answer no other's.
        self._leaving = KeyedExecutor("drain", _THREADS, self._changed, self._pause)
        self._telling = KeyedExecutor("acknowledge", 1, self._changed)

    def revoke(self, key: Key, deadline_seconds: float | None, *, owed: bool = False) -> None:
        """Refuse a key at once, then drain, purge, unload and acknowledge beside the caller.

        Of what is not here nothing has to go: then it is acknowledged, if that is ``owed``.
        """
        deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
        with self._changed:
            self._table.revoke(key, deadline)
            self._changed.notify_all()
            known = self._table.state(key) is not None or key in self._loaded or key in self._gone
        # Not under the lock, which requests need. From here on nothing of it comes any more.
        here = known or self._disk.holds(key)
        with self._changed:
            if key in self._draining or not (here or owed):
                return
            gone = self._gone.setdefault(key, _Gone(whole=not here))
            if gone.whole:
                self._beside(self._telling, key, self._tell)
            else:
                self._beside(self._leaving, key, self._drain)

    def retire(self, key: Key, reason: Reason) -> None:
        """Unload a key once nobody uses it, beside the caller."""
        with self._changed:
            if self._retire_begin(key, reason):
                self._beside(self._leaving, key, self._retire)

    def go_on(self) -> None:
        """Unload what was retired and stayed because of a fault, beside the caller."""
        with self._changed:
            for key in tuple(self._retired):
                if key not in self._draining:
                    self._beside(self._leaving, key, self._retire)

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

    def _beside(self, executor: KeyedExecutor, key: Key, work: Callable[[Key], object]) -> None:
        """Have something done for a key on one of its threads, the only one that does."""
        self._draining.add(key)
        try:
            executor.submit(key, work)
        except Exception:  # noqa: BLE001 - it is refused from now on; the next call lets it go
            self._draining.discard(key)
            _LOG.exception("%s: letting go cannot begin", key.digest)

    def _drain(self, key: Key) -> None:
        """Let go of a revoked key that nobody uses any more, then say so."""
        try:
            with self._changed:
                gone = self._gone[key]
                loaded = self._loaded.get(key)
                if loaded is not None:
                    gone.freed = loaded.admitted.size
            self._purge(key, gone)
            if loaded is not None:
                self._unload(key, Reason.REVOKED)
            gone.whole = True
            _LOG.info("%s: gone, %d bytes and %d blocks", key.digest, gone.freed, gone.purged)
        except Exception:  # noqa: BLE001 - heartbeat and list name it again: it goes on
            _LOG.exception("%s: letting go failed", key.digest)
            with self._changed:
                self._draining.discard(key)
            return
        with self._changed:
            self._beside(self._telling, key, self._tell)

    def _tell(self, key: Key) -> None:
        """Acknowledge what went. Who does not hear it names the key again with a heartbeat."""
        try:
            gone = self._gone[key]
            self._acknowledge(key, gone.freed, gone.purged)
            del self._gone[key]
        except Exception:  # noqa: BLE001 - heartbeat and list name it again: it goes on
            _LOG.exception("%s: not acknowledged", key.digest)
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

    def _pause(self, key: Key) -> float | None:
        """How long a key waits still for its load to end, then for those who use it.

        From its deadline on they are cancelled.
        """
        state = self._table.state(key)
        if state is ResidentState.LOADING:
            return None
        if state is not ResidentState.DRAINING or self._table.drained(key):
            return 0.0
        deadline = self._table.deadline(key)
        left = None if deadline is None else deadline - time.monotonic()
        if left is None or left > 0:
            return left
        if cancelled := self._engine.cancel(key):
            _LOG.info("%s: %d requests cancelled", key.digest, cancelled)
        # One that was between its lease and the engine comes after: look again.
        return _LOOK_SECONDS

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

    def place_make(self, key: Key, *, own: bool) -> bool:
        """Unload an idle adapter, whose place in the pool is given back; False when none may go."""
        for _ in range(_PLANS):
            try:
                found = eviction.place_make(self._resident_sizes(), key.tenant_id, own=own)
            except NoRoomError:
                return False
            if self._evict(found.key, found.reason):
                return True
        return False

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
        """Unload a retired key that nobody uses. Its files and slots stay: it may come back."""
        try:
            with self._changed:
                reason = self._retired[key]
            # First: once it went it may come back at any time, and go again.
            self._disk.used(key)
            self._unload(key, reason)
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
