"""The engine: one thread owns the model; schedule → run → sample → post-process.

Requests join and leave between steps, and so does everything else that touches the model
(``attach``, ``detach``, ``purge``): it runs on the model's thread. Tokens in, tokens out: text,
tenants and digests are not known here.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from transformers import PreTrainedModel

from gpu_worker.serving.adapter import Adapter
from gpu_worker.serving.prefix import PrefixCache
from gpu_worker.serving.requests import Requests
from gpu_worker.serving.runner import Runner
from gpu_worker.serving.selfcheck import (
    NeighbourError,
    base_check,
    library_logits,
    neighbour_check,
)
from gpu_worker.serving.sequence import (
    CANCELLED,
    EngineBusyError,
    EngineError,
    Generation,
    Holder,
    Job,
    TooLongError,
)
from gpu_worker.serving.workspace import Workspace

_LOG = logging.getLogger(__name__)
_CHECK_TOKENS: Final = 40
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that an engine holds beside its base.

    ``bank`` and ``lanes`` are fixed; an adapter takes at most ``row`` of the bank, and at most
    ``preparing`` while it is attached; ``blocks`` are those of shared prefixes now.
    """

    bank: int
    row: int
    preparing: int
    lanes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to do on the model's thread."""

    run: Callable[[], None]


