"""Who has to go when an adapter needs room, or a place in the pool: decided purely from what is
resident.

A tenant's share is the high-water mark (and the number of places) divided by the tenants that hold
something, the one that loads included; a tenant's first adapter is always within it. A tenant that
would be over its share makes room from its own; one within it makes room from those that are over
theirs. So a tenant within its share loses nothing to another one, however many versions that one
creates. Only where there are more tenants than places do those take turns. Least recently used go
first, and what is in use never goes. A node that finds no place in the pool has as many places as
it holds adapters, and shares them in the same way.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from gpu_worker.serving.residency import Key


class Reason(StrEnum):
    """Why something was unloaded."""

    ROOM = "ROOM"
    HIGH_WATER = "HIGH_WATER"
    TENANT_LIMIT = "TENANT_LIMIT"
    POOL = "POOL"
    PLACEMENT_LOST = "PLACEMENT_LOST"
    VERDICT_EXPIRED = "VERDICT_EXPIRED"
    REVOKED = "REVOKED"


class NoRoomError(Exception):
    """Nothing that may go would make room; the message says which bound is reached."""


@dataclass(frozen=True, slots=True)
class Held:
    """One resident: its bytes, whether it may go, and when it was last used (in any order)."""

    key: Key
    size: int
    idle: bool
    used: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes and places for adapters on this node, the mark in bytes, and a tenant's most."""

    size: int
    mark: int
    adapters: int
    tenant_size: int
    tenant_adapters: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """One that has to go, and why."""

    key: Key
    reason: Reason


def room_make(held: Sequence[Held], tenant_id: UUID, need: int, bounds: Bounds) -> list[Eviction]:
    """What has to go, in order, before ``need`` bytes of a tenant's adapter fit.

    Raises:
        NoRoomError: it would not fit whatever may go.
    """
    if need > min(bounds.mark, bounds.tenant_size):
        most = min(bounds.mark, bounds.tenant_size)
        raise NoRoomError(f"an adapter: expected at most {most} bytes resident, got {need}")
    left, gone = list(held), list[Eviction]()

    def own() -> list[Held]:
        return [item for item in left if item.key.tenant_id == tenant_id]

    def out(victim: Held | None, reason: Reason, what: str) -> None:
        if victim is None:
            raise NoRoomError(f"{what}, and nothing that may go is idle")
        left.remove(victim)
        gone.append(Eviction(victim.key, reason))

    while _size(own()) + need > bounds.tenant_size or len(own()) >= bounds.tenant_adapters:
        out(_oldest(own()), Reason.TENANT_LIMIT, "the tenant's adapters on this node are as many")
    while _size(left) + need > bounds.size or len(left) >= bounds.adapters:
        out(_victim(left, tenant_id, need, bounds), Reason.ROOM, "the node is full")
    return gone


def place_make(held: Sequence[Held], tenant_id: UUID, *, own: bool) -> Eviction:
    """What has to go before a tenant's adapter has a place in a pool that is full.

    ``own``: only the tenant's own makes one.

    Raises:
        NoRoomError: nothing may go.
    """
    theirs = [item for item in held if item.key.tenant_id == tenant_id]
    places = len(held) // len({item.key.tenant_id for item in held} | {tenant_id})
    if own or (theirs and len(theirs) >= places):
        victim = _oldest(theirs)
    else:
        victim = _oldest_over(held, places)
    if victim is None:
        raise NoRoomError("the pool is full, and nothing that may go is idle")
    return Eviction(victim.key, Reason.POOL)


def trim(held: Sequence[Held], bounds: Bounds, keep: Key) -> list[Eviction]:
    """What has to go until the high-water mark is kept; never ``keep``, which was just loaded."""
    left, gone = list(held), list[Eviction]()
    while _size(left) > bounds.mark:
        share = bounds.mark // len({item.key.tenant_id for item in left})
        victim = _oldest(item for item in _over(left, size=share) if item.key != keep)
        if victim is None:
            break
        left.remove(victim)
        gone.append(Eviction(victim.key, Reason.HIGH_WATER))
    return gone


def _victim(left: Sequence[Held], tenant_id: UUID, need: int, bounds: Bounds) -> Held | None:
    own = [item for item in left if item.key.tenant_id == tenant_id]
    tenants = len({item.key.tenant_id for item in left} | {tenant_id})
    size, places = bounds.mark // tenants, bounds.adapters // tenants
    if own and (_size(own) + need > size or len(own) >= places):
        return _oldest(own)
    if _size(left) + need > bounds.size:
        return _oldest(_over(left, size=size)) or _oldest(own)
    return _oldest_over(left, places)


def _oldest_over(left: Sequence[Held], places: int) -> Held | None:
    """Of those over their share of places; of all, where there are more tenants than places."""
    if places == 0:
        return _oldest(_over(left, places=1)) or _oldest(left)
    return _oldest(_over(left, places=places))


def _over(left: Sequence[Held], *, size: int | None = None, places: int = 0) -> list[Held]:
    """The residents of the tenants that hold more than ``size`` bytes, or else than ``places``."""
    by_tenant: dict[UUID, list[Held]] = {}
    for item in left:
        by_tenant.setdefault(item.key.tenant_id, []).append(item)
    return [
        item
        for theirs in by_tenant.values()
        if (len(theirs) > places if size is None else _size(theirs) > size)
        for item in theirs
    ]


def _oldest(items: Iterable[Held]) -> Held | None:
    idle = [item for item in items if item.idle]
    return min(idle, key=lambda item: item.used) if idle else None


def _size(items: Iterable[Held]) -> int:
    return sum(item.size for item in items)


class Unloads:
    """How often which reason unloaded what, for reports. The caller serializes its calls."""

    def __init__(self, keys: int) -> None:
        self._keys = keys
        self.by_reason: Counter[Reason] = Counter()
        self._by_key: OrderedDict[Key, Counter[Reason]] = OrderedDict()

    def count(self, key: Key, reason: Reason) -> None:
        """Count one. Beyond ``keys`` the key that went longest ago is forgotten."""
        self.by_reason[reason] += 1
        self._by_key.setdefault(key, Counter())[reason] += 1
        self._by_key.move_to_end(key)
        if len(self._by_key) > self._keys:
            self._by_key.popitem(last=False)

    def of(self, key: Key) -> dict[Reason, int]:
        """The reasons of one key."""
        return dict(self._by_key.get(key, {}))
