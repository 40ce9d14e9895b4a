"""The ledger: reserve, commit, release; never over the budget, never negative."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gpu_worker.serving.ledger import (
    Category,
    Ledger,
    LedgerError,
    LedgerFullError,
    Owner,
    Reservation,
    error_of,
)
from gpu_worker.serving.residency import Key
from registry_service.domain.digests import digest_of

ONE = Key(UUID(int=1), digest_of(b"a"))
TWO = Key(UUID(int=1), digest_of(b"b"))
THREE = Key(UUID(int=2), digest_of(b"c"))


def test_categories_digests_and_tenants_are_counted_apart() -> None:
    ledger = Ledger(1000)
    ledger.hold(Category.BASE, 400)
    ledger.hold(Category.KV, 50, ONE)
    for owner, size in ((ONE, 10), (TWO, 20), (THREE, 30)):
        ledger.reserve(Category.ADAPTER, 100, owner).commit(size)
    assert ledger.taken() == {
        Category.BASE: 400,
        Category.ADAPTER: 60,
        Category.WORKSPACE: 0,
        Category.KV: 50,
    }
    assert ledger.by_owner()[ONE] == {Category.KV: 50, Category.ADAPTER: 10}
    assert ledger.by_tenant() == {
        ONE.tenant_id: {Category.KV: 50, Category.ADAPTER: 30},
        THREE.tenant_id: {Category.ADAPTER: 30},
    }
    assert ledger.free(Category.KV) == 490


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    ledger = Ledger(100)
    reservation = ledger.reserve(Category.ADAPTER, 60, ONE)
    before = ledger.holdings()
    with pytest.raises(LedgerFullError, match="ADAPTER: expected at most 40 bytes, got 41"):
        ledger.reserve(Category.ADAPTER, 41, TWO)
    with pytest.raises(LedgerFullError):
        reservation.commit(101)
    with pytest.raises(LedgerError):
        ledger.reserve(Category.KV, -1)
    with pytest.raises(LedgerError):
        reservation.commit(-1)
    assert ledger.holdings() == before
    reservation.commit(100)
    assert ledger.free(Category.ADAPTER) == 0


def test_a_reservation_goes_one_way() -> None:
    ledger = Ledger(100)
    reservation = ledger.reserve(Category.ADAPTER, 10, ONE)
    reservation.commit(7)
    with pytest.raises(LedgerError):
        reservation.commit(7)
    assert reservation.release() == 7
    assert reservation.release() == 0
    with pytest.raises(LedgerError):
        reservation.commit(7)
    assert ledger.holdings() == ()


def test_a_row_of_the_bank_is_adapter_weights_while_it_is_taken() -> None:
    ledger = Ledger(1000, bank=300)
    ledger.hold(Category.BASE, 500)
    assert ledger.taken()[Category.WORKSPACE] == 300
    assert ledger.free(Category.WORKSPACE) == 200
    assert ledger.free(Category.ADAPTER) == 300
    row = ledger.hold(Category.ADAPTER, 100, ONE)
    assert ledger.taken()[Category.WORKSPACE] == 200
    assert sum(ledger.taken().values()) == 800
    # A full bank is full, although the budget has more.
    with pytest.raises(LedgerFullError):
        ledger.reserve(Category.ADAPTER, 201, TWO)
    row.release()
    assert sum(ledger.taken().values()) == 800
    with pytest.raises(LedgerError):
        Ledger(100, bank=101)


def test_a_row_is_taken_once_it_is_committed() -> None:
    ledger = Ledger(1000, bank=100)
    row = ledger.reserve(Category.ADAPTER, 60, ONE)
    assert ledger.taken()[Category.WORKSPACE] == 100
    row.commit(40)
    assert ledger.taken()[Category.WORKSPACE] == 60
    assert sum(ledger.taken().values()) == 100


def test_a_pool_is_claimed_once_and_whose_its_parts_are_is_counted_when_asked() -> None:
    ledger = Ledger(1000, bank=100)
    parts: dict[Owner | None, int] = {}
    ledger.pool(Category.KV, 300, lambda: parts)
    ledger.hold(Category.ADAPTER, 50, ONE)
    states: list[dict[Owner | None, int]] = [
        {None: 200},
        {None: 150, ONE: 30, TWO: 20, THREE: 100},
        # A tenant beside its digests: what it runs on the base alone.
        {ONE: 10, ONE.tenant_id: 7},
        {},
    ]
    for now in states:
        parts = dict(now)
        assert ledger.taken()[Category.KV] == sum(now.values())
        assert ledger.free(Category.KV) == 600
        assert kv_of(ledger.by_owner()) == {k: n for k, n in now.items() if k is not None}
        assert ledger.by_owner()[ONE][Category.ADAPTER] == 50
        one = sum(now.get(owner, 0) for owner in (ONE, TWO, ONE.tenant_id))
        expected = {ONE.tenant_id: one, THREE.tenant_id: now.get(THREE, 0)}
        assert kv_of(ledger.by_tenant()) == {k: n for k, n in expected.items() if n}
        assert sum(line.size for line in ledger.holdings()) == 350
    parts = {ONE: 301}
    with pytest.raises(LedgerError, match="at most 300 bytes, got 301"):
        ledger.by_owner()
    with pytest.raises(LedgerFullError):
        ledger.pool(Category.KV, 601, dict)


def kv_of(lines: Mapping[Any, Mapping[Category, int]]) -> dict[Any, int]:
    """The KV of each owner that has any."""
    return {owner: line[Category.KV] for owner, line in lines.items() if Category.KV in line}


def test_the_error_is_a_part_of_what_was_measured() -> None:
    assert error_of({Category.BASE: 95, Category.KV: 0}, 100) == pytest.approx(0.05)
    assert error_of({Category.BASE: 105}, 100) == pytest.approx(0.05)
    assert error_of({}, 0) == 0.0
    assert error_of({Category.KV: 1}, 0) == 1.0


def test_threads_never_reserve_more_than_there_is() -> None:
    ledger = Ledger(100)
    over: list[int] = []

    def run() -> None:
        for _ in range(300):
            try:
                reservation = ledger.reserve(Category.ADAPTER, 30, ONE)
            except LedgerFullError:
                continue
            if ledger.free(Category.ADAPTER) < 0:
                over.append(1)
            reservation.commit(25)
            reservation.release()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert over == []
    assert ledger.holdings() == ()


class AnyOrder(RuleBasedStateMachine):
    """Any order of steps, against a plain list of what should be held."""

    reservations: Bundle[Reservation] = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(500, bank=200)
        self.model: dict[Reservation, int] = {}

    def fits(self, category: Category, size: int) -> bool:
        adapters = sum(n for r, n in self.model.items() if r.category is Category.ADAPTER)
        if category is Category.ADAPTER:
            return adapters + size <= 200
        return sum(self.model.values()) - adapters + size <= 300

    @rule(
        target=reservations,
        category=st.sampled_from(list(Category)),
        size=st.integers(0, 200),
        owner=st.sampled_from((None, ONE, TWO, THREE)),
    )
    def reserve(self, category: Category, size: int, owner: Key | None) -> Reservation:
        if not self.fits(category, size):
            with pytest.raises(LedgerFullError):
                self.ledger.reserve(category, size, owner)
            return self.ledger.reserve(category, 0, owner)
        reservation = self.ledger.reserve(category, size, owner)
        self.model[reservation] = size
        return reservation

    @rule(reservation=reservations, size=st.integers(0, 250))
    def commit(self, reservation: Reservation, size: int) -> None:
        try:
            reservation.commit(size)
        except (LedgerError, LedgerFullError):
            return
        self.model[reservation] = size

    @rule(reservation=consumes(reservations))
    def release(self, reservation: Reservation) -> None:
        assert reservation.release() == self.model.pop(reservation, 0)

    @invariant()
    def holds(self) -> None:
        lines = self.ledger.holdings()
        assert all(0 <= line.taken <= line.size for line in lines)
        adapters = sum(n for r, n in self.model.items() if r.category is Category.ADAPTER)
        assert sum(line.size for line in lines if line.category is Category.ADAPTER) == adapters
        assert self.ledger.free(Category.ADAPTER) == 200 - adapters >= 0
        others = sum(self.model.values()) - adapters
        assert self.ledger.free(Category.KV) == 300 - others >= 0
        owned = sum(n for r, n in self.model.items() if r.owner is not None)
        assert sum(sum(own.values()) for own in self.ledger.by_owner().values()) == owned
        assert sum(sum(own.values()) for own in self.ledger.by_tenant().values()) == owned


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
