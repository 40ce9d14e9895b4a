"""Which pages count, as a pure table: one for each slot, with its tenant, adapter and size.

A page that is not in the table does not exist: half-written ones, older ones and ones that were
put back are never looked at. Page numbers are never given twice.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any, Final
from uuid import UUID

from registry_service.domain import limits
from registry_service.domain.canonical import json_parse
from registry_service.domain.digests import Digest, digest_parse
from registry_service.domain.errors import MalformedError
from registry_service.trust.routing_context import BASE_MARKER

INDEX_FORMAT: Final = 1
_ENTRY: Final = {"slot", "tenant_id", "adapter_digest", "page", "size", "sidecar_digest"}


@dataclass(frozen=True, slots=True)
class Budget:
    """What all pages may take, each with its sidecar: bytes of a node, of a tenant, and slots."""

    node_bytes: int = limits.SLOT_NODE_BYTES
    tenant_bytes: int = limits.SLOT_TENANT_BYTES
    slots: int = limits.SLOTS


@dataclass(frozen=True, slots=True)
class Entry:
    """One slot's current page. ``size`` is in bytes, page and sidecar together."""

    slot: str
    tenant_id: UUID
    adapter_digest: Digest
    page: int
    size: int
    sidecar_digest: Digest


class SlotIndex:
    """The table, least recently used first. The caller serializes its calls."""

    def __init__(self, entries: tuple[Entry, ...] = (), next_page: int = 1) -> None:
        self._entries = {entry.slot: entry for entry in entries}
        self._next_page = next_page

    def page_take(self) -> int:
        """A page number that no page had."""
        page, self._next_page = self._next_page, self._next_page + 1
        return page

    def find(self, slot: str) -> Entry | None:
        """A slot's entry, which counts as a use of it."""
        entry = self._entries.pop(slot, None)
        if entry is not None:
            self._entries[slot] = entry
        return entry

    def put(self, entry: Entry) -> Entry | None:
        """Make this the slot's page; the one that it replaces."""
        before = self._entries.pop(entry.slot, None)
        self._entries[entry.slot] = entry
        return before

    def drop(self, slot: str, page: int) -> bool:
        """Forget a slot if this is its page still; True when it was."""
        entry = self._entries.get(slot)
        if entry is None or entry.page != page:
            return False
        del self._entries[slot]
        return True

    def of_adapter(self, digest: Digest) -> tuple[Entry, ...]:
        """Every page that was made under an adapter, of any tenant."""
        return tuple(e for e in self._entries.values() if e.adapter_digest == digest)

    def entries(self) -> tuple[Entry, ...]:
        """Every entry, least recently used first."""
        return tuple(self._entries.values())

    def keeps(self, entry: Entry, budget: Budget) -> bool:
        """True when this page would stay if it were put here now and all were trimmed."""
        after = SlotIndex(self.entries())
        after.put(entry)
        return entry not in after.trim(budget)

    def trim(self, budget: Budget) -> tuple[Entry, ...]:
        """Forget pages until all fit; those forgotten.

        A tenant over its share loses its own least recently used ones. When there are too many
        slots, the tenant with most of them does, and when they are too large, the one with most
        bytes: nobody's many pages push out another's few, and nobody's large ones another's small.
        """
        gone = []
        while (tenant := self._over(budget)) is not None:
            entry = next(e for e in self._entries.values() if e.tenant_id == tenant)
            gone.append(self._entries.pop(entry.slot))
        return tuple(gone)

    def to_bytes(self) -> bytes:
        """The table as JSON."""
        entries = [
            {**asdict(entry), "tenant_id": str(entry.tenant_id)} for entry in self._entries.values()
        ]
        return json.dumps({"entries": entries, "next": self._next_page}).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> SlotIndex:
        """The table that ``to_bytes`` wrote.

        Raises:
            MalformedError: another form.
        """
        document = json_parse(content, what="slot index", limit=limits.SLOT_INDEX_BYTES)
        try:
            entries = tuple(_entry(item) for item in document["entries"])
            return cls(entries, int(document["next"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MalformedError("slot index: expected entries and the next page") from error

    def _over(self, budget: Budget) -> UUID | None:
        """The tenant that has to lose a page, if any has to."""
        slots: Counter[UUID] = Counter()
        held: Counter[UUID] = Counter()
        for entry in self._entries.values():
            slots[entry.tenant_id] += 1
            held[entry.tenant_id] += entry.size
        for tenant, size in held.items():
            if size > budget.tenant_bytes:
                return tenant
        if slots.total() > budget.slots:
            return max(slots, key=lambda tenant: slots[tenant])
        if held.total() > budget.node_bytes:
            return max(held, key=lambda tenant: held[tenant])
        return None


def _entry(item: dict[str, Any]) -> Entry:
    if set(item) != _ENTRY:
        raise MalformedError("slot index: expected exactly an entry's fields")
    digest = item["adapter_digest"]
    entry = Entry(**{**item, "tenant_id": UUID(item["tenant_id"])})
    return replace(
        entry,
        adapter_digest=BASE_MARKER if digest == BASE_MARKER else digest_parse(digest),
        sidecar_digest=digest_parse(entry.sidecar_digest),
    )
