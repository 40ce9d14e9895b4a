"""What is still to be done with slots, as a pure table: tenants take turns, within their places.

A disk that cannot follow costs saves, not answers: what there is no place for is not saved. Nothing
of an adapter that was revoked is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple
from uuid import UUID

from gpu_worker.serving.identity import Identity
from gpu_worker.serving.ledger import Owner
from gpu_worker.serving.residency import Key
from gpu_worker.serving.slot_memory import Room
from gpu_worker.serving.slot_sidecar import Refusal, Session
from gpu_worker.serving.tenant_queue import TenantQueue
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
        self._queued = TenantQueue[Work]()
        # Never forgotten, as in the table of residents: one key for each revocation.
        self._removed: set[Key] = set()

    def __len__(self) -> int:
        return len(self._queued)

    def keys(self) -> set[Key]:
        """The adapters that something waits of."""
        return {owner for work in self._queued if isinstance(owner := work.slot.owner, Key)}

    def full(self, slot: Slot) -> str:
        """Why no state of this slot is taken; empty when one is."""
        if slot.owner in self._removed:
            return Refusal.REVOKED
        of_tenant = self._queued.of_tenant(slot.identity.tenant_id)
        full = of_tenant >= TENANT_PLACES or len(self) >= PLACES
        return "too many saves wait" if full else ""

    def put(self, work: Work) -> bool:
        """Take this as its tenant's last; False when its adapter was revoked."""
        if work.slot.owner in self._removed:
            return False
        self._queued.put(work.slot.identity.tenant_id, work)
        return True

    def take(self) -> Work:
        """The next of the tenant whose turn it is. There has to be one."""
        return self._queued.take()

    def remove(self, key: Key) -> list[Work]:
        """What waits of an adapter, which leaves; nothing of it is taken from now on."""
        self._removed.add(key)
        return self._queued.remove(key.tenant_id, lambda work: work.slot.owner == key)
