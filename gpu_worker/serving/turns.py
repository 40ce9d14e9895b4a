"""A request as a turn of its session: what its KV is keyed by, begins with, and is saved to.

The identity comes from the routing context and from what this node runs, and from nothing else. A
turn without an adapter is a turn like any other. Saving happens beside the model's thread, which
only hands the KV over; the next turn of a session waits for the save before it.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
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
from gpu_worker.serving.slot_sidecar import Session
from gpu_worker.serving.slots import Slots
from registry_service.domain.digests import Digest
from registry_service.trust.routing_context import BASE_MARKER, RoutingContext

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
    """What a job needs of its session; named like the job's fields."""

    root_key: bytes
    lane_state: LaneState | None
    on_lane_state: Callable[[LaneState], None]


class _Save(NamedTuple):
    session: Session
    identity: Identity
    state: LaneState


class Turns:
    """The turns of all sessions on a node, and the one thread that saves them."""

    def __init__(self, slots: Slots, runtime: Runtime) -> None:
        self._slots, self._runtime = slots, runtime
        self._queue: queue.Queue[_Save | None] = queue.Queue(_WAITING)
        self._saved = threading.Condition()
        self._pending: Counter[tuple[UUID, Session]] = Counter()
        self._thread = threading.Thread(target=self._loop, name="slots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Save what is handed over already, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def begin(self, context: RoutingContext) -> Turn:
        """Restore what the request's session left under the request's identity.

        Raises:
            MalformedError: a context that no identity can be built from.
        """
        identity = self._runtime.identity(context)
        session = Session(context.session_id, context.subject)
        with self._saved:
            self._saved.wait_for(
                lambda: not self._pending[identity.tenant_id, session], _SAVE_WAIT_SECONDS
            )
        return Turn(
            root_key(identity),
            self._slots.restore(session, identity),
            lambda state: self._hand_over(_Save(session, identity, state)),
        )

    def _hand_over(self, save: _Save) -> None:
        """Called on the model's thread, which never waits here."""
        with self._saved:
            self._pending[save.identity.tenant_id, save.session] += 1
        try:
            self._queue.put_nowait(save)
        except queue.Full:
            self._slots.save_skipped(save.identity)
            self._done(save)

    def _done(self, save: _Save) -> None:
        with self._saved:
            key = (save.identity.tenant_id, save.session)
            self._pending[key] -= 1
            if not self._pending[key]:
                del self._pending[key]
            self._saved.notify_all()

    def _loop(self) -> None:
        while (save := self._queue.get()) is not None:
            self._slots.save(save.session, save.identity, save.state)
            self._done(save)
