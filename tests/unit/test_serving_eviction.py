"""Who goes when an adapter needs room: shares, limits, the mark, and never what is in use."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.serving.eviction import (
    Bounds,
    Eviction,
    Held,
    NoRoomError,
    Reason,
    Unloads,
    place_make,
    room_make,
    trim,
)
from gpu_worker.serving.residency import Key
from registry_service.domain import limits
from registry_service.domain.digests import Digest

BOUNDS = Bounds(size=100, mark=90, adapters=10, tenant_size=200, tenant_adapters=10)
A, B, C = UUID(int=1), UUID(int=2), UUID(int=3)


def key(tenant: UUID, number: int) -> Key:
    return Key(tenant, Digest(f"sha256:{number:064x}"))


def held(tenant: UUID, number: int, size: int, *, idle: bool = True) -> Held:
    """Numbers say the order of last use, too."""
    return Held(key(tenant, number), size, idle, number)


def keys(gone: list[Eviction]) -> list[Key]:
    return [eviction.key for eviction in gone]


def test_nobody_goes_while_there_is_room() -> None:
    assert room_make([held(A, 1, 60)], A, 40, BOUNDS) == []
    assert trim([held(A, 1, 50), held(B, 2, 40)], BOUNDS, key(B, 2)) == []


def test_the_least_recently_used_goes_first_and_what_is_in_use_never() -> None:
    residents = [held(A, 1, 30, idle=False), held(A, 3, 30), held(A, 2, 30)]
    gone = room_make(residents, A, 30, BOUNDS)
    assert gone == [Eviction(key(A, 2), Reason.ROOM)]
    busy = [held(A, 1, 50, idle=False), held(A, 2, 40, idle=False)]
    with pytest.raises(NoRoomError, match="the node is full"):
        room_make(busy, A, 20, BOUNDS)


def test_a_tenant_over_its_share_makes_room_from_its_own() -> None:
    residents = [held(B, 1, 30), *(held(A, number, 10) for number in range(2, 9))]
    assert keys(room_make(residents, A, 10, BOUNDS)) == [key(A, 2)]


def test_a_tenant_within_its_share_makes_room_from_those_over_theirs() -> None:
    residents = [held(B, 1, 20), held(A, 2, 40), held(A, 3, 40)]
    assert keys(room_make(residents, C, 20, BOUNDS)) == [key(A, 2)]


def test_a_first_adapter_larger_than_a_share_is_let_in() -> None:
    residents = [held(A, 1, 45), held(B, 2, 45)]
    assert keys(room_make(residents, C, 45, BOUNDS)) == [key(A, 1)]


def test_where_tenants_outnumber_places_they_take_turns() -> None:
    few = Bounds(size=100, mark=90, adapters=2, tenant_size=100, tenant_adapters=2)
    residents = [held(A, 1, 1), held(B, 2, 1)]
    assert keys(room_make(residents, C, 1, few)) == [key(A, 1)]
    assert keys(room_make(residents, B, 1, few)) == [key(B, 2)]


def test_a_tenants_own_limits_cost_its_own_adapters_only() -> None:
    tight = Bounds(size=100, mark=90, adapters=10, tenant_size=30, tenant_adapters=2)
    residents = [held(B, 1, 10), held(A, 2, 10), held(A, 3, 10)]
    assert room_make(residents, A, 10, tight) == [Eviction(key(A, 2), Reason.TENANT_LIMIT)]
    assert keys(room_make(residents, A, 25, tight)) == [key(A, 2), key(A, 3)]
    with pytest.raises(NoRoomError, match="at most 30 bytes"):
        room_make([], A, 31, tight)
    busy = [held(A, 2, 10, idle=False), held(A, 3, 10, idle=False)]
    with pytest.raises(NoRoomError, match="the tenant's adapters"):
        room_make(busy, A, 1, tight)


def test_a_tenant_with_as_much_in_use_as_it_may_leaves_others_their_places() -> None:
    adapters, own = limits.NODE_ADAPTERS, limits.TENANT_ADAPTERS
    bounds = Bounds(adapters, adapters, adapters, adapters + 1, own)
    residents = [held(A, number, 1, idle=False) for number in range(own)]
    with pytest.raises(NoRoomError, match="the tenant's adapters"):
        room_make(residents, A, 1, bounds)
    assert room_make(residents, B, 1, bounds) == []


def test_for_a_place_in_a_full_pool_the_nodes_adapters_are_shared_like_its_rows() -> None:
    def gone(*residents: Held, own: bool = False) -> Key:
        found = place_make(residents, A, own=own)
        assert found.reason is Reason.POOL
        return found.key

    # Alone, or at its share of what is here: from its own.
    assert gone(held(A, 2, 1), held(A, 1, 1)) == key(A, 1)
    assert gone(held(B, 1, 1), held(A, 2, 1)) == key(A, 2)
    # Within its share: from those over theirs.
    assert gone(held(B, 1, 1), held(C, 2, 1), held(C, 3, 1)) == key(C, 2)
    # More tenants than places: they take turns.
    assert gone(held(B, 2, 1), held(C, 1, 1)) == key(C, 1)
    # Its part of the pool is full: nobody else's place helps.
    assert gone(held(B, 1, 1), held(B, 2, 1), held(B, 3, 1), held(A, 4, 1), own=True) == key(A, 4)


def test_for_a_place_in_a_full_pool_nothing_in_use_and_no_share_of_another_goes() -> None:
    busy = held(A, 1, 1, idle=False)
    for residents, own in (
        ([], False),
        ([busy], False),
        ([held(B, 2, 1), busy], False),
        ([held(B, 1, 1), held(C, 2, 1, idle=False), held(C, 3, 1, idle=False)], False),
        ([held(B, 2, 1), held(B, 3, 1)], True),
    ):
        with pytest.raises(NoRoomError, match="the pool is full"):
            place_make(residents, A, own=own)


def test_above_the_mark_those_over_their_share_shrink_and_the_newest_stays() -> None:
    residents = [held(B, 1, 20), held(A, 2, 40), held(A, 3, 40)]
    assert trim(residents, BOUNDS, key(A, 3)) == [Eviction(key(A, 2), Reason.HIGH_WATER)]
    assert trim([held(B, 1, 40), held(A, 2, 60)], BOUNDS, key(A, 2)) == []


TRACES = st.lists(
    st.tuples(
        st.sampled_from((A, B, C)),
        st.integers(1, 40),
        st.booleans(),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(TRACES, st.integers(1, 8))
def test_no_trace_of_loads_takes_a_share_from_another_tenant(
    trace: list[tuple[UUID, int, bool, int]], adapters: int
) -> None:
    bounds = Bounds(100, 90, adapters, tenant_size=95, tenant_adapters=6)
    residents: list[Held] = []
    for number, (tenant, size, idle, turned) in enumerate(trace):
        # Now and then one that was in use becomes idle, or the other way round.
        if turned < len(residents):
            old = residents[turned]
            residents[turned] = Held(old.key, old.size, not old.idle, old.used)
        new = held(tenant, number, size, idle=idle)
        try:
            gone = room_make(residents, tenant, size, bounds)
        except NoRoomError:
            continue
        tenants = {item.key.tenant_id for item in residents} | {tenant}
        for key_gone in keys(gone):
            victim = next(item for item in residents if item.key == key_gone)
            assert victim.idle
            theirs = [i for i in residents if i.key.tenant_id == victim.key.tenant_id]
            over = (
                sum(item.size for item in theirs) > bounds.mark // len(tenants)
                or len(theirs) > max(1, bounds.adapters // len(tenants))
                or len(tenants) > bounds.adapters
            )
            assert victim.key.tenant_id == tenant or over
            residents.remove(victim)
        residents.append(new)
        for eviction in trim(residents, bounds, new.key):
            assert eviction.key != new.key
            residents = [item for item in residents if item.key != eviction.key]
        assert sum(item.size for item in residents) <= bounds.size
        assert len(residents) <= bounds.adapters
        own = [item for item in residents if item.key.tenant_id == tenant]
        assert sum(item.size for item in own) <= bounds.tenant_size
        assert len(own) <= bounds.tenant_adapters


@given(st.lists(st.integers(1, 40), min_size=1, max_size=80))
def test_a_quiet_tenant_keeps_its_share_whatever_another_one_loads(sizes: list[int]) -> None:
    quiet = [held(B, 1, 25), held(B, 2, 20)]
    residents = list(quiet)
    for number, size in enumerate(sizes, start=10):
        for eviction in room_make(residents, A, size, BOUNDS):
            residents = [item for item in residents if item.key != eviction.key]
        residents.append(held(A, number, size))
        for eviction in trim(residents, BOUNDS, key(A, number)):
            residents = [item for item in residents if item.key != eviction.key]
        assert all(item in residents for item in quiet)


def test_unloads_are_counted_by_reason_and_key_and_old_keys_are_forgotten() -> None:
    unloads = Unloads(keys=2)
    for number, reason in ((1, Reason.ROOM), (2, Reason.ROOM), (1, Reason.REVOKED)):
        unloads.count(key(A, number), reason)
    assert unloads.by_reason == {Reason.ROOM: 2, Reason.REVOKED: 1}
    assert unloads.of(key(A, 1)) == {Reason.ROOM: 1, Reason.REVOKED: 1}
    unloads.count(key(A, 3), Reason.HIGH_WATER)
    assert unloads.of(key(A, 2)) == {}
    assert unloads.of(key(A, 1)) != {}
    assert unloads.by_reason[Reason.ROOM] == 2
