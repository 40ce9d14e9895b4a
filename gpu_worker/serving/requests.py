"""The requests in the engine: they join, run step by step, and leave, each on its own.

A lane, a reference to a bank row and the caller's ``on_end`` are one lease: whichever way a request
goes out, ``_leave`` gives them back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from gpu_worker.serving.lanes import BlockKV
from gpu_worker.serving.prefix import Block, PrefixCache, block_keys
from gpu_worker.serving.runner import Runner
from gpu_worker.serving.sampler import Choice, Sampler
from gpu_worker.serving.scheduler import Scheduler
from gpu_worker.serving.sequence import (
    CANCELLED,
    LENGTH,
    STOP,
    EngineError,
    Generation,
    Job,
    Output,
    Sequence,
)
from gpu_worker.serving.step import Step
from gpu_worker.serving.stopping import StopText
from gpu_worker.serving.workspace import BLOCK_TOKENS, Workspace

_LOG = logging.getLogger(__name__)


class Requests:
    """Waiting and running requests. Everything here runs on the model's thread."""

    def __init__(
        self,
        runner: Runner,
        prefix: PrefixCache,
        workspace: Workspace,
        stop_tokens: frozenset[int],
        adapter_row: Callable[[Hashable | None], int],
        closed: Callable[[Generation], None],
    ) -> None:
        """``adapter_row`` finds an adapter's bank row; ``closed`` hears of every end."""
        self._runner = runner
        self._prefix = prefix
        self._stop_tokens = stop_tokens
        self._adapter_row = adapter_row
        self._closed = closed
        self._scheduler = Scheduler(workspace.step_tokens, grouped=workspace.grouped)

    @property
    def idle(self) -> bool:
        """True when nothing waits or runs."""
        return not (self._scheduler.waiting or self._scheduler.running)

    def add(self, job: Job, generation: Generation) -> None:
        """A request arrived."""
        self._scheduler.waiting.append(Sequence(job, generation, Sampler(job.sampling)))

    def step(self) -> None:
        """Let the cancelled leave and the next ones join, then run one step."""
        for sequence in (*self._scheduler.waiting, *self._scheduler.running):
            if sequence.generation.cancelled:
                self._leave(sequence, CANCELLED)
        while self._scheduler.waiting and self._runner.lanes.free:
            self._join(self._scheduler.waiting[0])
        step = self._scheduler.plan()
        if step is not None:
            self._run(step)

    def purge(self, adapter: Hashable) -> int:
        """Drop an adapter's blocks, and let its running requests publish no more; how many."""
        for sequence in self._scheduler.running:
            if sequence.job.adapter == adapter:
                sequence.shares = False
        return self._prefix.purge(adapter)

    def abandon(self) -> None:
        """End everything."""
        for sequence in (*self._scheduler.waiting, *self._scheduler.running):
            self._leave(sequence, CANCELLED, EngineError("the engine stopped"))

    def _join(self, sequence: Sequence) -> None:
        """Give the first waiting request its lease, or end it."""
        job = sequence.job
        try:
            job.admit()
            if job.sampling.stop and job.sampling.decoder is not None:
                sequence.stop_text = StopText(job.sampling.stop, job.sampling.decoder)
            row = self._adapter_row(job.adapter)
        except Exception as error:  # noqa: BLE001 - one request's fault is not the others'
            self._leave(sequence, "", error)
            return
        self._scheduler.waiting.popleft()
        self._scheduler.running.append(sequence)
        sequence.lane, sequence.bank_row = self._runner.lanes.take(), row
        self._runner.bank.acquire(row)
        try:
            self._reuse(sequence)
        except Exception as error:  # noqa: BLE001 - one request's fault is not the others'
            self._fail(sequence, error)

    def _reuse(self, sequence: Sequence) -> None:
        """Fill the lane with what is known of the prompt. Its last token is always run."""
        job, lanes = sequence.job, self._runner.lanes
        state = job.lane_state
        if state is not None and (common := _common(state.tokens, job.prompt[:-1])):
            lanes.restore(sequence.lane, state, common)
            sequence.cached = common
        elif job.root_key is not None:
            # Only blocks that prefill made whole are published: decode rounds differently.
            sequence.shares = True
            keys = list(block_keys(job.root_key, job.prompt[:-1]))
            found = self._prefix.find(keys, job.adapter)
            for number, block in enumerate(found):
                lanes.block_restore(sequence.lane, number, block.kv)
            sequence.blocks = keys[: len(found)]
            sequence.cached = len(found) * BLOCK_TOKENS
        sequence.generation.reused_tokens = sequence.cached

    def _run(self, step: Step) -> None:
        try:
            logits = self._runner.forward(step)
            finite = torch.isfinite(logits).all(-1).tolist()
        except Exception as error:  # noqa: BLE001 - one request's fault is not the others'
            failure = error
        else:
            self._ran(step, logits, finite)
            return
        parts = step.split()
        if len(parts) == 1:
            self._fail(step.sequences[0], failure)
            return
        # Whose fault it was is found out by running each alone, which changes none of them.
        for part in parts:
            self._run(part)

    def _ran(self, step: Step, logits: Tensor, finite: list[bool]) -> None:
        for segment in step.segments:
            segment.sequence.cached = segment.end
        for segment, row, good in zip(step.emitting, logits, finite, strict=True):
            self._advance(segment.sequence, row, finite=good)

    def _advance(self, sequence: Sequence, logits: Tensor, *, finite: bool) -> None:
        """Take one row's next token."""
        try:
            if not finite:
                raise EngineError("logits that are not finite")
            if not sequence.produced:
                self._publish(sequence)
            choice = sequence.sampler.choose(logits)
            if choice.token in self._stop_tokens:
                self._finish(sequence, STOP)
            else:
                self._emit(sequence, choice)
        except Exception as error:  # noqa: BLE001 - one request's fault is not the others'
            self._fail(sequence, error)

    def _emit(self, sequence: Sequence, choice: Choice) -> None:
        text, stopped = "", False
        if sequence.stop_text is not None:
            text, stopped = sequence.stop_text.push(choice.token)
        sequence.produced.append(choice.token)
        sequence.generation.emit(Output(choice.token, text, choice.logprob, choice.top))
        if stopped:
            sequence.stop_text = None
            self._finish(sequence, STOP)
        elif len(sequence.produced) >= sequence.job.max_tokens:
            self._finish(sequence, LENGTH)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """End a request that ended by itself."""
        if sequence.stop_text is not None:
            sequence.generation.rest, stopped = sequence.stop_text.finish()
            reason = STOP if stopped else reason
        if sequence.job.on_lane_state is not None:
            tokens = (*sequence.job.prompt, *sequence.produced)[: sequence.cached]
            sequence.job.on_lane_state(self._runner.lanes.state(sequence.lane, tokens))
        self._leave(sequence, reason)

    def _publish(self, sequence: Sequence) -> None:
        """Share a prompt's whole blocks, once all of it has run and its logits are finite."""
        job = sequence.job
        if not sequence.shares or job.root_key is None:
            return
        keys = list(block_keys(job.root_key, job.prompt))
        for number, key in enumerate(keys):
            if key not in self._prefix:
                kv: BlockKV = self._runner.lanes.block(sequence.lane, number)
                self._prefix.publish(key, Block(kv, kv.size, job.tenant, job.adapter))
        self._prefix.touched(keys)
        sequence.blocks = keys

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End a request by an error; what it shared is not trusted any more."""
        self._prefix.drop(sequence.blocks)
        _LOG.error("a request failed and ends", exc_info=error)
        failure = error if isinstance(error, EngineError) else EngineError("the request failed")
        if failure is not error:
            failure.__cause__ = error
        self._leave(sequence, "", failure)

    def _leave(self, sequence: Sequence, reason: str, error: Exception | None = None) -> None:
        if sequence.lane >= 0:
            self._scheduler.running.remove(sequence)
            self._runner.lanes.release(sequence.lane)
            self._runner.bank.release(sequence.bank_row)
        else:
            self._scheduler.waiting.remove(sequence)
        self._closed(sequence.generation)
        try:
            sequence.job.on_end()
        except Exception:  # noqa: BLE001 - the model's thread goes on
            _LOG.exception("on_end failed")
        sequence.generation.end(reason, error)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
