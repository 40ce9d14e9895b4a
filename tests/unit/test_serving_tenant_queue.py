"""Turns between tenants, however much one of them waits for."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.serving.tenant_queue import TenantQueue

ONE, TWO, THREE = (UUID(int=number) for number in (1, 2, 3))


def filled(*items: tuple[UUID, int]) -> TenantQueue[int]:
    queue = TenantQueue[int]()
    for tenant, item in items:
        queue.put(tenant, item)
    return queue


def drained(queue: TenantQueue[int]) -> list[int]:
    return [queue.take() for _ in range(len(queue))]


def test_tenants_take_turns_and_each_ones_come_in_their_order() -> None:
    queue = filled((ONE, 1), (ONE, 2), (ONE, 3), (TWO, 11), (TWO, 12), (THREE, 21))
    assert queue.peek() == 1
    assert drained(queue) == [1, 11, 21, 2, 12, 3]


def test_who_had_the_last_turn_comes_behind_all_that_wait_by_then() -> None:
    queue = filled((ONE, 1))
    assert queue.take() == 1
    for tenant, item in ((ONE, 2), (TWO, 11), (THREE, 21)):
        queue.put(tenant, item)
    assert queue.peek() == 11
    assert drained(queue) == [11, 21, 2]


def test_what_leaves_takes_no_place_and_costs_no_turn() -> None:
    queue = filled((ONE, 1), (ONE, 2), (TWO, 11))
    assert queue.remove(ONE, lambda item: item == 1) == [1]
    assert queue.remove(THREE, lambda _: True) == []
    assert (len(queue), queue.of_tenant(ONE), sorted(queue)) == (2, 1, [2, 11])
    assert drained(queue) == [2, 11]
    queue = filled((ONE, 1))
    assert queue.remove(ONE, lambda _: True) == [1]
    assert not queue
    queue.put(ONE, 2)
    queue.clear()
    assert queue.of_tenant(ONE) == 0


@given(st.lists(st.integers(1, 4) | st.none(), max_size=60))
def test_nobody_waits_for_more_than_one_of_each_other_tenant(steps: list[int | None]) -> None:
    """Numbers put one of that tenant, None takes one."""
    queue, passed = TenantQueue[UUID](), dict[UUID, list[UUID]]()
    for number in (*steps, *[None] * len(steps)):
        if number is not None:
            tenant = UUID(int=number)
            queue.put(tenant, tenant)
            passed.setdefault(tenant, [])
        elif queue:
            taken = queue.take()
            del passed[taken]
            for others in passed.values():
                others.append(taken)
                assert len(set(others)) == len(others)
            if queue.of_tenant(taken):
                passed[taken] = []
    assert not queue
