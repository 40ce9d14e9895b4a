"""The residents of a node: who may use them, one load for each, and letting go of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Protocol
from uuid import UUID

from gpu_worker.serving.admission import AdapterHost, Admitted, Clock, RevokedBytesError
from gpu_worker.serving.disk import Disk, Slots
from gpu_worker.serving.emptying import Acknowledge, Emptying, Holders, Purges, Shelf
from gpu_worker.serving.eviction import Reason
from gpu_worker.serving.held_list import HeldList
from gpu_worker.serving.loader import Load, LoadQueue, Ticket
from gpu_worker.serving.loading import Loaded, Loading
from gpu_worker.serving.residency import Key, ResidencyError, Resident, ResidentState
from gpu_worker.serving.store import NodeStore
from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import (
    NotFoundError,
    RefusedError,
    RegistryError,
    TooManyRequestsError,
    UnavailableError,
)

_LOG = logging.getLogger(__name__)


class Watch(Protocol):
    """Hears of loads and uses."""

    def hit(self, key: Key) -> None:
        """A request found it resident."""
        ...

    def loaded(self, key: Key, seconds: float) -> None:
        """It was loaded."""
        ...

    def load_failed(self, key: Key) -> None:
        """A load failed."""
        ...


class Lease:
    """One request's hold on a resident, for all its sequences; giving it back twice does nothing.

    ``chat_template`` is the adapter's own; None where it has its base's.
    """

    def __init__(
        self, residents: Residents, key: Key, sequences: int, chat_template: str | None
    ) -> None:
        self.chat_template = chat_template
        self._residents = residents
        self._key: Key | None = key
        self._sequences = sequences
        self._lock = threading.Lock()

    def release(self) -> None:
        """Give the references back."""
        with self._lock:
            key, self._key = self._key, None
        if key is not None:
            self._residents.released(key, self._sequences)


class Residents:
    """Thread-safe: requests acquire, the feed and the heartbeat revoke."""

    def __init__(
        self,
        loading: Loading,
        engine: AdapterHost,
        store: NodeStore,
        held: HeldList,
        *,
        now: Clock,
        acknowledge: Acknowledge,
        purges: Sequence[Purges] = (),
        slots: Sequence[Slots] = (),
    ) -> None:
        """``purges`` and ``slots`` are whatever may hold something of an adapter when it goes."""
        self._loading = loading
        self._store = store
        self._now = now
        self._watches: list[Watch] = []
        shelf = Shelf()
        self._changed, self._table = shelf.changed, shelf.table
        self._loaded, self._draining = shelf.loaded, shelf.draining
        self._disk = Disk(store, slots, lambda: {item.key for item in self.residents()})
        holders = Holders(acknowledge, self._disk, purges)
        self._emptying = Emptying(shelf, loading, engine, held, holders, now=now)
        self._queue = LoadQueue(self._load, loading.limits.queue, elapsed=time.monotonic)

    def watch(self, watch: Watch) -> None:
        """Tell of loads and uses from now on."""
        self._watches.append(watch)

    def start(self) -> None:
        """Take loads from now on."""
        self._queue.start()

    def stop(self) -> None:
        """Take no more loads, and refuse whoever waits for one."""
        with self._changed:
            self._queue.stop()

    def acquire(
        self,
        *,
        tenant_id: UUID,
        tenant: str,
        adapter: str,
        digest: Digest,
        template: Digest,
        sequences: int = 1,
    ) -> Lease:
        """A hold for a request of so many sequences, after loading when it has to be.

        Raises:
            RegistryError: not admitted, revoked, not loadable: refused. UnavailableError: later.
        """
        key = Key(tenant_id, digest)
        with self._changed:
            if self._table.state(key) is ResidentState.SERVING:
                self._use_check(self._loaded[key].admitted, tenant, adapter, template)
                # Told first: with the references nothing comes between them and who returns them.
                for watch in self._watches:
                    watch.hit(key)
                return self._lease(key, sequences)
            ticket = self._ticket(Load(key, tenant, adapter), sequences)
        lease = self._wait(ticket, sequences, self._loading.limits.queue.wait_seconds)
        try:
            with self._changed:
                self._use_check(self._loaded[key].admitted, tenant, adapter, template)
        except BaseException:
            # Nobody else would give these references back.
            lease.release()
            raise
        return lease

    def preload(self, tenant: str, adapter: str, digest: Digest) -> Key:
        """Load before listening.

        Raises:
            RegistryError: it is not valid here, or cannot be fetched.
        """
        claims = self._loading.verdict(tenant, adapter, digest, None)
        key = Key(claims.tenant_id, digest)
        with self._changed:
            if self._table.state(key) is ResidentState.SERVING:
                return key
            ticket = self._ticket(Load(key, tenant, adapter), 1, paced=False)
        self._wait(ticket, 1, None).release()
        return key

    def serving(self, key: Key) -> bool:
        """True when requests for this key are accepted."""
        with self._changed:
            return self._table.state(key) is ResidentState.SERVING

    def released(self, key: Key, sequences: int) -> None:
        """A lease ended."""
        with self._changed:
            self._table.release(key, sequences)
            self._changed.notify_all()

    def residents(self) -> tuple[Resident, ...]:
        """Every resident now."""
        with self._changed:
            return self._table.residents()

    def report(self) -> list[dict[str, Any]]:
        """What the heartbeat reports: residents, then files of others as STORED.

        No more than a heartbeat takes: one that is refused would end the node's lease.
        """
        resident = {item.key: str(item.state) for item in self.residents()}
        stored = dict.fromkeys(self._store.keys(), "STORED")
        # In the order of the first: those that are resident.
        found = islice({**resident, **stored, **resident}.items(), limits.HEARTBEAT_RESIDENTS)
        return [
            {"tenantId": str(key.tenant_id), "adapterDigest": key.digest, "state": state}
            for key, state in found
        ]

    def revoke(self, key: Key, deadline_seconds: float | None) -> None:
        """Refuse a key at once, then drain, purge, unload and acknowledge beside the caller."""
        self._emptying.revoke(key, deadline_seconds)

    def listed_revoke(self) -> None:
        """Let go of whatever the revocation list names, by any of its digests."""
        self._emptying.listed_revoke()

    def placement_lost(self, key: Key) -> None:
        """Other nodes hold this key now: unload it once nobody uses it, beside the caller."""
        self._emptying.placement_lost(key)

    def go_on(self) -> None:
        """Unload what should have gone and stayed because of a fault, beside the caller."""
        self._emptying.go_on()

    @property
    def most_sequences(self) -> int:
        """How many sequences may run on one adapter at once."""
        return self._loading.limits.sequences

    @property
    def letting_go(self) -> bool:
        """True while something revoked is on its way out."""
        with self._changed:
            return bool(self._draining)

    @property
    def loads_waiting(self) -> int:
        """How many loads wait for their turn."""
        return self._queue.queued

    def unloads(self) -> dict[Reason, int]:
        """How many adapters each reason unloaded since the start."""
        with self._changed:
            return dict(self._emptying.unloads.by_reason)

    def unloads_of(self, key: Key) -> dict[Reason, int]:
        """How often each reason unloaded this key."""
        with self._changed:
            return self._emptying.unloads.of(key)

    def _ticket(self, load: Load, sequences: int, *, paced: bool = True) -> Ticket:
        """A place among those who wait for a load."""
        state = self._table.state(load.key)
        if self._table.is_revoked(load.key):
            raise NotFoundError("not found")
        if state not in {None, ResidentState.LOADING}:
            raise UnavailableError("the adapter is being unloaded", retry_after=1)
        if state is not None:
            return self._queue.join(load, sequences, paced=paced)
        self._table.load_begin(load.key)
        try:
            return self._queue.join(load, sequences, paced=paced)
        except BaseException:
            # Whatever stopped it, nobody loads this key.
            self._table.load_failed(load.key)
            raise

    def _wait(self, ticket: Ticket, sequences: int, seconds: float | None) -> Lease:
        """The hold that comes with the end of a load."""
        if not ticket.done.wait(seconds):
            with self._changed:
                if not ticket.done.is_set():
                    self._queue.leave(ticket, sequences)
                    raise UnavailableError("the adapter is still being loaded")
        if ticket.error is not None:
            raise ticket.error
        return self._held_lease(ticket.load.key, sequences)

    def _load(self, ticket: Ticket) -> None:
        """Load what a ticket names; on any failure its entry is gone, and nothing is left."""
        key, started = ticket.load.key, time.monotonic()
        loaded: Loaded | None = None
        try:
            loaded = self._loading.load(ticket.load, self._emptying.room_make, self._disk)
            self._serve(ticket, loaded)
        except BaseException as error:
            with self._changed:
                loading = self._table.state(key) is ResidentState.LOADING
            if not loading:
                # It serves, or drains, and that was told: what came after it undoes nothing.
                raise
            self._load_failed(ticket, loaded, error)
            return
        seconds = time.monotonic() - started
        _LOG.info("%s: loaded in %.2f s", key.digest, seconds)
        for watch in self._watches:
            watch.loaded(key, seconds)
        self._emptying.trim(key)

    def _serve(self, ticket: Ticket, loaded: Loaded) -> None:
        key = ticket.load.key
        with self._changed:
            self._loaded[key] = loaded
            entry = self._emptying.listed(key)
            if entry is not None:
                # A newer list came while this was loading: it goes from LOADING to DRAINING.
                self.revoke(key, self._emptying.seconds_left(entry))
            state = self._table.load_end(key, loaded.admitted.size, ticket.waiting)
            serving = state is ResidentState.SERVING
            self._queue.settle(ticket, None if serving else NotFoundError("not found"))
            self._changed.notify_all()

    def _load_failed(self, ticket: Ticket, loaded: Loaded | None, error: BaseException) -> None:
        key = ticket.load.key
        if not isinstance(error, RegistryError):
            _LOG.error("%s: the load failed", key.digest, exc_info=error)
        else:
            _LOG.warning("%s: not loaded: %s", key.digest, error.message)
        if loaded is not None:
            try:
                loaded.undo.close()
            except Exception:  # noqa: BLE001 - whoever waits is told; its weights go the next time
                _LOG.exception("%s: the load is not undone", key.digest)
        with self._changed:
            if isinstance(error, RevokedBytesError):
                # What is here of it, its slots too, goes as if it had been resident.
                self.revoke(key, None)
            self._loaded.pop(key, None)
            self._table.load_failed(key)
            self._queue.settle(ticket, error)
            self._changed.notify_all()
        for watch in self._watches:
            watch.load_failed(key)

    def _lease(self, key: Key, sequences: int) -> Lease:
        most = self.most_sequences
        running = next(r.references for r in self._table.residents() if r.key == key)
        if running + sequences > most:
            raise TooManyRequestsError(
                f"expected at most {most} sequences at once on one adapter", retry_after=1
            )
        try:
            self._table.acquire(key, sequences)
        except ResidencyError as error:
            raise NotFoundError("not found") from error
        return self._held_lease(key, sequences)

    def _held_lease(self, key: Key, sequences: int) -> Lease:
        """The lease that goes with references that are taken."""
        try:
            return Lease(self, key, sequences, self._loaded[key].admitted.chat_template)
        except BaseException:
            # Without a lease nobody would give them back.
            self.released(key, sequences)
            raise

    def _use_check(self, admitted: Admitted, tenant: str, adapter: str, template: Digest) -> None:
        claims = admitted.claims
        if (claims.tenant, claims.adapter) != (tenant, adapter):
            raise RefusedError("a routing context that names another tenant or adapter")
        if admitted.chat_template_digest != template:
            raise RefusedError("a routing context of another chat template")
        if _over(claims.not_after, self._now()):
            raise RefusedError("the verdict expired")


def _over(end: datetime, now: datetime) -> bool:
    return now >= end
