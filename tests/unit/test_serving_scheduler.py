"""Who runs in a step, and how prompts are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.serving.scheduler import Scheduler
from gpu_worker.serving.sequence import Generation, Job, Sequence
from gpu_worker.serving.step import Step
from gpu_worker.serving.workspace import BLOCK_TOKENS, Workspace, WorkspaceError


def sequence(prompt: int, lane: int = 0, *, cached: int = 0, row: int = 0) -> Sequence:
    """A running sequence whose tokens are their positions."""
    sampler: Any = None
    job = Job(tuple(range(prompt)), 8)
    return Sequence(job, Generation(), sampler, lane=lane, bank_row=row, cached=cached)


def advance(step: Step) -> None:
    """What the engine does after a step."""
    for segment in step.segments:
        segment.sequence.cached = segment.end
    for segment in step.emitting:
        segment.sequence.produced.append(1000 + len(segment.sequence.produced))


def spans(step: Step) -> list[tuple[int, int]]:
    return [(s.position, s.end) for s in step.segments]


def test_nothing_runs_when_nothing_is_there() -> None:
    assert Scheduler(128).plan() is None


def test_a_prompt_is_cut_at_the_borders_of_blocks_and_then_decoded() -> None:
    scheduler = Scheduler(1024)
    scheduler.running.append(sequence(150))
    step = scheduler.plan()
    assert step is not None
    assert (spans(step), step.decode) == ([(0, 64), (64, 128), (128, 150)], ())
    assert [s.emits for s in step.segments] == [False, False, True]
    assert step.segments[1].tokens() == tuple(range(64, 128))
    advance(step)
    step = scheduler.plan()
    assert step is not None
    assert (spans(step), step.prefill) == ([(150, 151)], ())
    assert step.decode[0].tokens() == (1000,)


@given(
    prompts=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    budget=st.integers(70, 400),
    cached=st.integers(0, 299),
)
def test_how_a_prompt_is_cut_depends_on_nothing_else(
    prompts: list[int], budget: int, cached: int
) -> None:
    def cuts(scheduler: Scheduler, of: Sequence, most: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        while of.cached < len(of.job.prompt):
            step = scheduler.plan()
            assert step is not None
            assert sum(s.count for s in step.segments) <= most
            assert [s.start for s in step.segments] == [
                sum(t.count for t in step.segments[:n]) for n in range(len(step.segments))
            ]
            found += [(s.position, s.end) for s in step.prefill if s.sequence is of]
            advance(step)
        return found

    start = min(cached, prompts[0] - 1)
    alone, crowded = (sequence(prompts[0], cached=start) for _ in range(2))
    quiet, busy = Scheduler(512), Scheduler(budget)
    quiet.running.append(alone)
    busy.running += [sequence(n, lane) for lane, n in enumerate(prompts[1:], 1)]
    busy.running.append(crowded)
    expected = cuts(quiet, alone, 512)
    assert cuts(busy, crowded, budget) == expected
    assert all(a // BLOCK_TOKENS == (b - 1) // BLOCK_TOKENS for a, b in expected)


def test_running_requests_go_first_in_the_order_of_their_lanes() -> None:
    scheduler = Scheduler(80)
    late, early = (sequence(3, lane, cached=3) for lane in (5, 2))
    for each in (late, early):
        each.produced.append(7)
    scheduler.running += [sequence(300, 1), late, early]
    step = scheduler.plan()
    assert step is not None
    assert [s.sequence for s in step.decode] == [early, late]
    assert [s.count for s in step.prefill] == [64]


def test_the_oldest_prompt_always_advances() -> None:
    scheduler = Scheduler(100)
    first = sequence(400, 0)
    scheduler.running += [first, *(sequence(90, n) for n in range(1, 6))]
    for _ in range(7):
        before = first.cached
        step = scheduler.plan()
        assert step is not None
        advance(step)
        assert first.cached > before


def test_grouped_runs_one_row_a_step_and_starves_none() -> None:
    scheduler = Scheduler(512, grouped=True)
    scheduler.running += [sequence(5, lane, row=lane % 3) for lane in range(9)]
    seen = []
    for _ in range(12):
        step = scheduler.plan()
        assert step is not None
        rows = {s.sequence.bank_row for s in step.segments}
        assert len(rows) == 1
        assert len(step.sequences) == 3
        seen.append(rows.pop())
        advance(step)
    assert [seen.count(row) for row in range(3)] == [4, 4, 4]


def test_tenants_take_turns_to_join() -> None:
    scheduler = Scheduler(1024)
    first = [asked("a", n) for n in range(1, 7)]
    scheduler.waiting.extend([*first, *(asked("b", n) for n in range(11, 13)), asked("c", 21)])
    assert join_all(scheduler) == [1, 11, 21, 2, 12, 3, 4, 5, 6]


def test_a_tenant_has_its_part_of_the_lanes_and_what_is_nobodys_has_no_bound() -> None:
    scheduler = Scheduler(1024, tenant_most=2)
    scheduler.waiting.extend(asked(tenant, n) for tenant in ("a", "b") for n in (1, 2, 3))
    scheduler.waiting.extend(asked(None, n) for n in (11, 12, 13))
    assert sorted(join_all(scheduler)) == [1, 1, 2, 2, 11, 12, 13]
    assert [len(s.job.prompt) for s in scheduler.waiting] == [3, 3]
    scheduler.running.pop(0)
    assert join_all(scheduler) == [3]


def asked(tenant: str | None, number: int) -> Sequence:
    """A tenant's request with a prompt of so many tokens."""
    found = sequence(number)
    found.job = replace(found.job, tenant=tenant)
    return found


def join_all(scheduler: Scheduler) -> list[int]:
    """The prompts of all that may join, in their order."""
    order = []
    while (joined := scheduler.next_waiting()) is not None:
        scheduler.waiting.remove(joined)
        scheduler.running.append(joined)
        order.append(len(joined.job.prompt))
    return order


def test_a_step_splits_into_one_for_each_sequence() -> None:
    scheduler = Scheduler(512)
    decoding = sequence(3, 4, cached=3)
    decoding.produced.append(1)
    scheduler.running += [sequence(100, 0), decoding, sequence(10, 1)]
    step = scheduler.plan()
    assert step is not None
    parts = step.split()
    assert [len(part.sequences) for part in parts] == [1, 1, 1]
    assert sorted(spans(step)) == sorted(span for part in parts for span in spans(part))
    assert [part.segments[0].start for part in parts] == [0, 0, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"lanes": 0},
        {"rank": 0},
        {"lane_tokens": 0},
        {"lane_tokens": 100},
        {"lanes": 16, "step_tokens": 79},
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(WorkspaceError):
        Workspace(**wrong)  # type: ignore[arg-type]  # wrong on purpose
