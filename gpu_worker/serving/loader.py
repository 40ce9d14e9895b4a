"""The load queue: bounded, one load for each digest, fair between tenants, off the model's thread.

Whoever needs an adapter joins its ticket; the tickets of a tenant wait in their order, and the
tenants take turns. A ticket that nobody waits for any more is dropped, unless it runs. A digest
whose loads fail again and again is left alone for a growing while.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from gpu_worker.serving.pacing import Backoff, TokenBucket
from gpu_worker.serving.residency import Key
from gpu_worker.serving.tenant_queue import TenantQueue
from registry_service.domain import limits
from registry_service.domain.errors import (
    NotFoundError,
    RegistryError,
    TooManyRequestsError,
    UnavailableError,
)

_LOG = logging.getLogger(__name__)
_MINUTE: Final = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be loaded, for whom."""

    key: Key
    tenant: str
    adapter: str


@dataclass(eq=False, slots=True)
class Ticket:
    """One load, and how many sequences wait for it."""

    load: Load
    waiting: int = 0
    error: RegistryError | None = None
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How many tickets wait in all and of a tenant, how many sequences, how often a tenant loads.

    Each request that waits has a thread: in all it is far fewer than there are, so that whoever
    waits for no adapter finds one.
    """

    tickets: int = limits.LOAD_QUEUE
    tickets_tenant: int = limits.TENANT_LOAD_QUEUE
    waiting: int = limits.LOAD_WAITS
    waiting_tenant: int = limits.TENANT_LOAD_WAITS
    waiting_each: int = limits.ADAPTER_SEQUENCES
    per_minute: int = limits.TENANT_LOADS_PER_MINUTE
    wait_seconds: float = limits.LOAD_WAIT_SECONDS


class LoadQueue:
    """Runs loads on threads of its own. ``run`` does one, and settles its ticket on every way out.

    Joining, leaving and settling are the caller's to serialize (it does so with what it keeps of
    each digest); the queue's own lock guards what its threads share with that.
    """

    def __init__(
        self,
        run: Callable[[Ticket], None],
        bounds: QueueLimits,
        *,
        elapsed: Callable[[], float],
        threads: int = limits.LOAD_THREADS,
    ) -> None:
        self._run = run
        self._bounds = bounds
        self._elapsed = elapsed
        self._threads = threads
        self._changed = threading.Condition()
        self._open: dict[Key, Ticket] = {}
        self._queued = TenantQueue[Ticket]()
        self._bucket = TokenBucket(bounds.per_minute / _MINUTE, bounds.per_minute)
        self._backoff = Backoff(limits.LOAD_PAUSE_FIRST_SECONDS, limits.LOAD_FAILURES)
        self._stopping = False

    def start(self) -> None:
        """Start the threads."""
        for number in range(self._threads):
            name = f"load-{number}"
            threading.Thread(target=self._loop, name=name, daemon=True).start()

    def stop(self) -> None:
        """Take nothing more; who waits is refused, and what runs comes to its end for nobody."""
        with self._changed:
            self._stopping = True
            tickets = tuple(self._open.values())
            self._queued.clear()
            self._changed.notify_all()
        for ticket in tickets:
            ticket.waiting = 0
            self.settle(ticket, UnavailableError("the node is stopping"))

    @property
    def queued(self) -> int:
        """How many tickets wait for a thread."""
        with self._changed:
            return len(self._queued)

    def join(self, load: Load, sequences: int = 1, *, paced: bool = True) -> Ticket:
        """Wait for a load of this digest: the one that is under way, or a new one.

        ``sequences`` will run on it. ``paced`` False leaves out the tenant's rate: what the
        operator named is not the tenant's.

        Raises:
            UnavailableError: too many, too often, or too soon after failures; with when to retry.
        """
        with self._changed:
            if self._stopping:
                raise UnavailableError("the node is stopping")
            ticket = self._open.get(load.key)
            if ticket is None:
                self._new_check(load.key, sequences, paced=paced)
                ticket = self._open[load.key] = Ticket(load)
                self._queued.put(load.key.tenant_id, ticket)
                self._changed.notify()
            else:
                self._waiting_check(load.key, ticket.waiting, sequences)
            ticket.waiting += sequences
            return ticket

    def leave(self, ticket: Ticket, sequences: int = 1) -> bool:
        """Do not wait any longer; True when the ticket was dropped with that, and never runs.

        A load that runs goes on: what it has done so far is of use to the next.
        """
        with self._changed:
            ticket.waiting -= sequences
            if ticket.waiting:
                return False
            if not self._queued.remove(ticket.load.key.tenant_id, lambda one: one is ticket):
                return False
            del self._open[ticket.load.key]
            return True

    def settle(self, ticket: Ticket, error: BaseException | None = None) -> None:
        """A load came to its end: its ticket is closed, and whoever waits for it wakes.

        What passes by itself (no room, no place in the pool, no answer) pauses for seconds only.
        """
        key = ticket.load.key
        with self._changed:
            if self._open.get(key) is not ticket:
                return
            del self._open[key]
            ticket.error = None if error is None else outcome_of(error)
            try:
                self._count(key, error)
            finally:
                # What was decided stands, and is told, whatever happens to the count.
                ticket.done.set()

    def _count(self, key: Key, error: BaseException | None) -> None:
        if error is None:
            self._backoff.succeeded(key)
        elif not isinstance(error, NotFoundError):
            # What is not there costs one question, and is always answered in the same way.
            passing = isinstance(error, UnavailableError)
            most = limits.LOAD_PAUSE_PASSING_SECONDS if passing else limits.LOAD_PAUSE_MOST_SECONDS
            self._backoff.failed(key, self._elapsed(), most)

    def _new_check(self, key: Key, sequences: int, *, paced: bool) -> None:
        now = self._elapsed()
        if (pause := self._backoff.wait(key, now)) > 0:
            raise UnavailableError(
                "the adapter could not be loaded again and again; see the node's log",
                retry_after=math.ceil(pause),
            )
        if len(self._queued) >= self._bounds.tickets:
            raise UnavailableError("too many adapters wait to be loaded on this node")
        if self._queued.of_tenant(key.tenant_id) >= self._bounds.tickets_tenant:
            raise TooManyRequestsError(
                f"expected at most {self._bounds.tickets_tenant} adapters of this tenant that wait "
                "to be loaded",
                retry_after=1,
            )
        self._waiting_check(key, 0, sequences)
        if paced and (pause := self._bucket.take(key.tenant_id, now)) > 0:
            raise TooManyRequestsError(
                f"expected at most {self._bounds.per_minute} loads a minute for this tenant",
                retry_after=math.ceil(pause),
            )

    def _waiting_check(self, key: Key, waiting: int, sequences: int) -> None:
        """``waiting`` wait for this key's own ticket."""
        bounds, tickets = self._bounds, self._open.values()
        of_tenant = sum(t.waiting for t in tickets if t.load.key.tenant_id == key.tenant_id)
        if of_tenant + sequences > bounds.waiting_tenant:
            raise TooManyRequestsError(
                f"expected at most {bounds.waiting_tenant} sequences that wait for this tenant's "
                "adapters",
                retry_after=1,
            )
        if waiting + sequences > bounds.waiting_each:
            raise TooManyRequestsError(
                f"expected at most {bounds.waiting_each} sequences that wait for one adapter",
                retry_after=1,
            )
        if sum(t.waiting for t in tickets) + sequences > bounds.waiting:
            raise UnavailableError(
                f"expected at most {bounds.waiting} sequences that wait for adapters on this node",
                retry_after=1,
            )

    def _next(self) -> Ticket | None:
        """The next ticket of the tenant whose turn it is; None at the end."""
        with self._changed:
            while not self._queued and not self._stopping:
                self._changed.wait()
            return self._queued.take() if self._queued else None

    def _loop(self) -> None:
        while (ticket := self._next()) is not None:
            try:
                self._run(ticket)
            except Exception:  # noqa: BLE001 - the thread goes on with the next
                _LOG.exception("%s: the load ended with a fault", ticket.load.key.digest)
            finally:
                self.settle(ticket, RuntimeError("the load came to no end"))


@contextmanager
def plainly(key: Key) -> Iterator[None]:
    """What a part of the system says of itself, with addresses and paths, is for the log alone.

    Raises:
        UnavailableError: in words for whoever asked for this key.
    """
    try:
        yield
    except UnavailableError as error:
        _LOG.warning("%s: %s", key.digest, error.message)
        raise UnavailableError(
            "the adapter cannot be fetched now", retry_after=error.retry_after or 1
        ) from error


def outcome_of(error: BaseException) -> RegistryError:
    """What those who wait are told of a load's end."""
    if isinstance(error, RegistryError):
        return error
    if isinstance(error, MemoryError):
        return UnavailableError("the node has not enough memory for this adapter")
    return UnavailableError("the adapter could not be loaded; see the node's log")
