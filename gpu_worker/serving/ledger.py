"""The ledger of one memory: who holds how many bytes of it, by category, digest and tenant.

    reserve → commit → release

Whoever is about to take memory reserves it first, commits what it took in fact, and releases it
when it let go. The sum never exceeds the budget and is never negative. The bank of adapter rows is
workspace from the start; while an adapter has its row, the row's bytes count as adapter weights
instead, so that the total stays what the memory really holds.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from uuid import UUID

from gpu_worker.serving.residency import Key


class Category(StrEnum):
    """What memory is held for."""

    BASE = "BASE"
    ADAPTER = "ADAPTER"
    WORKSPACE = "WORKSPACE"
    KV = "KV"


class LedgerError(Exception):
    """A step that a reservation's state does not allow."""


class LedgerFullError(Exception):
    """More than is free. ``size`` and ``free`` are in bytes."""

    def __init__(self, category: Category, size: int, free: int) -> None:
        super().__init__(f"{category}: expected at most {free} bytes, got {size}")
        self.category, self.size, self.free = category, size, free


@dataclass(frozen=True, slots=True)
class Holding:
    """One line of the ledger: what is claimed, and how much of it is taken in fact.

    ``owner`` is None for what belongs to no digest.
    """

    category: Category
    owner: Key | None
    size: int
    taken: int
    committed: bool


class Reservation:
    """A claim on memory. Only the ledger that made it changes it."""

    def __init__(self, ledger: Ledger, category: Category, owner: Key | None) -> None:
        self._ledger = ledger
        self.category = category
        self.owner = owner

    def commit(self, size: int) -> None:
        """Say how many bytes were taken; what was reserved beyond them is free again.

        Raises:
            LedgerFullError: more than was reserved, and more than is free; nothing changed.
            LedgerError: it is committed or released already.
        """
        self._ledger._commit(self, size)

    def take(self, size: int) -> None:
        """Say how many bytes are taken now of a claim that stays, as for a cache.

        Raises:
            LedgerError: more than is claimed, or it is committed or released already.
        """
        self._ledger._take(self, size)

    def release(self) -> int:
        """Give everything back; the bytes. A second time does nothing and gives 0."""
        return self._ledger._release(self)


class Ledger:
    """Thread-safe through one lock. All sizes are in bytes."""

    def __init__(self, budget: int, *, bank: int = 0) -> None:
        if not 0 <= bank <= budget:
            raise LedgerError(f"bank: expected 0 to {budget} bytes, got {bank}")
        self.budget = budget
        self.bank = bank
        self._lock = threading.Lock()
        self._holdings: dict[Reservation, Holding] = {}

    def reserve(self, category: Category, size: int, owner: Key | None = None) -> Reservation:
        """Claim memory before it is taken.

        Raises:
            LedgerFullError: more than is free. LedgerError: a negative size.
        """
        if size < 0:
            raise LedgerError(f"expected a size of 0 or more, got {size}")
        reservation = Reservation(self, category, owner)
        with self._lock:
            self._fit_check(category, size)
            self._holdings[reservation] = Holding(category, owner, size, taken=0, committed=False)
        return reservation

    def hold(self, category: Category, size: int, owner: Key | None = None) -> Reservation:
        """Reserve and commit at once: what is there already, and stays.

        Raises:
            LedgerFullError: more than is free.
        """
        reservation = self.reserve(category, size, owner)
        reservation.commit(size)
        return reservation

    def free(self, category: Category) -> int:
        """Bytes that may still be reserved for this."""
        with self._lock:
            return self._free(category)

    def taken(self) -> dict[Category, int]:
        """Bytes of each category that are taken in fact; reserved ones are not, yet."""
        found = dict.fromkeys(Category, 0)
        for holding in self.holdings():
            found[holding.category] += holding.taken
        found[Category.WORKSPACE] += max(0, self.bank - found[Category.ADAPTER])
        return found

    def by_category(self) -> dict[Category, int]:
        """Bytes of each category that are claimed, taken or not."""
        with self._lock:
            found = {category: self._of(category) for category in Category}
        found[Category.WORKSPACE] += max(0, self.bank - found[Category.ADAPTER])
        return found

    def by_owner(self) -> dict[Key, dict[Category, int]]:
        """Bytes of each digest by category."""
        found: dict[Key, dict[Category, int]] = {}
        for holding in self.holdings():
            if holding.owner is not None:
                _add(found.setdefault(holding.owner, {}), holding)
        return found

    def by_tenant(self) -> dict[UUID, dict[Category, int]]:
        """Bytes of each tenant by category."""
        found: dict[UUID, dict[Category, int]] = {}
        for holding in self.holdings():
            if holding.owner is not None:
                _add(found.setdefault(holding.owner.tenant_id, {}), holding)
        return found

    def holdings(self) -> tuple[Holding, ...]:
        """Every line, in the order of reserving."""
        with self._lock:
            return tuple(self._holdings.values())

    def _commit(self, reservation: Reservation, size: int) -> None:
        with self._lock:
            holding = self._open(reservation, size)
            self._fit_check(holding.category, size - holding.size)
            self._holdings[reservation] = replace(holding, size=size, taken=size, committed=True)

    def _take(self, reservation: Reservation, size: int) -> None:
        with self._lock:
            holding = self._open(reservation, size)
            if size > holding.size:
                raise LedgerError(f"expected at most {holding.size} bytes, got {size}")
            self._holdings[reservation] = replace(holding, taken=size)

    def _open(self, reservation: Reservation, size: int) -> Holding:
        holding = self._holdings.get(reservation)
        if holding is None or holding.committed:
            raise LedgerError("expected a reservation that is not committed or released")
        if size < 0:
            raise LedgerError(f"expected a size of 0 or more, got {size}")
        return holding

    def _release(self, reservation: Reservation) -> int:
        with self._lock:
            holding = self._holdings.pop(reservation, None)
        return 0 if holding is None else holding.size

    def _fit_check(self, category: Category, size: int) -> None:
        free = self._free(category)
        if size > free:
            raise LedgerFullError(category, size, free)

    def _free(self, category: Category) -> int:
        if self.bank and category is Category.ADAPTER:
            return self.bank - self._of(category)
        return self.budget - self._claimed()

    def _claimed(self) -> int:
        if not self.bank:
            return sum(holding.size for holding in self._holdings.values())
        return self.bank + sum(
            holding.size
            for holding in self._holdings.values()
            if holding.category is not Category.ADAPTER
        )

    def _of(self, category: Category) -> int:
        return sum(h.size for h in self._holdings.values() if h.category is category)


def _add(found: dict[Category, int], holding: Holding) -> None:
    found[holding.category] = found.get(holding.category, 0) + holding.size


def error_of(taken: Mapping[Category, int], measured: int) -> float:
    """How far the ledger is from what was measured, as a part of what was measured.

    The bound of the project is 0.05.
    """
    total = sum(taken.values())
    return abs(total - measured) / measured if measured else float(total != 0)
