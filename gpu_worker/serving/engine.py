"""The engine: one thread owns the model, and steps its running sequences round robin.

A step is one token of one sequence, or one chunk of its prompt, so that a long request does not
hold up the next. Each forward states its adapter; a forward that fails ends its own sequence and
leaves nothing behind. Everything else that touches the model runs on the same thread, between
steps (``attach``, ``detach``). Tokens in, tokens out: text, tenants and digests are not known here.
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from gpu_worker.serving.lora import Adapter, LoraModel
from gpu_worker.serving.sequence import (
    CANCELLED,
    LENGTH,
    STOP,
    EngineBusyError,
    EngineError,
    Generation,
    Job,
    Sequence,
)

_LOG = logging.getLogger(__name__)
_PREFILL_TOKENS: Final = 256
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to do on the model's thread."""

    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Arrival:
    job: Job
    generation: Generation


class Engine:
    """Generates greedily on one model, for many adapters."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_tokens: frozenset[int],
        running: int = 16,
        outstanding: int = 128,
    ) -> None:
        if "cache" not in inspect.signature(model.forward).parameters:
            raise EngineError(f"{type(model).__name__}: a base without a KV cache is not served")
        self._lora = LoraModel(model)
        self._model = model
        self._stop_tokens = stop_tokens
        self._limits = (running, outstanding)
        self._adapters: dict[Hashable, Adapter] = {}
        self._inbox: queue.SimpleQueue[_Call | _Arrival | None] = queue.SimpleQueue()
        self._waiting: deque[_Arrival] = deque()
        self._running: list[Sequence] = []
        self._lock = threading.Lock()
        self._open: dict[Generation, Job] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="model", daemon=True)

    def start(self) -> None:
        """Start the model's thread."""
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
            EngineBusyError: too many are there. EngineError: the engine is stopped.
        """
        generation = Generation()
        with self._lock:
            if not self.alive:
                raise EngineError("the engine is stopped")
            if len(self._open) >= self._limits[1]:
                raise EngineBusyError("too many requests at once")
            self._open[generation] = job
            self._inbox.put(_Arrival(job, generation))
        return generation

    def cancel(self, adapter: Hashable) -> int:
        """Cancel all jobs of an adapter; how many."""
        with self._lock:
            found = [g for g, job in self._open.items() if job.adapter == adapter]
        for generation in found:
            generation.cancel()
        return len(found)

    def attach(self, name: Hashable, adapter: Adapter) -> tuple[int, int]:
        """Make an adapter usable: modules that carry it now, and its resident bytes.

        Raises:
            LoraError: it does not fit the base. EngineError: the name is taken.
        """
        prepared = self._lora.prepare(adapter)
        return self._call(lambda: self._attach(name, prepared))

    def detach(self, name: Hashable) -> int:
        """Let an adapter's tensors go; the bytes they took.

        Raises:
            EngineError: a job uses it still, or it is not attached.
        """
        return self._call(lambda: self._detach(name))

    def _attach(self, name: Hashable, adapter: Adapter) -> tuple[int, int]:
        if name in self._adapters:
            raise EngineError(f"{name}: attached already")
        applied = self._lora.wrap(adapter)
        self._adapters[name] = adapter
        return applied, adapter.size

    def _detach(self, name: Hashable) -> int:
        with self._lock:
            if any(job.adapter == name for job in self._open.values()):
                raise EngineError(f"{name}: still in use")
        if name not in self._adapters:
            raise EngineError(f"{name}: not attached")
        return self._adapters.pop(name).size

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
                self._admit()
                for sequence in tuple(self._running):
                    self._step(sequence)
        except BaseException:
            _LOG.exception("the model's thread died")
            raise
        finally:
            self._abandon()

    def _receive(self) -> None:
        block = not (self._running or self._waiting or self._stopping)
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if isinstance(message, _Call):
                message.run()
            elif isinstance(message, _Arrival):
                self._waiting.append(message)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._limits[0]:
            arrival = self._waiting.popleft()
            job, generation = arrival.job, arrival.generation
            try:
                job.admit()
                adapter = None if job.adapter is None else self._adapters[job.adapter]
            except KeyError:
                self._end(job, generation, "", EngineError(f"{job.adapter}: not attached"))
                continue
            except Exception as error:  # noqa: BLE001 - the caller's own check ends its job
                self._end(job, generation, "", error)
                continue
            cache = DynamicCache(config=self._model.config)
            self._running.append(Sequence(job, generation, adapter, cache, list(job.prompt)))

    def _step(self, sequence: Sequence) -> None:
        if sequence.generation.cancelled:
            self._leave(sequence, CANCELLED)
            return
        try:
            token = self._forward(sequence)
        except Exception as error:  # noqa: BLE001 - one request's fault is not the others'
            _LOG.exception("a forward failed; its request ends")
            failure = EngineError("the forward failed")
            failure.__cause__ = error
            self._leave(sequence, "", failure)
            return
        if token is None:
            return
        if token in self._stop_tokens:
            self._leave(sequence, STOP)
            return
        sequence.pending = [token]
        sequence.generation.emit(token)
        if sequence.generation.produced >= sequence.job.max_tokens:
            self._leave(sequence, LENGTH)

    def _forward(self, sequence: Sequence) -> int | None:
        """Run one chunk; the next token, or None while there is more of the prompt."""
        chunk = sequence.pending[:_PREFILL_TOKENS]
        tokens = torch.tensor([chunk], device=self._model.device)
        with torch.inference_mode(), self._lora.selection.of(sequence.adapter):
            output: Any = self._model(
                input_ids=tokens, cache=sequence.cache, use_cache=True, logits_to_keep=1
            )
        sequence.pending = sequence.pending[_PREFILL_TOKENS:]
        if sequence.pending:
            return None
        logits: Tensor = output.logits[0, -1]
        if not bool(torch.isfinite(logits).all()):
            raise EngineError("logits that are not finite")
        return int(logits.argmax())

    def _leave(self, sequence: Sequence, reason: str, error: Exception | None = None) -> None:
        self._running.remove(sequence)
        self._end(sequence.job, sequence.generation, reason, error)

    def _end(
        self, job: Job, generation: Generation, reason: str, error: Exception | None = None
    ) -> None:
        with self._lock:
            self._open.pop(generation, None)
        try:
            job.on_end()
        except Exception:  # noqa: BLE001 - the model's thread goes on
            _LOG.exception("on_end failed")
        generation.end(reason, error)

    def _abandon(self) -> None:
        with self._lock:
            self._stopping = True
            left = list(self._open.items())
        for generation, job in left:
            self._end(job, generation, CANCELLED, EngineError("the engine stopped"))
        self._running.clear()
        self._waiting.clear()
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, _Call):
                message.run()
