"""Places are bounded for each tenant and in all; tenants take turns at what one holds at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from uuid import UUID

import pytest

from gpu_worker.serving.places import Places, TurnLock
from registry_service.domain.errors import TooManyRequestsError, UnavailableError
from tests.waiting import until

ONE, TWO, THREE = (UUID(int=number) for number in (1, 2, 3))


def test_a_tenants_places_are_its_own_and_are_given_back() -> None:
    places = Places("chats", tenant_most=3, most=100)
    with places.held(ONE, 2), places.held(ONE):
        with pytest.raises(TooManyRequestsError, match="at most 3 chats at once for this tenant"):
            places.held(ONE).__enter__()
        with places.held(TWO, 3):
            pass
    with places.held(ONE, 3):
        pass


def test_all_tenants_together_are_bounded_too() -> None:
    places = Places("chats", tenant_most=2, most=6)
    with ExitStack() as held:
        held.enter_context(places.held(ONE, 2))
        held.enter_context(places.held(TWO))
        with pytest.raises(
            UnavailableError, match="at most 3 chats at once on this node"
        ) as caught:
            places.held(THREE).__enter__()
    assert not isinstance(caught.value, TooManyRequestsError)
    assert caught.value.retry_after
    with places.held(THREE):
        pass


def test_no_number_of_tenants_with_many_keeps_out_those_with_few() -> None:
    places = Places("chats", tenant_most=16, most=40)

    def fill(held: ExitStack, tenant: int) -> int:
        for count in range(100):
            try:
                held.enter_context(places.held(UUID(int=tenant)))
            except UnavailableError:
                return count
        raise AssertionError("no bound")

    with ExitStack() as held:
        # Each has what it may, then half is taken, then each comes by a few.
        crowd = [fill(held, tenant) for tenant in range(1, 14)]
        assert crowd == [16, 4, *[2] * 10, 0]
        with pytest.raises(UnavailableError, match="at most 20 chats at once on this node"):
            places.held(UUID(int=14), 3).__enter__()
    with places.held(ONE, 16):
        pass


def test_a_place_is_given_back_whatever_happens() -> None:
    places = Places("chats", tenant_most=1, most=2)
    with pytest.raises(KeyError), places.held(ONE):
        raise KeyError
    with places.held(ONE):
        pass


@contextmanager
def waiting(lock: TurnLock, *tenants: UUID) -> Iterator[list[UUID]]:
    """Let these wait, in this order; at the end, who held the lock."""
    ran: list[UUID] = []

    def wait(tenant: UUID) -> None:
        with lock.held(tenant):
            ran.append(tenant)

    def queued() -> int:
        return len(lock._waiting)

    before = queued()
    threads = [threading.Thread(target=wait, args=(tenant,)) for tenant in tenants]
    for count, thread in enumerate(threads, start=before + 1):
        thread.start()
        until(lambda count=count: queued() == count)
    yield ran
    for thread in threads:
        thread.join(10)


def test_tenants_take_turns_however_many_wait_for_one() -> None:
    lock, held = TurnLock(), ExitStack()
    held.enter_context(lock.held(THREE))
    with waiting(lock, ONE, ONE, ONE, TWO, TWO) as ran:
        held.close()
    assert ran == [ONE, TWO, ONE, TWO, ONE]


@pytest.mark.parametrize("others", [(), (THREE,)])
def test_who_comes_during_anothers_turn_waits_for_that_tenants_turn_alone(
    others: tuple[UUID, ...],
) -> None:
    lock, held = TurnLock(), ExitStack()
    held.enter_context(lock.held(ONE))
    with waiting(lock, ONE, ONE, *others, TWO) as ran:
        held.close()
    assert ran == [*others, TWO, ONE, ONE]


def test_a_turn_that_fails_is_the_next_ones() -> None:
    lock = TurnLock()
    with pytest.raises(KeyError), lock.held(ONE):
        raise KeyError
    with lock.held(TWO):
        pass
