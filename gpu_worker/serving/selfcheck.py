"""What an engine shows before it serves: its base answers as itself, and a row alone as in a crowd.

Matrix libraries choose kernels by size, threads and processor. Whether a row's arithmetic depends
on its neighbours cannot be known from the code alone, so it is measured on the very model.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gpu_worker.serving.adapter import Adapter, Part
from gpu_worker.serving.runner import Runner
from gpu_worker.serving.sampler import Sampler
from gpu_worker.serving.scheduler import Scheduler
from gpu_worker.serving.sequence import EngineError, Generation, Job, Sequence
from gpu_worker.serving.step import Segment, step_of
from gpu_worker.serving.workspace import BLOCK_TOKENS, Workspace

# Largest difference of a logit on CUDA, as a share of the largest logit.
NEIGHBOUR_BOUND: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# The same against the library's own attention, on any device.
LIBRARY_BOUND: Final = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_ANSWER: Final = 2
# Past a block, a whole one, and parts of one; each row of the bank and the base.
_LENGTHS: Final = (BLOCK_TOKENS + 5, 1, BLOCK_TOKENS, 17, 3)
# Tokens of a row, and of the longer ones that it is run beside: matrix libraries split a sum by
# its length (MKL does from 448 numbers on), and neighbours must not choose a row's.
_LONG, _LONGER = 300, (450, 700, 1100)


def library_logits(model: PreTrainedModel, count: int) -> Tensor:
    """Logits (count, vocabulary) of the check's prompt by the library's own attention.

    Taken before the engine touches the model.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            tokens = torch.tensor([_prompt(model, count, 0)], device=model.device)
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0]
            return logits
    finally:
        model.set_attn_implementation(before)


def base_check(runner: Runner, expected: Tensor) -> None:
    """Compare the engine's base row with the library's logits.

    Raises:
        EngineError: it answers differently.
    """
    count = len(expected)
    sequence = _sequence(runner, _prompt(runner.model, count, 0), 0)
    scheduler = Scheduler(count + BLOCK_TOKENS)
    scheduler.running.append(sequence)
    try:
        got = _last_logits(runner, scheduler, sequence, 1)[0]
    finally:
        runner.lanes.release(sequence.lane)
    bound = LIBRARY_BOUND[expected.dtype]
    if (difference := _difference(got, expected[-1])) > bound:
        raise EngineError(
            f"{type(runner.model).__name__}: expected the library's logits within {bound:g}, "
            f"got {difference:.2g}: something of its attention is not implemented"
        )


class NeighbourError(EngineError):
    """A request's logits depend on the others of its step, by no more than rounding."""


def neighbour_check(runner: Runner, workspace: Workspace) -> float:
    """Run a row alone and in a crowd; the largest difference as a share of the largest logit.

    Raises:
        EngineError: it differs at all on the CPU, or beyond the bound elsewhere; NeighbourError
            where it is by rounding: less than that bound.
    """
    count = min(2, workspace.adapters)
    rows = [runner.bank.attach(runner.bank.prepare(_adapter(runner, n))) for n in range(count)]
    try:
        difference = max(
            _alone_against_crowded(runner, workspace, rows),
            _long_beside_longer(runner, workspace, rows[0]),
        )
    finally:
        for row in rows:
            runner.bank.detach(row)
    dtype = runner.lanes.keys[0].dtype
    bound = 0.0 if runner.model.device.type == "cpu" else NEIGHBOUR_BOUND[dtype]
    if not difference <= bound:
        by_rounding = difference <= NEIGHBOUR_BOUND[dtype]
        raise (NeighbourError if by_rounding else EngineError)(
            f"{type(runner.model).__name__}: a request's logits depend on its neighbours: "
            f"expected a difference of at most {bound:g}, got {difference:.2g}"
        )
    return difference


def _alone_against_crowded(runner: Runner, workspace: Workspace, rows: list[int]) -> float:
    """Requests of several lengths, each alone on a lane, then all at once."""
    room = workspace.lane_tokens - _ANSWER
    lengths = [min(length, room) for length in _LENGTHS[: workspace.lanes]]
    prompts = [_prompt(runner.model, length, n) for n, length in enumerate(lengths)]
    bank_rows = [(*rows, 0)[n % (len(rows) + 1)] for n in range(len(lengths))]
    alone = [
        _run(runner, workspace, [prompt], [row])[0]
        for prompt, row in zip(prompts, bank_rows, strict=True)
    ]
    crowded = _run(runner, workspace, prompts, bank_rows)
    return max(
        _difference(ours, theirs)
        for one, other in zip(alone, crowded, strict=True)
        for ours, theirs in zip(one, other, strict=True)
    )


