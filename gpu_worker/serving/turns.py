"""A request as a turn of its session: what its KV is keyed by, begins with, and is saved to.

The identity comes from the routing context and from what this node runs, and from nothing else. A
turn without an adapter is a turn like any other. Pages are saved and dropped beside the model's
thread, which only hands over what is to be done; the next turn of a session waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple
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
from gpu_worker.serving.ledger import Category, Ledger, LedgerFullError, Owner
from gpu_worker.serving.residency import Key
from gpu_worker.serving.slot_sidecar import Refusal, Session, SlotRefusedError
from gpu_worker.serving.slots import Restored, Slots
from registry_service.domain.digests import Digest
from registry_service.trust.routing_context import BASE_MARKER, RoutingContext

_LOG = logging.getLogger(__name__)
# Each waiting state is memory: a disk that cannot follow costs saves, not memory or answers.
_WAITING: Final = 4
_SAVE_WAIT_SECONDS: Final = 2.0
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

    ``release`` gives back the memory of ``lane_state``, once nobody has it any more.
    """

    root_key: bytes
    lane_state: LaneState | None
    release: Callable[[], object]
    on_restore_failed: Callable[[Exception], None] | None
    on_lane_state: Callable[[LaneState], None]


class _Slot(NamedTuple):
    session: Session
    identity: Identity

    @property
    def name(self) -> tuple[UUID, Session]:
        return self.identity.tenant_id, self.session

    @property
    def owner(self) -> Owner:
        """Whose memory its KV takes: its adapter's, or the tenant's on the base alone."""
        tenant, adapters = self.identity.tenant_id, self.identity.adapters
        return tenant if adapters == BASE_MARKER else Key(tenant, Digest(adapters[0][0]))


class _Work(NamedTuple):
    """What is to be done with a slot."""

    slot: _Slot
    run: Callable[[], object]


class Turns:
    """The turns of all sessions on a node, and the one thread that changes their slots."""

    def __init__(self, slots: Slots, runtime: Runtime, ledger: Ledger, lane_bytes: int) -> None:
        """``ledger`` is that of the memory that pages are read into, ``lane_bytes`` the most."""
        self._slots, self._runtime = slots, runtime
        self._ledger, self._lane_bytes = ledger, lane_bytes
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._done = threading.Condition()
        self._pending: Counter[tuple[UUID, Session]] = Counter()
        self._thread = threading.Thread(target=self._loop, name="slots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Do what is handed over already, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def begin(self, context: RoutingContext) -> Turn:
        """Restore what the request's session left under the request's identity.

        Raises:
            MalformedError: a context that no identity can be built from.
        """
        identity = self._runtime.identity(context)
        slot = _Slot(Session(context.session_id, context.subject), identity)
        with self._done:
            self._done.wait_for(lambda: not self._pending[slot.name], _SAVE_WAIT_SECONDS)
        found, release = self._restore(slot)
        return Turn(
            root_key(identity),
            None if found is None else found.state,
            release,
            None if found is None else partial(self._refuse, slot, found.page),
            partial(self._save, slot),
        )

    def _restore(self, slot: _Slot) -> tuple[Restored | None, Callable[[], object]]:
        """A slot's page, where there is memory to read it, and what gives that memory back."""
        with ExitStack() as undo:
            try:
                room = self._ledger.reserve(Category.KV, self._lane_bytes, slot.owner)
                undo.callback(room.release)
                found = self._slots.restore(*slot)
                room.commit(0 if found is None else found.state.size)
            except LedgerFullError as error:
                _LOG.warning("a session goes on cold: no memory for its page: %s", error)
                return None, _nothing
            if found is not None:
                undo.pop_all()
        return found, room.release

    def _save(self, slot: _Slot, state: LaneState) -> None:
        if self._queue.qsize() >= _WAITING:
            self._slots.save_skipped(slot.identity)
        else:
            self._hand_over(_Work(slot, lambda: self._slots.save(*slot, state)))

    def _refuse(self, slot: _Slot, page: int, error: Exception) -> None:
        refused = SlotRefusedError(Refusal.LANE, "a state that a lane takes", type(error).__name__)
        self._hand_over(_Work(slot, lambda: self._slots.refuse(*slot, page, refused)))

    def _hand_over(self, work: _Work) -> None:
        """Called on the model's thread, which never waits here."""
        with self._done:
            self._pending[work.slot.name] += 1
        self._queue.put(work)

    def _loop(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()
            with self._done:
                self._pending[work.slot.name] -= 1
                if not self._pending[work.slot.name]:
                    del self._pending[work.slot.name]
                self._done.notify_all()


def _nothing() -> None:
    """Nothing is held."""
