"""Sessions' turns over slots, without an engine, whose saves can be held up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from gpu_worker.serving.lanes import LaneState
from gpu_worker.serving.ledger import Ledger
from gpu_worker.serving.slot_events import SlotEventKind
from gpu_worker.serving.slot_key import NodeKey
from gpu_worker.serving.slots import Slots
from gpu_worker.serving.turns import Runtime, Turns
from tests.identities import IDENTITY, A
from tests.integration.slot_world import state_make
from tests.integration.turn_world import context_make

OTHER_TENANT = UUID(int=2001)
STATE = state_make(range(1, 401))
SIZE = STATE.size


class Watched(NodeKey):
    """A node key that notes what the ledger has while it works, and waits where it is told to."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(b"k" * 32)
        self.ledger = ledger
        self.go, self.sealing = threading.Event(), threading.Event()
        self.go.set()
        self.sealed: list[int] = []
        self.opened: list[int] = []

    def seal(self, plain: bytes, associated: bytes) -> bytearray:
        self.sealing.set()
        self.go.wait()
        if associated.startswith(b"{"):
            self.sealed.append(claimed(self.ledger))
        return super().seal(plain, associated)

    def open(self, sealed: bytes | bytearray, associated: bytes) -> bytes:
        self.opened.append(claimed(self.ledger))
        return super().open(sealed, associated)


def claimed(ledger: Ledger) -> int:
    return sum(holding.size for holding in ledger.holdings())


class SessionWorld:
    """Turns without an engine, on a ledger of ``budget`` bytes."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.events: list[Any] = []
        self.ledger = Ledger(budget)
        self.key = Watched(self.ledger)
        self.slots = Slots(folder, self.key, on_event=self.events.append)
        runtime = Runtime(IDENTITY.base_digest, IDENTITY.dtype, IDENTITY.layout, (("torch", "2"),))
        self.turns = Turns(self.slots, runtime, self.ledger, 2**20)

    @classmethod
    @contextmanager
    def stuck(cls, folder: Path) -> Iterator[SessionWorld]:
        """One whose saves wait while their pages are sealed, until the end or ``key.go``."""
        world = cls(folder, 2**30)
        world.key.go.clear()
        try:
            yield world
        finally:
            world.close()

    def close(self) -> None:
        self.key.go.set()
        self.turns.close()
        self.slots.close()

    def save(self, session: str, state: LaneState = STATE) -> None:
        """End a turn, and wait for its save."""
        self.turns.begin(context_make(A, session)).on_lane_state(state)
        self.turns.begin(context_make(A, session)).release()

    def skipped(self) -> list[str]:
        return [e.reason for e in self.events if e.kind is SlotEventKind.NOT_SAVED]