def _long_beside_longer(runner: Runner, workspace: Workspace, row: int) -> float:
    """One token after a long text, alone and beside longer ones up to a whole lane.

    The texts' KV is random: how it came about does not matter here, and computing it takes long.
    """
    most = workspace.lane_tokens - _ANSWER
    if workspace.lanes < 2 or most <= _LONG:
        return 0.0
    longer = sorted({min(length, most) for length in (*_LONGER, most)})
    alone = _next_logits(runner, [_LONG], row)
    return max(_difference(_next_logits(runner, [_LONG, length], row), alone) for length in longer)


def _next_logits(runner: Runner, lengths: list[int], row: int) -> Tensor:
    """The first one's logits after texts of these lengths, the same random KV for each of them."""
    sequences = [_sequence(runner, (0,) * length, row) for length in lengths]
    try:
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.cached = length
            sequence.produced.append(0)
            _lane_fill(runner, sequence.lane, length)
        step = step_of([Segment(s, 0, 1, s.cached) for s in sequences], [])
        return runner.forward(step)[0].clone()
    finally:
        for sequence in sequences:
            runner.lanes.release(sequence.lane)


def _lane_fill(runner: Runner, lane: int, length: int) -> None:
    """The same random block again and again: to make each number anew takes long."""
    runner.lanes.extend(lane, length)
    for number, slab in enumerate((*runner.lanes.keys, *runner.lanes.values)):
        _, heads, _, size = slab.shape
        generator = torch.Generator().manual_seed(number)
        block = torch.randn(heads, BLOCK_TOKENS, size, generator=generator).to(slab)
        for start in range(0, length, BLOCK_TOKENS):
            end = min(start + BLOCK_TOKENS, length)
            slab[lane, :, start:end] = block[:, : end - start]


def _run(
    runner: Runner, workspace: Workspace, prompts: list[tuple[int, ...]], rows: list[int]
) -> list[list[Tensor]]:
    """The logits of each request's answer; the last request joins when the first has begun."""
    scheduler = Scheduler(workspace.step_tokens, grouped=workspace.grouped)
    sequences = [_sequence(runner, p, row) for p, row in zip(prompts, rows, strict=True)]
    scheduler.running += sequences[: max(1, len(sequences) - 1)]
    logits: dict[Sequence, list[Tensor]] = {sequence: [] for sequence in sequences}
    try:
        while any(len(found) < _ANSWER for found in logits.values()):
            _advance(runner, scheduler, logits)
            if sequences[-1] not in scheduler.running and len(logits[sequences[-1]]) < _ANSWER:
                scheduler.running.append(sequences[-1])
    finally:
        for sequence in sequences:
            runner.lanes.release(sequence.lane)
    return list(logits.values())


def _advance(runner: Runner, scheduler: Scheduler, logits: dict[Sequence, list[Tensor]]) -> None:
    step = scheduler.plan()
    if step is None:
        return
    found = runner.forward(step)
    for segment in step.segments:
        segment.sequence.cached = segment.end
    for segment, row in zip(step.emitting, found, strict=True):
        sequence = segment.sequence
        logits[sequence].append(row.clone())
        sequence.produced.append(int(row.argmax()))
        if len(logits[sequence]) == _ANSWER:
            scheduler.running.remove(sequence)


def _last_logits(
    runner: Runner, scheduler: Scheduler, sequence: Sequence, count: int
) -> list[Tensor]:
    logits: dict[Sequence, list[Tensor]] = {sequence: []}
    while len(logits[sequence]) < count:
        _advance(runner, scheduler, logits)
    return logits[sequence]


def _sequence(runner: Runner, prompt: tuple[int, ...], bank_row: int) -> Sequence:
    job = Job(prompt, _ANSWER)
    lane = runner.lanes.take()
    return Sequence(job, Generation(), Sampler(job.sampling), lane=lane, bank_row=bank_row)


def _prompt(model: PreTrainedModel, count: int, seed: int) -> tuple[int, ...]:
    size = model.config.get_text_config().vocab_size
    return tuple((7 + 13 * seed + 31 * place) % size for place in range(count))


def _adapter(runner: Runner, seed: int) -> Adapter:
    """Random tensors of the bank's rank on every module, small enough to keep numbers finite."""
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for name, stack in runner.bank.stacks.items():
        size_in, rank, size_out = stack.a.shape[1], stack.a.shape[2], stack.b.shape[2]
        a = torch.randn(rank, size_in, generator=generator)
        b = torch.randn(size_out, rank, generator=generator)
        parts[name] = Part(a, b, 0.1 / (rank * size_in) ** 0.5)
    return Adapter(parts)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if not bool(torch.isfinite(ours).all() & torch.isfinite(theirs).all()):
        return math.inf
    scale = theirs.float().abs().max().clamp_min(1e-6)
    return float((ours.float() - theirs.float()).abs().max() / scale)
