"""What is resident on a node, as a pure state machine: no threads, clock, files or torch.

    load_begin → LOADING → SERVING → DRAINING → PURGED → UNLOADED
                    └ load_failed: gone

It drains when it is revoked, or retired to make room. A revoked key never serves again, whatever
its state was and whether or not it was resident. Every request holds a reference for each of its
sequences, from before the first token to after the last, and an entry with references is neither
purged nor unloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

from registry_service.domain.digests import Digest


class Key(NamedTuple):
    """One resident: an adapter digest, for its tenant."""

    tenant_id: UUID
    digest: Digest


class ResidentState(StrEnum):
    """Where a resident stands."""

    LOADING = "LOADING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    PURGED = "PURGED"
    UNLOADED = "UNLOADED"


class ResidencyError(Exception):
    """A step that the entry's state does not allow. It is never shown to a request."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A copy of one entry. ``size`` is in bytes, ``deadline`` in the caller's time.

    The one with the least ``used`` was used longest ago.
    """

    key: Key
    state: ResidentState
    references: int
    size: int
    deadline: float | None
    used: int


@dataclass(slots=True)
class _Entry:
    state: ResidentState
    references: int = 0
    size: int = 0
    deadline: float | None = None
    used: int = 0


class Residency:
    """The table of residents. The caller serializes its calls."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        # Never forgotten. It has no more keys than the registry has revoked while this process ran,
        # and the revocation list, which the node holds whole, has no place for more.
        self._revoked: set[Key] = set()
        self._uses = 0

    def state(self, key: Key) -> ResidentState | None:
        """Where a key stands, or None when it is not resident."""
        entry = self._entries.get(key)
        return None if entry is None else entry.state

    def is_revoked(self, key: Key) -> bool:
        """True from the moment the revocation was heard of."""
        return key in self._revoked

    def usable(self, key: Key) -> bool:
        """True when whoever has a reference may begin: it is attached and not revoked."""
        attached = {ResidentState.SERVING, ResidentState.DRAINING}
        return key not in self._revoked and self.state(key) in attached

    def load_begin(self, key: Key) -> None:
        """Start loading. Raises ResidencyError when it is revoked or resident."""
        if key in self._revoked:
            raise ResidencyError("revoked")
        if key in self._entries:
            raise ResidencyError(f"expected a key that is not resident, got {self.state(key)}")
        self._entries[key] = _Entry(ResidentState.LOADING)

    def load_end(self, key: Key, size: int, references: int = 0) -> ResidentState:
        """A load succeeded: SERVING, or DRAINING when it was revoked meanwhile.

        Whoever waited for it has a reference of ``references`` when it serves: nothing comes
        between the load and the first use.
        """
        entry = self._expect(key, ResidentState.LOADING)
        entry.size = size
        if key in self._revoked:
            entry.state = ResidentState.DRAINING
        else:
            entry.state, entry.references = ResidentState.SERVING, references
        self._use(entry)
        return entry.state

    def load_failed(self, key: Key) -> None:
        """A load failed and left nothing behind."""
        self._expect(key, ResidentState.LOADING)
        del self._entries[key]

    def acquire(self, key: Key, count: int = 1) -> None:
        """Take references. Raises ResidencyError unless it is SERVING and not revoked."""
        if key in self._revoked:
            raise ResidencyError("revoked")
        entry = self._expect(key, ResidentState.SERVING)
        entry.references += count
        self._use(entry)

    def release(self, key: Key, count: int = 1) -> None:
        """Give references back, in any state."""
        entry = self._entries.get(key)
        if entry is None or entry.references < count:
            raise ResidencyError("released more often than acquired")
        entry.references -= count
        self._use(entry)

    def retire(self, key: Key) -> None:
        """Drain a serving key without revoking it: it may be loaded again afterwards."""
        self._expect(key, ResidentState.SERVING).state = ResidentState.DRAINING

    def revoke(self, key: Key, deadline: float | None) -> ResidentState | None:
        """Refuse the key from now on and drain it; the state, None when it is not resident.

        A second revocation may bring the deadline forward and never puts it off.
        """
        self._revoked.add(key)
        entry = self._entries.get(key)
        if entry is None:
            return None
        if deadline is not None:
            entry.deadline = deadline if entry.deadline is None else min(entry.deadline, deadline)
        if entry.state is ResidentState.SERVING:
            entry.state = ResidentState.DRAINING
        return entry.state

    def deadline(self, key: Key) -> float | None:
        """When the requests of a draining key are cancelled, if ever."""
        entry = self._entries.get(key)
        return None if entry is None else entry.deadline

    def drained(self, key: Key) -> bool:
        """True when a draining key has no references any more."""
        entry = self._entries.get(key)
        return entry is not None and (entry.state, entry.references) == (ResidentState.DRAINING, 0)

    def purge(self, key: Key) -> None:
        """What goes before its weights is gone.

        Raises:
            ResidencyError: it does not drain, or has references.
        """
        if not self.drained(key):
            raise ResidencyError("expected a drained key without references")
        self._entries[key].state = ResidentState.PURGED

    def unload(self, key: Key) -> int:
        """Its weights are gone; the bytes it held."""
        entry = self._expect(key, ResidentState.PURGED)
        entry.state = ResidentState.UNLOADED
        del self._entries[key]
        return entry.size

    def residents(self) -> tuple[Resident, ...]:
        """Every entry, in the order of loading."""
        return tuple(
            Resident(key, entry.state, entry.references, entry.size, entry.deadline, entry.used)
            for key, entry in self._entries.items()
        )

    def _use(self, entry: _Entry) -> None:
        self._uses += 1
        entry.used = self._uses

    def _expect(self, key: Key, state: ResidentState) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or entry.state is not state:
            got = "not resident" if entry is None else entry.state
            raise ResidencyError(f"expected {state}, got {got}")
        return entry
