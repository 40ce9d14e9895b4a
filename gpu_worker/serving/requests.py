"""The requests in the engine: they join, run step by step, and leave, each on its own.

A lane, a reference to a bank row and the caller's ``on_end`` are one lease: whichever way a request
goes out, ``_leave`` gives them back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpu_worker.serving.lanes import BlockKV, LaneState
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
        self._scheduler = Scheduler(
            workspace.step_tokens, tenant_most=workspace.tenant_lanes, grouped=workspace.grouped
        )

    @property
    def grouped(self) -> bool:
        """True when a step runs requests of one adapter only."""
        return self._scheduler.grouped

    @grouped.setter
    def grouped(self, grouped: bool) -> None:
        self._scheduler.grouped = grouped

    @property
    def idle(self) -> bool:
        """True when nothing waits or runs."""
        return not (self._scheduler.waiting or self._scheduler.running)

    def add(self, job: Job, generation: Generation) -> None:
        """A request arrived."""
        try:
            bare, sampler = replace(job, lane_state=None), Sampler(job.sampling)
            self._scheduler.waiting.append(Sequence(bare, generation, sampler, job.lane_state))
        except Exception as error:  # noqa: BLE001 - one request's fault is not the others'
            _LOG.error("a request cannot begin", exc_info=error)
            self.end(job, generation, "", EngineError("the request failed"))

    def step(self) -> None:
        """Let the cancelled leave and the next ones join, then run one step."""
        for sequence in (*self._scheduler.waiting, *self._scheduler.running):
            if sequence.generation.cancelled:
                self._leave(sequence, CANCELLED)
        while self._runner.lanes.free and (following := self._scheduler.next_waiting()):
            self._join(following)
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
            try:
                self._leave(sequence, CANCELLED, EngineError("the engine stopped"))
            except Exception:  # noqa: BLE001 - its owner was told; the others are still to be
                _LOG.exception("a lane stays as it is")

    def end(self, job: Job, generation: Generation, reason: str, error: Exception | None) -> None:
        """Tell everybody, once, that a request holds nothing any more."""
        self._closed(generation)
        _tell(job.on_end)
        generation.end(reason, error)

    def _join(self, sequence: Sequence) -> None:
        """Give a waiting request its lease, or end it."""
        job = sequence.job
        try:
            job.admit()
            if job.sampling.stop and job.sampling.decoder is not None:
                sequence.stop_text = StopText(job.sampling.stop, job.sampling.decoder)
            row = self._adapter_row(job.adapter)
        except Exception as error:  # noqa: BLE001 - one request's fault is not the others'
            self._leave(sequence, "", error)
            return
        self._scheduler.waiting.remove(sequence)
        self._scheduler.running.append(sequence)
        sequence.lane, sequence.bank_row = self._runner.lanes.take(job.holder), row
        self._runner.bank.acquire(row)
        try:
            self._reuse(sequence)
            _tell(job.on_lane_filled)
        except Exception as error:  # noqa: BLE001 - one request's fault is not the others'
            self._fail(sequence, error)

    def _reuse(self, sequence: Sequence) -> None:
        """Fill the lane with what is known of the prompt, all of it or nothing.

        The prompt's last token is always run.
        """
        job, state, sequence.lane_state = sequence.job, sequence.lane_state, None
        common = 0 if state is None else _common(state.tokens, job.prompt[:-1])
        from_state = False
        try:
            keys = [] if job.root_key is None else list(block_keys(job.root_key, job.prompt[:-1]))
            blocks = self._prefix.find(keys, job.adapter)
            from_state = common > len(blocks) * BLOCK_TOKENS
            # Only blocks that prefill made whole are published: decode rounds differently.
            sequence.shares = job.root_key is not None and not from_state
            if state is not None and from_state:
                self._runner.lanes.restore(sequence.lane, state, common)
                sequence.cached = common
            else:
                self._blocks_restore(sequence, keys, blocks)
        except Exception as error:  # noqa: BLE001 - whatever it is, a cold prefill is right
            _LOG.error("known KV cannot be put into a lane: all is computed", exc_info=error)
            self._reuse_nothing(sequence)
            if from_state and (hear := job.on_restore_failed) is not None:
                _tell(partial(hear, error))
        sequence.generation.reused_tokens = sequence.cached

    def _blocks_restore(self, sequence: Sequence, keys: list[bytes], blocks: list[Block]) -> None:
        sequence.blocks = keys[: len(blocks)]
        for number, block in enumerate(blocks):
            self._runner.lanes.block_restore(sequence.lane, number, block.kv)
        sequence.cached = len(blocks) * BLOCK_TOKENS

    def _reuse_nothing(self, sequence: Sequence) -> None:
        """Make a lane that was half filled a fresh one; blocks that it got are not trusted."""
        self._runner.lanes.clear(sequence.lane)
        self._prefix.drop(sequence.blocks)
        sequence.blocks, sequence.cached = [], 0
        sequence.shares = sequence.job.root_key is not None

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
        if (hear := sequence.job.on_lane_state) is not None:
            _tell(partial(self._state_tell, sequence, hear))
        self._leave(sequence, reason)

    def _state_tell(self, sequence: Sequence, hear: Callable[[LaneState], None]) -> None:
        if sequence.job.wants_lane_state(sequence.cached):
            tokens = (*sequence.job.prompt, *sequence.produced)[: sequence.cached]
            hear(self._runner.lanes.state(sequence.lane, tokens))

    def _publish(self, sequence: Sequence) -> None:
        """Share a prompt's whole blocks, once all of it has run and its logits are finite."""
        job = sequence.job
        if not sequence.shares or job.root_key is None:
            return
        keys: list[bytes] = []
        # The same list: whatever was published before a fault goes with it.
        sequence.blocks = keys
        for number, key in enumerate(block_keys(job.root_key, job.prompt)):
            if key not in self._prefix:
                kv: BlockKV = self._runner.lanes.block(sequence.lane, number)
                block = Block(kv, kv.size, job.tenant, job.adapter)
                if not self._prefix.publish(key, block, after=keys):
                    break
            keys.append(key)
        self._prefix.touched(keys)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End a request by an error; what it shared is not trusted any more."""
        if sequence.generation.ended:
            # It ended, and its lane could not be zeroed: nothing else is to run in it.
            raise error
        self._prefix.drop(sequence.blocks)
        _LOG.error("a request failed and ends", exc_info=error)
        failure = error if isinstance(error, EngineError) else EngineError("the request failed")
        if failure is not error:
            failure.__cause__ = error
        self._leave(sequence, "", failure)

    def _leave(self, sequence: Sequence, reason: str, error: Exception | None = None) -> None:
        # What it never put into a lane goes now: the error may hold the sequence for a while.
        sequence.lane_state = None
        try:
            if sequence.lane >= 0:
                self._scheduler.running.remove(sequence)
                self._runner.bank.release(sequence.bank_row)
                self._runner.lanes.release(sequence.lane)
            else:
                self._scheduler.waiting.remove(sequence)
        finally:
            # A lane that cannot be zeroed ends the engine; its request is told once, like all.
            self.end(sequence.job, sequence.generation, reason, error)


def _tell(hear: Callable[[], None]) -> None:
    """Tell a job's owner, whose own faults are not the engine's."""
    try:
        hear()
    except Exception:  # noqa: BLE001 - the model's thread goes on
        _LOG.exception("what a job is told by failed")


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