class Engine:
    """Generates on one model, for many adapters."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_tokens: frozenset[int],
        workspace: Workspace,
    ) -> None:
        """Take the workspace. The model is the engine's from now on.

        Raises:
            EngineError: the engine cannot run this base, with the reason.
        """
        self.workspace = workspace
        self._library = library_logits(model, _CHECK_TOKENS)
        self._runner = Runner(model, self.workspace)
        self._prefix = PrefixCache(
            tenant_bytes=self.workspace.tenant_bytes, total_bytes=self.workspace.prefix_bytes
        )
        self._requests = Requests(
            self._runner, self._prefix, self.workspace, stop_tokens, self._adapter_row, self._closed
        )
        self._rows: dict[Hashable, int] = {}
        self._leaving: dict[Hashable, tuple[int, int]] = {}
        self._inbox: queue.SimpleQueue[_Call | tuple[Job, Generation] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[Generation, Job] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="model", daemon=True)

    def start(self) -> None:
        """Check that neighbours change nothing, then start the model's thread.

        Where requests of several adapters round each other differently, each step runs those of
        one.

        Raises:
            EngineError: the check failed; nothing is served.
        """
        base_check(self._runner, self._library)
        try:
            difference = neighbour_check(self._runner, self.workspace)
        except NeighbourError as error:
            if self.workspace.grouped:
                raise
            _LOG.warning("%s; requests run in groups of one adapter", error)
            self.workspace = replace(self.workspace, grouped=True)
            difference = neighbour_check(self._runner, self.workspace)
        self._requests.grouped = self.workspace.grouped
        _LOG.info("a row alone against a crowded one: largest difference %.2g", difference)
        self._thread.start()

    def stop(self) -> None:
        """Cancel what runs and end the thread."""
        with self._lock:
            self._stopping = True
            for generation in self._open:
                generation.cancel()
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """True while the model's thread runs and takes jobs."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, job: Job) -> Generation:
        """Queue a job. When this raises, ``on_end`` is not called.

        Raises:
            TooLongError: prompt and answer do not fit a lane. EngineBusyError: too many are there.
            EngineError: no prompt, a token that the base does not have, a lane state of another
                layout, or the engine is stopped.
        """
        if not job.prompt or job.max_tokens < 1:
            raise EngineError("expected a prompt and at least one new token")
        if not 0 <= min(job.prompt) <= max(job.prompt) < self._runner.vocabulary:
            # On CUDA it would take the whole device down.
            raise EngineError(f"expected tokens below {self._runner.vocabulary}")
        if len(job.prompt) + job.max_tokens > self.workspace.lane_tokens:
            raise TooLongError(
                f"expected at most {self.workspace.lane_tokens} tokens of prompt and answer, "
                f"got {len(job.prompt)} and {job.max_tokens}"
            )
        if job.lane_state is not None:
            self._runner.lanes.state_check(job.lane_state)
        generation = Generation()
        with self._lock:
            if not self.alive:
                raise EngineError("the engine is stopped")
            if len(self._open) >= self.workspace.outstanding:
                raise EngineBusyError("too many requests at once")
            # Without its state, which is the sequence's alone until it is in a lane.
            self._open[generation] = replace(job, lane_state=None)
            self._inbox.put((job, generation))
        return generation

    def cancel(self, name: Hashable) -> int:
        """Cancel all jobs of an adapter; how many."""
        with self._lock:
            found = [g for g, job in self._open.items() if job.adapter == name]
        for generation in found:
            generation.cancel()
        return len(found)

    def attach(self, name: Hashable, adapter: Adapter) -> tuple[int, int]:
        """Make an adapter usable: modules that carry it now, and the bytes of its bank row there.

        Raises:
            LoraError: it does not fit base or bank. EngineError: the name is taken.
        """
        prepared = self._runner.bank.prepare(adapter)

        def run() -> tuple[int, int]:
            if name in self._rows or name in self._leaving:
                raise EngineError(f"{name}: attached already")
            bank = self._runner.bank
            row = self._rows[name] = bank.attach(prepared)
            return bank.applied(row), bank.row_bytes(row)

        return self._call(run)

    def detach(self, name: Hashable) -> int:
        """Drop an adapter's blocks and zero its bank row; the bytes that the row took.

        Raises:
            EngineError: a job uses it still, or it is not attached.
        """

        def run() -> int:
            with self._lock:
                if any(job.adapter == name for job in self._open.values()):
                    raise EngineError(f"{name}: still in use")
            if name not in self._rows and name not in self._leaving:
                raise EngineError(f"{name}: not attached")
            bank = self._runner.bank
            if name in self._rows:
                # From here on nothing runs on it, also when zeroing fails half way and has to be
                # asked for again.
                row = self._rows.pop(name)
                self._leaving[name] = (row, bank.row_bytes(row))
            row, size = self._leaving[name]
            self._prefix.purge(name)
            bank.detach(row)
            del self._leaving[name]
            return size

        return self._call(run)

    def purge(self, name: Hashable) -> int:
        """Drop every block of an adapter; how many. What runs now publishes no more."""
        return self._call(lambda: self._requests.purge(name))

    def memory(self) -> Memory:
        """Bytes held beside the base. On any thread."""
        bank, lanes = self._runner.bank, self._runner.lanes
        return Memory(bank.size, bank.row_size, bank.preparing_size, lanes.size, self._prefix.size)

    def kv(self) -> Mapping[Holder | None, int]:
        """Bytes of KV by whose it is, lanes and blocks; None has the free lanes. On any thread.

        They are counted from lanes and blocks, each at a moment of its own.
        """
        found = Counter(self._runner.lanes.held())
        found.update(self._prefix.held())
        return found

    @property
    def layers(self) -> tuple[tuple[int, int, int], ...]:
        """Of each attention layer its heads, and the sizes of a key and of a value."""
        lanes = self._runner.lanes
        pairs = zip(lanes.keys, lanes.values, strict=True)
        return tuple((keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in pairs)

    @property
    def references(self) -> int:
        """References to bank rows: zero when nothing runs."""
        return self._runner.bank.references

    def _adapter_row(self, name: Hashable | None) -> int:
        if name is None:
            return 0
        if name not in self._rows:
            raise EngineError(f"{name}: not attached")
        return self._rows[name]

    def _closed(self, generation: Generation) -> None:
        with self._lock:
            self._open.pop(generation, None)

    def _call(self, function: Callable[[], _T]) -> _T:
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - belongs to the thread that asked
                future.set_exception(error)

        with self._lock:
            if not self.alive:
                raise EngineError("the engine is stopped")
            self._inbox.put(_Call(run))
        return future.result()

    def _loop(self) -> None:
        try:
            while not (self._stopping and not self._open and self._inbox.empty()):
                self._receive()
                self._requests.step()
        except BaseException:
            # Said and raised: the finally below ends every request, whatever it was.
            _LOG.exception("the model's thread died")
            raise
        finally:
            self._abandon()

    def _receive(self) -> None:
        block = self._requests.idle and not self._stopping
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if isinstance(message, _Call):
                message.run()
            elif message is not None:
                self._requests.add(*message)

    def _abandon(self) -> None:
        with self._lock:
            self._stopping = True
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, _Call):
                message.run()
            elif message is not None:
                self._requests.add(*message)
        self._requests.abandon()
        with self._lock:
            left = tuple(self._open.items())
        for generation, job in left:
            # Whatever was lost on its way in.
            self._requests.end(job, generation, CANCELLED, EngineError("the engine stopped"))
