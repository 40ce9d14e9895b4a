"""Known KV that cannot be put into a lane: a fresh lane, one cold prefill, the same answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_worker.serving.lanes import Lanes, LaneState
from gpu_worker.serving.sequence import Generation, Job
from tests.integration import engine_world as ew

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]
ERRORS = [RuntimeError("injected"), MemoryError("injected")]
PROMPT = ew.prompt_of(200)
ROOT = b"root"


@pytest.fixture
def driven() -> ew.Driven:
    driven = ew.Driven(ew.base_build("llama"))
    driven.attach("a", ew.adapter_from(ew.peft_build(ew.base_build("llama"), 1)))
    return driven


class Torn:
    """Fills a lane as it should, then with NaN a little further, and fails. Once or always."""

    def __init__(self, error: Exception, *, after: int = 0, once: bool = False) -> None:
        self.error, self.after, self.once, self.calls = error, after, once, 0
        self.fill = Lanes._fill

    def __get__(self, lanes: Lanes, _: type) -> Callable[..., None]:
        def fill(lane: int, start: int, *args: Any) -> None:
            self.calls += 1
            self.fill(lanes, lane, start, *args)
            if self.calls <= self.after or (self.once and self.calls > self.after + 1):
                return
            lanes.extend(lane, start + 70)
            for slab in (*lanes.keys, *lanes.values):
                slab[lane, :, start + 60 : start + 70] = torch.nan
            raise self.error

        return fill


def lane_hash(lanes: Lanes, lane: int) -> str:
    """A digest of all bytes of a lane."""
    found = hashlib.sha256()
    for slab in (*lanes.keys, *lanes.values):
        found.update(slab[lane].contiguous().numpy().tobytes())
    return found.hexdigest()


def join(driven: ew.Driven, job: Job) -> Generation:
    """Let a job into a lane, which holds what was known of its prompt; nothing is run yet."""
    generation = driven.add(job)
    driven.requests._join(driven.requests._scheduler.waiting[0])
    return generation


def state_of(driven: ew.Driven, prompt: tuple[int, ...], name: str | None) -> LaneState:
    states: list[LaneState] = []
    driven.add(Job(prompt, 1, name, on_lane_state=states.append))
    driven.finish()
    return states[0]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", ["a", None])
def test_a_state_that_cannot_be_restored_is_a_cold_prefill_and_is_said_once(
    name: str | None, error: Exception, driven: ew.Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = driven.runner.lanes
    fresh = lane_hash(lanes, 0)
    cold_tokens, cold = driven.answer(Job(PROMPT, 6, name))
    state = state_of(driven, PROMPT[:150], name)
    heard: list[Exception] = []
    monkeypatch.setattr(Lanes, "_fill", Torn(error))
    job = Job(PROMPT, 6, name, root_key=ROOT, lane_state=state, on_restore_failed=heard.append)
    failed = join(driven, job)
    assert lane_hash(lanes, 0) == fresh
    assert heard == [error]
    assert (failed.reused_tokens, failed.ended) == (0, False)
    driven.finish()
    assert list(failed.tokens()) == cold_tokens
    assert ew.same_bits(driven.logits[failed], cold)
    # All of it was computed by prefill: it may be shared as any other.
    assert len(driven.prefix) == 3
    driven.idle_check()


def test_whoever_hears_of_it_may_fail_too(
    driven: ew.Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(driven, PROMPT, "a")
    cold, _ = driven.answer(Job(PROMPT, 3, "a"))

    def broken(_: Exception) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(Lanes, "_fill", Torn(ERRORS[0]))
    job = Job(PROMPT, 3, "a", lane_state=state, on_restore_failed=broken)
    generations = [driven.add(job), driven.add(Job(PROMPT, 3, "a", lane_state=state))]
    driven.finish()
    assert [list(g.tokens()) for g in generations] == [cold, cold]
    driven.idle_check()


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("after", [0, 2])
def test_a_block_that_cannot_be_restored_goes_with_those_beside_it(
    after: int, error: Exception, driven: ew.Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes, job = driven.runner.lanes, Job(PROMPT, 6, "a", root_key=ROOT)
    fresh = lane_hash(lanes, 0)
    cold_tokens, cold = driven.answer(job)
    assert len(driven.prefix) == 3
    other = Job(PROMPT, 1, None, root_key=b"other")
    driven.answer(other)
    torn = Torn(error, after=after)
    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "_fill", torn)
        failed = join(driven, job)
        assert torn.calls == after + 1
        assert lane_hash(lanes, 0) == fresh
        assert (failed.reused_tokens, failed.ended) == (0, False)
        # Another's stay.
        assert len(driven.prefix) == 3
        driven.finish()
    assert list(failed.tokens()) == cold_tokens
    assert ew.same_bits(driven.logits[failed], cold)
    # It published them anew, and the next one reuses them.
    warm = driven.add(job)
    driven.finish()
    assert warm.reused_tokens == 192
    assert ew.same_bits(driven.logits[warm], cold)
    driven.idle_check()


def test_a_prefix_cache_that_cannot_be_asked_is_a_cold_prefill(
    driven: ew.Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(PROMPT, 3, "a", root_key=ROOT)
    cold, _ = driven.answer(job)

    def broken(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(driven.prefix, "find", broken)
    generation = driven.add(job)
    driven.finish()
    assert (list(generation.tokens()), generation.reused_tokens) == (cold, 0)
    driven.idle_check()


def test_the_longer_of_a_state_and_a_shared_prefix_is_taken(driven: ew.Driven) -> None:
    driven.answer(Job(PROMPT, 1, "a", root_key=ROOT))
    for known, reused in ((1, 192), (192, 192), (195, 195)):
        state = state_of(driven, PROMPT[:known] + ew.prompt_of(9, 5), "a")
        generation = driven.add(Job(PROMPT, 1, "a", root_key=ROOT, lane_state=state))
        driven.finish()
        assert generation.reused_tokens == reused
    driven.idle_check()


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_answer_whose_state_cannot_be_handed_over_is_an_answer(
    error: Exception, driven: ew.Driven
) -> None:
    cold, _ = driven.answer(Job(PROMPT, 3, "a"))

    def broken(_: LaneState) -> None:
        raise error

    generation = driven.add(Job(PROMPT, 3, "a", on_lane_state=broken))
    driven.finish()
    assert list(generation.tokens()) == cold
    driven.idle_check()
