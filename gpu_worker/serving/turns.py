"""A request as a turn of its session: what its KV is keyed by, begins with, and is saved to.

The identity comes from the routing context and from what this node runs, and from nothing else. A
turn without an adapter is a turn like any other. Pages are saved and dropped beside the model's
thread, which only hands over what is to be done; the next turn of a session waits for it.

KV outside of lanes is in the ledger for as long as it is there. Where there is no memory for it, a
turn begins cold, or is not saved; a turn never fails for it. What waits to be saved of an adapter
is dropped when it is revoked.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import UUID

import torch
import transformers

from gpu_worker.serving.identity import (
    ENGINE_VERSION,
    FORMAT_VERSION,
    Adapters,
    Identity,
    Layout,
    root_key,
)
from gpu_worker.serving.lanes import LaneState
from gpu_worker.serving.ledger import Ledger, LedgerFullError, Owner
from gpu_worker.serving.residency import Key
from gpu_worker.serving.save_queue import SaveQueue, Slot, Work
from gpu_worker.serving.slot_memory import Held, Room, SlotMemory
from gpu_worker.serving.slot_restore import Reader
from gpu_worker.serving.slot_sidecar import Refusal, Session, SlotRefusedError
from gpu_worker.serving.slot_state import token_bytes
from gpu_worker.serving.slots import Restored, Slots
from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.trust.routing_context import BASE_MARKER, RoutingContext

_LOG = logging.getLogger(__name__)
# A state as one file's bytes, and sealed.
_SAVING_AT_ONCE: Final = 2
_SCALE: Final = 1.0


@dataclass(frozen=True, slots=True)
class Runtime:
    """The parts of an identity that every request on a node shares."""

    base_digest: Digest
    dtype: str
    layout: Layout
    library_versions: tuple[tuple[str, str], ...]

    def identity(self, context: RoutingContext) -> Identity:
        """What a request's KV is made under.

        Raises:
            MalformedError: a part that is missing or out of its form.
        """
        digest = context.adapter_digest
        adapters: Adapters = BASE_MARKER if digest == BASE_MARKER else ((digest, _SCALE),)
        return Identity(
            format_version=FORMAT_VERSION,
            tenant_id=context.tenant_id,
            base_digest=self.base_digest,
            adapters=adapters,
            tokenizer_digest=context.tokenizer_digest,
            chat_template_digest=context.chat_template_digest,
            dtype=self.dtype,
            layout=self.layout,
            engine_version=ENGINE_VERSION,
            library_versions=self.library_versions,
        )


def library_versions(device: str) -> tuple[tuple[str, str], ...]:
    """The versions of what computes KV on a kind of device."""
    versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    if device != "cpu":
        versions[device] = str(torch.version.cuda)
    return tuple(sorted(versions.items()))


@dataclass(frozen=True, slots=True)
class Turn:
    """What a job needs of its session; named like the job's fields.

    ``lane_state`` is in the ledger until ``on_lane_filled`` was called once for each sequence that
    the turn was begun for, since nobody needs it any more, or until ``release``, which is for the
    turn's end, however it ends. ``wants_lane_state`` is asked with a number of tokens before their
    KV is copied; True holds the memory for it until ``on_lane_state`` or ``release``.
    """

    root_key: bytes
    lane_state: LaneState | None
    release: Callable[[], None]
    on_lane_filled: Callable[[], None]
    on_restore_failed: Callable[[Exception], None] | None
    wants_lane_state: Callable[[int], bool]
    on_lane_state: Callable[[LaneState], None]


class Turns:
    """The turns of all sessions on a node, and the one thread that changes their slots."""

    def __init__(self, slots: Slots, runtime: Runtime, ledger: Ledger, lane_bytes: int) -> None:
        """``ledger`` is that of the memory that pages are read into; a lane has ``lane_bytes``."""
        self._slots, self._runtime = slots, runtime
        self._memory = SlotMemory(ledger)
        self._token_bytes = token_bytes(runtime.layout, runtime.dtype)
        self._lane_tokens = lane_bytes // self._token_bytes
        # All below goes by its lock.
        self._done = threading.Condition()
        self._queue = SaveQueue()
        self._pending: Counter[tuple[UUID, Session]] = Counter()
        self._running: Owner | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="slots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Do what is handed over already, and end the thread."""
        with self._done:
            self._closing = True
            self._done.notify_all()
        self._thread.join()

    def keys(self) -> set[Key]:
        """The adapters that there are pages of, or will be."""
        with self._done:
            found = self._queue.keys()
            if isinstance(self._running, Key):
                found.add(self._running)
        # In this order: what is saved meanwhile is in both, and not in none.
        return found | self._slots.keys()

    def purge(self, key: Key) -> int:
        """Drop the states of an adapter that wait, keep none from now on, and wait for the rest.

        Returns 0: none of it is a block.
        """
        with self._done:
            dropped = [(work.slot, work.room) for work in self._queue.remove(key)]
        # The states are gone by now, so that their room may go as well.
        for slot, room in dropped:
            self._dropped(slot, room)
            self._ended(slot)
        with self._done:
            self._done.wait_for(lambda: self._running != key)
        return 0

    def remove(self, digest: Digest) -> int:
        """Remove every page of an adapter, after its purge; how many.

        Raises:
            UnavailableError: some files could not be removed; asking again tries again.
        """
        return self._slots.remove(digest)

    def begin(self, context: RoutingContext, sequences: int = 1) -> Turn:
        """Restore what the request's session left under the request's identity.

        So many sequences begin with it.

        Raises:
            MalformedError: a context that no identity can be built from.
        """
        identity = self._runtime.identity(context)
        slot = Slot(Session(context.session_id, context.subject), identity)
        with self._done:
            self._done.wait_for(lambda: not self._pending[slot.name], limits.SLOT_SAVE_WAIT_SECONDS)
        reading, saving = Held(sequences), Held()
        found = self._restore(slot, reading)

        def release() -> None:
            reading.release()
            saving.release()

        return Turn(
            root_key=root_key(identity),
            lane_state=None if found is None else found.state,
            release=release,
            on_lane_filled=reading.less,
            on_restore_failed=None if found is None else partial(self._refuse, slot, found.page),
            wants_lane_state=partial(self._wanted, slot, saving),
            on_lane_state=partial(self._state, slot, saving),
        )

    def _restore(self, slot: Slot, held: Held) -> Restored | None:
        """A slot's page, where there is memory to read it."""

        def reserve(size: int) -> None:
            held.room = self._memory.reserve(size, slot.owner)

        found = None
        try:
            found = self._slots.restore(*slot, Reader(self._lane_tokens, reserve))
            if found is not None and held.room is not None:
                held.room.commit(found.state.size)
        except LedgerFullError as error:
            _LOG.warning("a session goes on cold: no memory for its page: %s", error)
        finally:
            if found is None:
                held.release()
        return found

    def _wanted(self, slot: Slot, held: Held, tokens: int) -> bool:
        """Whether a state of so many tokens would be saved; True holds memory for it."""
        held.release()
        size = tokens * self._token_bytes
        with self._done:
            full = self._queue.full(slot)
        if full:
            self._slots.save_skipped(slot.identity, full)
            return False
        try:
            held.room = self._memory.reserve(size, slot.owner)
        except LedgerFullError as error:
            self._slots.save_skipped(slot.identity, f"no memory: {error}")
            return False
        held.room.commit(size)
        return True

    def _state(self, slot: Slot, held: Held, state: LaneState) -> None:
        if held.room is None and not self._wanted(slot, held, len(state.tokens)):
            return
        room, held.room = held.room, None
        if not self._hand_over(Work(slot, partial(self._save, slot, state), room)):
            self._dropped(slot, room)

    def _save(self, slot: Slot, state: LaneState) -> None:
        try:
            room = self._memory.reserve(_SAVING_AT_ONCE * state.size, slot.owner)
        except LedgerFullError as error:
            self._slots.save_skipped(slot.identity, f"no memory: {error}")
            return
        try:
            self._slots.save(*slot, state)
        finally:
            room.release()

    def _refuse(self, slot: Slot, page: int, error: Exception) -> None:
        refused = SlotRefusedError(Refusal.LANE, "a state that a lane takes", type(error).__name__)
        self._hand_over(Work(slot, lambda: self._slots.refuse(*slot, page, refused)))

    def _hand_over(self, work: Work) -> bool:
        """Called on the model's thread, which never waits here; False when it was revoked."""
        with self._done:
            taken = self._queue.put(work)
            if taken:
                self._pending[work.slot.name] += 1
                self._done.notify_all()
            return taken

    def _loop(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        """Do one thing, and keep nothing of it; False at the end."""
        work = self._take()
        if work is None:
            return False
        slot, room = work.slot, work.room
        try:
            work.run()
        except Exception:  # noqa: BLE001 - one slot's fault is not the others'
            _LOG.exception("what was to be done with a slot ended with a fault")
        del work
        if room is not None:
            room.release()
        self._ended(slot)
        return True

    def _take(self) -> Work | None:
        with self._done:
            self._running = None
            self._done.notify_all()
            self._done.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            work = self._queue.take()
            self._running = work.slot.owner
            return work

    def _dropped(self, slot: Slot, room: Room | None) -> None:
        """Something of a revoked adapter is not done; a state has room, and is not saved."""
        if room is not None:
            room.release()
            self._slots.save_skipped(slot.identity, Refusal.REVOKED)

    def _ended(self, slot: Slot) -> None:
        """Something was done with a slot, or will not be; what it held is gone."""
        with self._done:
            self._pending -= Counter({slot.name: 1})
            self._done.notify_all()
