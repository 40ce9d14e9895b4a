"""What the tests of slots stand on: identities, states of lanes, and slots in a folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_worker.serving import slot_files
from gpu_worker.serving.identity import Adapters, Identity
from gpu_worker.serving.lanes import LaneState
from gpu_worker.serving.slot_events import SlotEvent, SlotEventKind
from gpu_worker.serving.slot_index import Budget
from gpu_worker.serving.slot_key import NodeKey
from gpu_worker.serving.slot_sidecar import Session
from gpu_worker.serving.slots import Slots
from registry_service.domain.digests import Digest
from registry_service.trust.routing_context import BASE_MARKER
from tests.identities import IDENTITY

SESSION = Session("s-1", "app")
TOKENS = tuple(range(1, 41))
# One more than the file operations of a save that replaces a page.
MOST = 15
_OPERATIONS = ("open", "fsync", "rename", "unlink")


def under(digest: Digest) -> Identity:
    """The identity of a turn under an adapter, or under the base alone."""
    adapters: Adapters = BASE_MARKER if digest == BASE_MARKER else ((digest, 1.0),)
    return replace(IDENTITY, adapters=adapters)


def state_make(tokens: Iterable[int], seed: int = 0, identity: Identity = IDENTITY) -> LaneState:
    """Random KV for these tokens."""
    generator = torch.Generator().manual_seed(seed)
    known = tuple(tokens)

    def random(heads: int, size: int) -> Tensor:
        drawn = torch.randn(heads, len(known), size, generator=generator)
        return drawn.to(getattr(torch, identity.dtype))

    layers = identity.layout.layers
    return LaneState(
        tokens=known,
        keys=tuple(random(heads, key_size) for heads, key_size, _ in layers),
        values=tuple(random(heads, value_size) for heads, _, value_size in layers),
    )


def state_hash(state: LaneState) -> str:
    """A digest of a state's bytes and tokens."""
    found = hashlib.sha256(repr(state.tokens).encode())
    for tensor in (*state.keys, *state.values):
        found.update(repr((tensor.dtype, tensor.shape)).encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@dataclass
class World:
    """Slots in a folder, and every event that they told."""

    folder: Path
    secret: bytes = b"k" * 32
    budget: Budget | None = None
    events: list[SlotEvent] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)

    def open(self, **changes: Any) -> Slots:
        """The slots, as a process finds them when it starts."""
        slots = Slots(
            self.folder,
            changes.get("key") or NodeKey(self.secret),
            budget=self.budget,
            on_event=self.events.append,
        )
        self.stack.callback(slots.close)
        return slots

    def restore(
        self, slots: Slots, session: Session = SESSION, identity: Identity = IDENTITY
    ) -> str:
        """The hash of what is restored; none where nothing is."""
        found = slots.restore(session, identity)
        return "" if found is None else state_hash(found.state)

    def refusals(self) -> list[str]:
        return [e.reason for e in self.events if e.kind is SlotEventKind.REFUSED]

    def kinds(self) -> list[SlotEventKind]:
        return [event.kind for event in self.events]


def names(folder: Path) -> list[str]:
    """What lies in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def saved(world: World, identity: Identity = IDENTITY, session: Session = SESSION) -> str:
    """Save a page; the hash of its state."""
    state = state_make(TOKENS, identity=identity)
    slots = world.open()
    assert slots.save(session, identity, state) is not None
    slots.close()
    world.stack.pop_all()
    return state_hash(state)


class Disk:
    """Counts file operations, and fails at one of them: once, or from there on like a crash."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: type[BaseException]):
        self.left, self.error, self.failed = at, error, False
        for name in _OPERATIONS:
            self._wrap(monkeypatch, name, getattr(os, name))

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str, real: Any) -> None:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            once = issubclass(self.error, Exception)
            if self.left == 0 or (self.left < 0 and not once):
                self.failed = True
                raise self.error("no space left")
            return real(*arguments, **options)

        monkeypatch.setattr(slot_files.os, name, wrapped)


class Crash(BaseException):
    """The process is gone: nothing after this reaches the disk."""
