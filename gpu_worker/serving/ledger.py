"""The ledger of one memory: who holds how many bytes of it, by category, digest and tenant.

    reserve → commit → release

Whoever is about to take memory reserves it first, commits what it took in fact, and releases it
when it let go. The sum never exceeds the budget and is never negative. The bank of adapter rows is
workspace from the start; while an adapter has its row, the row's bytes count as adapter weights
instead, so that the total stays what the memory really holds.

A pool is claimed once for takers that come and go by the thousand, as those of KV do. Their bytes
are not written down here but counted where they lie, whenever somebody asks: no way out can be
forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
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


Owner = Key | UUID
"""Who holds memory: a digest, or a tenant by what runs on the base alone."""

Parts = Callable[[], Mapping[Owner | None, int]]
"""Counts, when it is called and on any thread, the bytes that each owner takes of a pool.

None owns what is taken and nobody's.
"""


class LedgerError(Exception):
    """A step that a reservation's state does not allow."""


class LedgerFullError(Exception):
    """More than is free. ``size`` and ``free`` are in bytes."""

    def __init__(self, category: Category, size: int, free: int) -> None:
        super().__init__(f"{category}: expected at most {free} bytes, got {size}")
        self.category, self.size, self.free = category, size, free


@dataclass(frozen=True, slots=True)
class Holding:
    """One line of the ledger: what is claimed, and how much of it is taken in fact, in bytes.

    ``owner`` is None for what is nobody's.
    """

    category: Category
    owner: Owner | None
    size: int
    taken: int
    committed: bool


class Reservation:
    """A claim on memory. Only the ledger that made it changes it."""

    def __init__(
        self, ledger: Ledger, category: Category, owner: Owner | None, parts: Parts | None = None
    ) -> None:
        self._ledger = ledger
        self.category = category
        self.owner = owner
        self.parts = parts

    def commit(self, size: int) -> None:
        """Say how many bytes were taken; what was reserved beyond them is free again.

        Raises:
            LedgerFullError: more than was reserved, and more than is free; nothing changed.
            LedgerError: it is committed or released already.
        """
        self._ledger._commit(self, size)

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

    def reserve(self, category: Category, size: int, owner: Owner | None = None) -> Reservation:
        """Claim memory before it is taken.

        Raises:
            LedgerFullError: more than is free. LedgerError: a negative size.
        """
        return self._claim(Reservation(self, category, owner), size)

    def hold(self, category: Category, size: int, owner: Owner | None = None) -> Reservation:
        """Reserve and commit at once: what is there already, and stays.

        Raises:
            LedgerFullError: more than is free.
        """
        reservation = self.reserve(category, size, owner)
        try:
            reservation.commit(size)
        except BaseException:
            # Whatever stopped it, nobody else could give this back.
            reservation.release()
            raise
        return reservation

    def pool(self, category: Category, size: int, parts: Parts) -> None:
        """Claim memory for good, of which ``parts`` counts at any time who takes how much.

        Raises:
            LedgerFullError: more than is free. LedgerError: a negative size.
        """
        self._claim(Reservation(self, category, None, parts), size)

    def free(self, category: Category) -> int:
        """Bytes that may still be reserved for this."""
        with self._lock:
            return self._free(category)

    def taken(self) -> dict[Category, int]:
        """Bytes of each category that are taken in fact; reserved ones are not, yet.

        Raises:
            LedgerError: the parts of a pool are more than it.
        """
        found = dict.fromkeys(Category, 0)
        for holding in self.holdings():
            found[holding.category] += holding.taken
        found[Category.WORKSPACE] += max(0, self.bank - found[Category.ADAPTER])
        return found

    def by_owner(self) -> dict[Owner, dict[Category, int]]:
        """Bytes of each digest, and of each tenant on the base alone, by category.

        Raises:
            LedgerError: the parts of a pool are more than it.
        """
        found: dict[Owner, dict[Category, int]] = {}
        for holding in self.holdings():
            if holding.owner is not None:
                _add(found.setdefault(holding.owner, {}), holding)
        return found

    def by_tenant(self) -> dict[UUID, dict[Category, int]]:
        """Bytes of each tenant by category, with those of its digests.

        Raises:
            LedgerError: the parts of a pool are more than it.
        """
        found: dict[UUID, dict[Category, int]] = {}
        for holding in self.holdings():
            owner = holding.owner
            if owner is not None:
                tenant = owner.tenant_id if isinstance(owner, Key) else owner
                _add(found.setdefault(tenant, {}), holding)
        return found

    def holdings(self) -> tuple[Holding, ...]:
        """Every line, in the order of reserving; of a pool one for each owner, and what is left.

        Raises:
            LedgerError: the parts of a pool are more than it.
        """
        with self._lock:
            claims = tuple(self._holdings.items())
        # Counted without this lock: whoever counts has locks of its own.
        return tuple(line for claim, holding in claims for line in _lines(claim, holding))

    def _claim(self, reservation: Reservation, size: int) -> Reservation:
        if size < 0:
            raise LedgerError(f"expected a size of 0 or more, got {size}")
        category, owner = reservation.category, reservation.owner
        with self._lock:
            self._fit_check(category, size)
            self._holdings[reservation] = Holding(category, owner, size, taken=0, committed=False)
        return reservation

    def _commit(self, reservation: Reservation, size: int) -> None:
        with self._lock:
            holding = self._holdings.get(reservation)
            if holding is None or holding.committed:
                raise LedgerError("expected a reservation that is not committed or released")
            if size < 0:
                raise LedgerError(f"expected a size of 0 or more, got {size}")
            self._fit_check(holding.category, size - holding.size)
            self._holdings[reservation] = replace(holding, size=size, taken=size, committed=True)

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


def _lines(claim: Reservation, holding: Holding) -> Iterator[Holding]:
    """A claim's one line; a pool's line for each owner, and one for what nobody takes."""
    if claim.parts is None:
        yield holding
        return
    left = holding.size
    for owner, size in claim.parts().items():
        left -= size
        yield Holding(holding.category, owner, size, taken=size, committed=True)
    if left < 0:
        raise LedgerError(f"expected at most {holding.size} bytes, got {holding.size - left}")
    yield replace(holding, size=left)


def _add(found: dict[Category, int], holding: Holding) -> None:
    found[holding.category] = found.get(holding.category, 0) + holding.size


def error_of(taken: Mapping[Category, int], measured: int) -> float:
    """How far the ledger is from what was measured, as a part of what was measured.

    The bound of the project is 0.05.
    """
    total = sum(taken.values())
    return abs(total - measured) / measured if measured else float(total != 0)
