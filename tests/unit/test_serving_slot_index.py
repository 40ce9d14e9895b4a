"""The table of slots: one page each, least recently used first, and shares that hold."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_worker.serving.slot_index import Budget, Entry, SlotIndex
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import MalformedError
from registry_service.trust.routing_context import BASE_MARKER

A = digest_of(b"adapter a")
TENANTS = 4
"""As many as ever have pages at once."""


def entry(slot: str, page: int, size: int = 10, *, tenant: int = 1, adapter: Digest = A) -> Entry:
    return Entry(slot, UUID(int=tenant), adapter, page, size, digest_of(slot.encode()))


class Held(NamedTuple):
    """What a tenant has."""

    slots: int
    size: int


def held(entries: tuple[Entry, ...], tenant_id: UUID) -> Held:
    sizes = [e.size for e in entries if e.tenant_id == tenant_id]
    return Held(len(sizes), sum(sizes))


def test_a_slot_has_one_page() -> None:
    index = SlotIndex()
    assert index.put(entry("a", 1)) is None
    assert index.put(entry("a", 2)) == entry("a", 1)
    assert index.find("a") == entry("a", 2)
    assert index.entries() == (entry("a", 2),)


def test_a_page_is_dropped_only_while_it_is_the_slots_own() -> None:
    index = SlotIndex((entry("a", 2),))
    assert not index.drop("a", 1)
    assert not index.drop("b", 2)
    assert index.drop("a", 2)
    assert index.find("a") is None


def test_page_numbers_are_never_given_twice_over_a_restart() -> None:
    index = SlotIndex()
    taken = {index.page_take() for _ in range(3)}
    again = SlotIndex.from_bytes(index.to_bytes())
    assert again.page_take() not in taken


def test_the_table_reads_back_in_its_order() -> None:
    index = SlotIndex((entry("a", 1), entry("b", 2, adapter=BASE_MARKER), entry("c", 3)))
    index.find("a")
    assert [e.slot for e in index.entries()] == ["b", "c", "a"]
    assert SlotIndex.from_bytes(index.to_bytes()).entries() == index.entries()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"entries":[{}],"next":1}',
        b'{"entries":[1],"next":1}',
        b'{"entries":1,"next":1}',
        b'{"entries":[],"next":null}',
        SlotIndex((entry("a", 1, adapter=Digest("x")),)).to_bytes(),
    ],
)
def test_another_form_is_refused(content: bytes) -> None:
    with pytest.raises(MalformedError):
        SlotIndex.from_bytes(content)


def test_a_tenant_over_its_share_loses_its_own_oldest() -> None:
    index = SlotIndex((entry("b", 1, tenant=2), entry("a1", 2), entry("a2", 3), entry("a3", 4)))
    index.find("a1")
    gone = index.trim(Budget(node_bytes=1000, tenant_bytes=20))
    assert [e.slot for e in gone] == ["a2"]


def test_a_full_node_takes_from_the_tenant_that_holds_most() -> None:
    index = SlotIndex((entry("b", 1, tenant=2), *(entry(f"a{n}", n) for n in range(2, 6))))
    gone = index.trim(Budget(node_bytes=30, tenant_bytes=1000))
    assert [e.slot for e in gone] == ["a2", "a3"]
    gone = index.trim(Budget(node_bytes=1000, tenant_bytes=1000, slots=2))
    assert [e.slot for e in gone] == ["a4"]


FEW_AND_MANY = (
    *(entry(f"few{n}", n, 30, tenant=2) for n in range(2)),
    *(entry(f"many{n}", 10 + n, 1) for n in range(8)),
)


def test_too_many_slots_take_from_the_tenant_with_most_of_them() -> None:
    index = SlotIndex(FEW_AND_MANY)
    gone = index.trim(Budget(node_bytes=1000, tenant_bytes=1000, slots=8))
    assert [e.slot for e in gone] == ["many0", "many1"]


def test_too_many_bytes_take_from_the_tenant_with_most_of_them() -> None:
    index = SlotIndex(FEW_AND_MANY)
    gone = index.trim(Budget(node_bytes=60, tenant_bytes=1000, slots=10))
    assert [e.slot for e in gone] == ["few0"]


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(1, 9), st.booleans()),
        max_size=40,
    )
)
@example([(1, 0, 9, False), *((tenant, n, 1, False) for tenant in (2, 3) for n in range(6))])
@example(
    [(1, n, 2, False) for n in range(3)]
    + [(tenant, n, 9, False) for tenant in (2, 3) for n in range(2)]
)
def test_after_trimming_all_shares_hold_and_who_is_within_its_part_keeps_its_pages(
    trace: list[tuple[int, int, int, bool]],
) -> None:
    budget = Budget(node_bytes=40, tenant_bytes=20, slots=12)
    index = SlotIndex((entry("small", index_page := 1, 1, tenant=9),))
    for page, (tenant, slot, size, use) in enumerate(trace, start=index_page + 1):
        new = entry(f"{tenant}/{slot}", page, size, tenant=tenant)
        if use:
            index.find(new.slot)
        asked = index.to_bytes()
        kept = index.keeps(new, budget)
        assert index.to_bytes() == asked
        if not use:
            index.put(new)
        before = index.entries()
        gone = index.trim(budget)
        left = index.entries()
        assert use or kept == (new in left)
        assert len(left) + len(gone) == len(before)
        assert sum(e.size for e in left) <= budget.node_bytes
        assert len(left) <= budget.slots
        for tenant_id in {e.tenant_id for e in before}:
            assert held(left, tenant_id).size <= budget.tenant_bytes
            had = held(before, tenant_id)
            if had.slots * TENANTS <= budget.slots and had.size * TENANTS <= budget.node_bytes:
                assert all(e.tenant_id != tenant_id for e in gone)
        assert any(e.slot == "small" for e in left)
