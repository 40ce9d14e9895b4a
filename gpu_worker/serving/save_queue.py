"""What is still to be done with slots, as a pure table: tenants take turns, within their places.

A disk that cannot follow costs saves, not answers: what there is no place for is not saved. Nothing
of an adapter that was revoked is here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple
from uuid import UUID

from gpu_worker.serving.identity import Identity
from gpu_worker.serving.ledger import Owner
from gpu_worker.serving.residency import Key
from gpu_worker.serving.slot_memory import Room
from gpu_worker.serving.slot_sidecar import Refusal, Session
from registry_service.domain.digests import Digest
from registry_service.trust.routing_context import BASE_MARKER

PLACES: Final = 16
TENANT_PLACES: Final = 4


class Slot(NamedTuple):
    """A session's slot, and what its KV is made under now."""

    session: Session
    identity: Identity

    @property
    def name(self) -> tuple[UUID, Session]:
        """Whose it is: what is to be done with it is done in order."""
        return self.identity.tenant_id, self.session

    @property
    def owner(self) -> Owner:
        """Whose memory its KV takes: its adapter's, or the tenant's on the base alone."""
        tenant, adapters = self.identity.tenant_id, self.identity.adapters
        return tenant if adapters == BASE_MARKER else Key(tenant, Digest(adapters[0][0]))


class Work(NamedTuple):
    """What is to be done with a slot; ``room`` is that of the state that is to be saved."""

    slot: Slot
    run: Callable[[], object]
    room: Room | None = None


class SaveQueue:
    """The caller serializes its calls."""

    def __init__(self) -> None:
        # By tenant, in the order of their turns.
        self._queued: dict[UUID, deque[Work]] = {}
        self._last: UUID | None = None
        # Never forgotten, as in the table of residents: one key for each revocation.
        self._removed: set[Key] = set()

    def __len__(self) -> int:
        return sum(len(works) for works in self._queued.values())

    def keys(self) -> set[Key]:
        """The adapters that something waits of."""
        owners = {work.slot.owner for works in self._queued.values() for work in works}
        return {owner for owner in owners if isinstance(owner, Key)}

    def full(self, slot: Slot) -> str:
        """Why no state of this slot is taken; empty when one is."""
        if slot.owner in self._removed:
            return Refusal.REVOKED
        of_tenant = len(self._queued.get(slot.identity.tenant_id, ()))
        full = of_tenant >= TENANT_PLACES or len(self) >= PLACES
        return "too many saves wait" if full else ""

    def put(self, work: Work) -> bool:
        """Take this as its tenant's last; False when its adapter was revoked."""
        if work.slot.owner in self._removed:
            return False
        self._queued.setdefault(work.slot.identity.tenant_id, deque()).append(work)
        return True

    def take(self) -> Work:
        """The next of the tenant whose turn it is, which then is last. There has to be one."""
        # Who had a turn and asked again meanwhile is first in the table, and yet not next.
        turns = (tenant for tenant in self._queued if tenant != self._last)
        tenant = next(turns, None) or next(iter(self._queued))
        works = self._queued.pop(tenant)
        work = works.popleft()
        if works:
            self._queued[tenant] = works
        self._last = tenant
        return work

    def remove(self, key: Key) -> list[Work]:
        """What waits of an adapter, which leaves; nothing of it is taken from now on."""
        self._removed.add(key)
        works = self._queued.get(key.tenant_id, ())
        left = deque(work for work in works if work.slot.owner != key)
        if left:
            self._queued[key.tenant_id] = left
        else:
            self._queued.pop(key.tenant_id, None)
        return [work for work in works if work.slot.owner == key]
