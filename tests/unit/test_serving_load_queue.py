"""The load queue: one load for each digest, turns between tenants, bounds, pauses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import pytest

from gpu_worker.serving.loader import Load, LoadQueue, QueueLimits, Ticket, outcome_of, plainly
from gpu_worker.serving.residency import Key
from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import (
    NotFoundError,
    RefusedError,
    TooManyRequestsError,
    UnavailableError,
)
from tests.waiting import until


def load(tenant: int, number: int) -> Load:
    key = Key(UUID(int=tenant), Digest(f"sha256:{tenant * 1000 + number:064x}"))
    return Load(key, f"t-{tenant}", "a")


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Stand:
    """A queue whose loads wait for the test, and the order in which they ran."""

    def __init__(self, *, threads: int = 1, **bounds: float) -> None:
        self.clock = Clock()
        self.ran: list[Key] = []
        self.ended: list[Key] = []
        self.gate = threading.Semaphore(0)
        self.error: Exception | None = None
        self.queue = LoadQueue(
            self.run,
            QueueLimits(**bounds),  # type: ignore[arg-type]  # counts and seconds by name
            elapsed=self.clock,
            threads=threads,
        )

    def run(self, ticket: Ticket) -> None:
        self.ran.append(ticket.load.key)
        assert self.gate.acquire(timeout=10)
        self.queue.settle(ticket, self.error)
        self.ended.append(ticket.load.key)

    def let(self, count: int = 1) -> None:
        self.gate.release(count)

    def fail(self, what: Load, error: Exception) -> None:
        """One load that fails from its beginning to its end."""
        self.error = error
        ticket = self.queue.join(what)
        self.let()
        assert ticket.done.wait(10)
        self.error = None


@contextmanager
def stand(*, threads: int = 1, **bounds: float) -> Iterator[Stand]:
    made = Stand(threads=threads, **bounds)
    made.queue.start()
    try:
        yield made
    finally:
        made.queue.stop()
        made.let(1000)


def test_a_hundred_requests_for_one_digest_are_one_load() -> None:
    with stand(threads=4, waiting_tenant=100, waiting_each=100) as made:
        tickets: list[Ticket] = []
        lock = threading.Lock()

        def ask() -> None:
            with lock:
                tickets.append(made.queue.join(load(1, 1)))
            assert tickets[0].done.wait(10)

        threads = [threading.Thread(target=ask) for _ in range(100)]
        for thread in threads:
            thread.start()
        until(lambda: len(tickets) == 100)
        assert len({id(ticket) for ticket in tickets}) == 1
        assert tickets[0].waiting == 100
        made.let()
        for thread in threads:
            thread.join()
        assert made.ran == [load(1, 1).key]


def test_tenants_take_turns_however_many_loads_one_asks_for() -> None:
    with stand() as made:
        first = made.queue.join(load(1, 0))
        until(lambda: len(made.ran) == 1)
        for number in range(1, 5):
            made.queue.join(load(1, number))
        last = [made.queue.join(load(tenant, 1)) for tenant in (2, 3)]
        made.let(7)
        assert all(ticket.done.wait(10) for ticket in (first, *last))
        until(lambda: len(made.ran) == 7)
        assert [key.tenant_id.int for key in made.ran] == [1, 2, 3, 1, 1, 1, 1]


def test_the_queue_is_bounded_in_all_and_for_each_tenant() -> None:
    with stand(tickets=3, waiting_tenant=2, waiting_each=2) as made:
        made.queue.join(load(1, 0))
        until(lambda: len(made.ran) == 1)
        made.queue.join(load(1, 1))
        for number in (0, 1, 2):
            with pytest.raises(UnavailableError, match="2 sequences that wait for this tenant"):
                made.queue.join(load(1, number))
        for tenant in (2, 3):
            made.queue.join(load(tenant, 1))
        assert made.queue.queued == 3
        with pytest.raises(UnavailableError, match="too many adapters wait"):
            made.queue.join(load(4, 1))
        ticket = made.queue.join(load(2, 1))
        made.queue.leave(ticket)
        assert made.queue.join(load(2, 1)) is ticket


def test_a_node_with_as_many_as_may_wait_says_so_to_every_tenant() -> None:
    with stand(waiting=3) as made:
        made.queue.join(load(1, 0), 2)
        ticket = made.queue.join(load(2, 0))
        for tenant in (1, 2, 3):
            with pytest.raises(
                UnavailableError, match="3 sequences that wait for adapters"
            ) as told:
                made.queue.join(load(tenant, 0))
            assert not isinstance(told.value, TooManyRequestsError)
            assert told.value.retry_after == 1
        made.queue.leave(ticket)
        made.queue.join(load(3, 0))


def test_what_waits_is_counted_in_sequences() -> None:
    with stand(waiting_tenant=10, waiting_each=9) as made:
        with pytest.raises(TooManyRequestsError):
            made.queue.join(load(1, 0), 10)
        ticket = made.queue.join(load(1, 0), 8)
        with pytest.raises(TooManyRequestsError):
            made.queue.join(load(1, 0), 2)
        with pytest.raises(TooManyRequestsError):
            made.queue.join(load(1, 1), 3)
        made.queue.join(load(1, 0))
        made.queue.leave(ticket, 8)
        assert ticket.waiting == 1
        assert made.queue.join(load(1, 0), 8) is ticket


def test_a_ticket_that_nobody_waits_for_any_more_is_dropped_unless_it_runs() -> None:
    with stand(tickets=3, tickets_tenant=3) as made:
        running = made.queue.join(load(1, 0))
        until(lambda: len(made.ran) == 1)
        # A tenant that asks and goes, again and again, fills nothing.
        for number in range(1, 10):
            ticket = made.queue.join(load(1, number), 2)
            assert not made.queue.leave(ticket)
            assert made.queue.leave(ticket)
            assert made.queue.queued == 0
        assert not made.queue.leave(running)
        kept = [made.queue.join(load(1, number)) for number in (1, 2)]
        gone = made.queue.join(load(1, 3))
        assert made.queue.leave(gone)
        again = made.queue.join(load(1, 3))
        assert again is not gone
        made.let(4)
        assert all(ticket.done.wait(10) for ticket in (running, *kept, again))
        assert [key.digest for key in made.ran] == [load(1, n).key.digest for n in range(4)]
        assert not gone.done.is_set()
        assert not made.queue.leave(gone)


def test_a_tenant_has_a_share_of_the_queue() -> None:
    with stand(tickets=4, tickets_tenant=2) as made:
        made.queue.join(load(1, 0))
        until(lambda: len(made.ran) == 1)
        first, _ = (made.queue.join(load(1, number)) for number in (1, 2))
        with pytest.raises(TooManyRequestsError, match="at most 2 adapters of this tenant") as told:
            made.queue.join(load(1, 3))
        assert told.value.retry_after == 1
        # Whoever needs one that waits already takes no place.
        assert made.queue.join(load(1, 1)) is first
        made.queue.join(load(2, 1))


def test_by_default_one_tenant_leaves_the_others_their_places() -> None:
    assert limits.TENANT_LOAD_QUEUE <= limits.LOAD_QUEUE // 2
    assert limits.TENANT_LOAD_WAITS <= limits.LOAD_WAITS // 2
    assert limits.TENANT_ADAPTERS <= limits.NODE_ADAPTERS // 2


def test_who_waits_in_vain_hears_so_while_the_routing_context_holds() -> None:
    assert QueueLimits().wait_seconds <= limits.ROUTING_CONTEXT_SECONDS - 10


def test_what_a_part_says_of_itself_is_logged_and_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = load(1, 1).key
    with pytest.raises(UnavailableError, match="cannot be fetched now") as told, plainly(key):
        raise UnavailableError("no answer from http://registry.internal", retry_after=7)
    assert "internal" not in told.value.message
    assert told.value.retry_after == 7
    assert "http://registry.internal" in caplog.text


def test_a_load_that_ended_is_told_though_it_cannot_be_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: object) -> None:
        raise MemoryError

    with stand() as made:
        ticket = made.queue.join(load(1, 1))
        monkeypatch.setattr(made.queue._backoff, "succeeded", failing)
        made.let()
        assert ticket.done.wait(10)
        assert ticket.error is None


def test_a_tenant_loads_no_more_often_than_its_rate() -> None:
    with stand(per_minute=2) as made:
        made.let(10)
        for number in range(2):
            assert made.queue.join(load(1, number)).done.wait(10)
        with pytest.raises(UnavailableError, match="at most 2 loads a minute") as caught:
            made.queue.join(load(1, 2))
        assert caught.value.retry_after == 30
        assert made.queue.join(load(2, 0)).done.wait(10)
        assert made.queue.join(load(1, 3), paced=False).done.wait(10)
        made.clock.now = 30.0
        assert made.queue.join(load(1, 2)).done.wait(10)


def test_repeated_failures_are_answered_with_when_to_come_back() -> None:
    with stand() as made:
        what = load(1, 1)
        made.fail(what, RefusedError("no"))
        pauses = []
        for _ in range(11):
            made.fail(what, RefusedError("no"))
            with pytest.raises(UnavailableError, match="again and again") as caught:
                made.queue.join(what)
            pauses.append(caught.value.retry_after)
            made.clock.now += caught.value.retry_after or 0
        assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
        made.let()
        assert made.queue.join(what).done.wait(10)
        made.fail(what, RefusedError("no"))
        made.let()
        assert made.queue.join(what).done.wait(10)


def test_what_passes_by_itself_is_tried_again_within_seconds() -> None:
    with stand() as made:
        what = load(1, 1)
        for _ in range(8):
            made.fail(what, UnavailableError("no room"))
            made.clock.now += 10
        made.fail(what, UnavailableError("no room"))
        with pytest.raises(UnavailableError) as caught:
            made.queue.join(what)
        assert caught.value.retry_after == 10


def test_what_is_not_there_is_always_answered_in_the_same_way() -> None:
    with stand() as made:
        for _ in range(5):
            made.fail(load(1, 1), NotFoundError("not found"))
        made.let()
        ticket = made.queue.join(load(1, 1))
        assert ticket.done.wait(10)
        assert ticket.error is None


def test_a_fault_in_a_load_wakes_who_waits_and_the_thread_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = [RuntimeError("bug")]

    def run(ticket: Ticket) -> None:
        if faults:
            raise faults.pop()
        queue.settle(ticket)

    queue = LoadQueue(run, QueueLimits(), elapsed=Clock(), threads=1)
    queue.start()
    first = queue.join(load(1, 1))
    assert first.done.wait(10)
    assert isinstance(first.error, UnavailableError)
    second = queue.join(load(1, 2))
    assert second.done.wait(10)
    assert second.error is None
    assert "the load ended with a fault" in caplog.text
    queue.stop()


def test_a_queue_that_stops_refuses_what_waits_and_what_comes() -> None:
    with stand() as made:
        running = made.queue.join(load(1, 0))
        until(lambda: len(made.ran) == 1)
        waiting = made.queue.join(load(1, 1))
        made.queue.stop()
        # Also whoever waits for one that runs, and may never end.
        for ticket in (waiting, running):
            assert ticket.done.wait(10)
            assert "stopping" in str(ticket.error)
            assert ticket.waiting == 0
        with pytest.raises(UnavailableError, match="stopping"):
            made.queue.join(load(1, 2))
        made.let()
        until(lambda: len(made.ended) == 1)
        assert "stopping" in str(running.error)


def test_faults_are_told_in_words_of_the_service() -> None:
    assert "memory" in outcome_of(MemoryError()).message
    assert outcome_of(RuntimeError("secret path")).message.endswith("see the node's log")
    refused = RefusedError("no")
    assert outcome_of(refused) is refused
