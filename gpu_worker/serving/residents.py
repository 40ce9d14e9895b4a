"""The residents of a node: who may use them, one load for each, and letting go of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from typing import Any
from uuid import UUID

from gpu_worker.serving.admission import AdapterHost, Clock
from gpu_worker.serving.disk import Disk, Slots
from gpu_worker.serving.emptying import Acknowledge, Emptying, Holders, Purges
from gpu_worker.serving.eviction import Reason
from gpu_worker.serving.filling import Filling, Watch
from gpu_worker.serving.held_list import HeldList
from gpu_worker.serving.loader import Load
from gpu_worker.serving.loading import Loading, Shelf
from gpu_worker.serving.residency import Key, ResidencyError, Resident, ResidentState
from gpu_worker.serving.store import NodeStore
from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import (
    NotFoundError,
    RefusedError,
    TooManyRequestsError,
    UnavailableError,
)

_LOG = logging.getLogger(__name__)


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
        shelf = Shelf()
        self._changed, self._table = shelf.changed, shelf.table
        self._loaded, self._draining = shelf.loaded, shelf.draining
        self._disk = Disk(store, slots, lambda: {item.key for item in self.residents()})
        holders = Holders(acknowledge, self._disk, purges)
        self._emptying = Emptying(shelf, loading, engine, held, holders, now=now)
        self._filling = Filling(shelf, loading, self._disk, self._emptying)
        self._queue, self._watches = self._filling.queue, self._filling.watches

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
                self._use_check(key, tenant, adapter, template)
                # Told first: with the references nothing comes between them and who returns them.
                for watch in self._watches:
                    watch.hit(key)
                return self._lease(key, sequences)
            ticket = self._filling.ticket(Load(key, tenant, adapter), sequences)
        self._filling.wait(ticket, sequences, self._loading.limits.queue.wait_seconds)
        lease = self._held_lease(key, sequences)
        try:
            with self._changed:
                self._use_check(key, tenant, adapter, template)
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
            ticket = self._filling.ticket(Load(key, tenant, adapter), 1, paced=False)
        self._filling.wait(ticket, 1, None)
        self.released(key, 1)
        return key

    def serving(self, key: Key) -> bool:
        """True when requests for this key are accepted."""
        with self._changed:
            return self._table.state(key) is ResidentState.SERVING

    def usable(self, key: Key) -> bool:
        """True when a sequence that a lease was given for may begin.

        False from the moment that a revocation is heard of or the held list names it. What is only
        retired waits for its leases, so that they go on.
        """
        with self._changed:
            return self._table.usable(key) and self._emptying.listed(key) is None

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

    def revoke(self, key: Key, deadline_seconds: float | None, *, owed: bool = False) -> None:
        """Refuse a key at once, then drain, purge, unload and acknowledge beside the caller.

        ``owed``: the registry waits for the acknowledgement, also when nothing of it is here.
        """
        self._emptying.revoke(key, deadline_seconds, owed=owed)

    def listed_revoke(self) -> None:
        """Let go of whatever the revocation list names, by any of its digests."""
        self._emptying.listed_revoke()

    def placement_lost(self, key: Key) -> None:
        """Other nodes hold this key now: unload it once nobody uses it, beside the caller."""
        self._emptying.retire(key, Reason.PLACEMENT_LOST)

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

    def _use_check(self, key: Key, tenant: str, adapter: str, template: Digest) -> None:
        """What is asked of a resident before a request has it."""
        if self._table.is_revoked(key) or self._emptying.listed(key) is not None:
            # Also by a list that came just now, and has not been gone through yet.
            raise NotFoundError("not found")
        admitted = self._loaded[key].admitted
        claims = admitted.claims
        if (claims.tenant, claims.adapter) != (tenant, adapter):
            raise RefusedError("a routing context that names another tenant or adapter")
        if admitted.chat_template_digest != template:
            raise RefusedError("a routing context of another chat template")
        if _over(claims.not_after, self._now()):
            # There may be a newer one: whoever comes next loads it under that, or not at all.
            self._emptying.retire(key, Reason.VERDICT_EXPIRED)
            raise UnavailableError("the adapter's verdict expired; ask again", retry_after=1)


def _over(end: datetime, now: datetime) -> bool:
    return now >= end
