"""What a request holds, and that it gives everything back on every way out."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from gpu_worker.serving.engine import Engine
from gpu_worker.serving.lanes import LaneState
from gpu_worker.serving.sequence import (
    EngineBusyError,
    EngineError,
    Generation,
    Job,
    Sampling,
    TooLongError,
)
from gpu_worker.serving.workspace import BLOCK_TOKENS, Workspace
from tests.integration import engine_world as ew
from tests.waiting import until

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]


@pytest.fixture
def driven() -> ew.Driven:
    driven = ew.Driven(ew.base_build("llama"))
    model = ew.base_build("llama")
    driven.attach("a", ew.adapter_from(ew.peft_build(model, 1)))
    driven.attach("nan", ew.poisoned(ew.adapter_from(ew.peft_build(model, 2))))
    return driven


def _refuse() -> None:
    raise PermissionError("too late")


class BrokenDecoder:
    def push(self, token: int) -> str:
        raise RuntimeError("injected")

    def flush(self) -> str:
        return ""


def _broken_state(_: LaneState) -> None:
    raise RuntimeError("injected")


def _broken_end() -> None:
    raise RuntimeError("injected")


WAYS: dict[str, tuple[dict[str, Any], str, type[Exception] | None]] = {
    "by length": ({}, "length", None),
    "not admitted": ({"admit": _refuse}, "", PermissionError),
    "not finite": ({"adapter": "nan"}, "", EngineError),
    "a decoder's error": (
        {"sampling": Sampling(stop=("y",), decoder=BrokenDecoder())},
        "",
        EngineError,
    ),
    # Its answer is whole.
    "a holder's error": ({"on_lane_state": _broken_state}, "length", None),
}


@pytest.mark.parametrize("way", WAYS)
def test_everything_is_given_back(way: str, driven: ew.Driven) -> None:
    changes, reason, error = WAYS[way]
    ended: Counter[str] = Counter()
    job = Job(
        **{
            "prompt": ew.prompt_of(70),
            "max_tokens": 3,
            "adapter": "a",
            "on_end": lambda: ended.update("x"),
            "root_key": b"root",
            **changes,
        }
    )
    bystander = Job(ew.prompt_of(30, 5), 6, "a")
    _, alone = driven.answer(bystander)
    beside, generation = driven.add(bystander), driven.add(job)
    driven.finish()
    driven.idle_check()
    assert (generation.finish_reason, ended["x"]) == (reason, 1)
    if error is not None:
        with pytest.raises(error):
            list(generation.tokens())
        assert len(driven.prefix) == 0, "what a failed request shared is not trusted"
    assert ew.same_bits(driven.logits[beside], alone)


def test_a_failing_on_end_ends_its_request_and_nothing_else(driven: ew.Driven) -> None:
    generation = driven.add(Job(ew.prompt_of(5), 2, "a", on_end=_broken_end))
    driven.finish()
    driven.idle_check()
    assert len(list(generation.tokens())) == 2


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_cancelled_request_leaves_within_one_step(after: int, driven: ew.Driven) -> None:
    # A prompt of several steps: it may be cancelled in the middle of it.
    generation = driven.add(Job(ew.prompt_of(200), 40, "a"))
    waiting = [driven.add(Job(ew.prompt_of(3), 40)) for _ in range(8)]
    for _ in range(after):
        driven.requests.step()
    for each in (generation, *waiting):
        each.cancel()
    driven.requests.step()
    driven.idle_check()
    assert generation.finish_reason == "cancelled"
    assert generation.produced == max(0, after)


def test_a_poisoned_lane_is_zero_before_the_next_one_has_it() -> None:
    workspace = Workspace(lanes=1, lane_tokens=128, adapters=1, rank=16, step_tokens=128)
    driven = ew.Driven(ew.base_build("llama"), workspace)
    model = ew.base_build("llama")
    driven.attach("nan", ew.poisoned(ew.adapter_from(ew.peft_build(model, 2))))
    job = Job(ew.prompt_of(10), 3)
    _, clean = driven.answer(job)
    poisoned = driven.add(Job(ew.prompt_of(90), 3, "nan"))
    held: list[bool] = []
    lanes = driven.runner.lanes
    release = lanes.release

    def watched(lane: int) -> None:
        held.append(any(bool(slab.isnan().any()) for slab in lanes.values))
        release(lane)

    lanes.release = watched  # type: ignore[method-assign]  # a probe
    driven.finish()
    assert held == [True], "the lane held no NaN: this shows nothing"
    with pytest.raises(EngineError):
        list(poisoned.tokens())
    assert ew.same_bits(driven.answer(job)[1], clean)


def test_a_lane_state_goes_out_and_in_and_is_counted(driven: ew.Driven) -> None:
    states: list[LaneState] = []
    prompt = ew.prompt_of(100)
    first = driven.add(Job(prompt, 5, "a", on_lane_state=states.append))
    driven.finish()
    answer = list(first.tokens())
    # The last token was never run: it has no KV.
    assert states[0].tokens == (*prompt, *answer[:-1])
    longer = (*prompt, *answer, *ew.prompt_of(20, 9))
    cold = driven.answer(Job(longer, 4, "a"))
    warm = driven.add(Job(longer, 4, "a", lane_state=states[0]))
    driven.finish()
    driven.idle_check()
    assert warm.reused_tokens == 104
    assert list(warm.tokens()) == cold[0]
    # Decode rounds differently from prefill, in the last places only.
    assert ew.difference(driven.logits[warm], cold[1]) < 1e-4


@pytest.mark.parametrize(("same", "reused"), [(0, 0), (1, 1), (37, 37), (100, 99)])
def test_of_a_lane_state_only_the_common_beginning_is_reused(
    same: int, reused: int, driven: ew.Driven
) -> None:
    states: list[LaneState] = []
    prompt = ew.prompt_of(100)
    driven.add(Job(prompt, 1, "a", on_lane_state=states.append))
    driven.finish()
    other = prompt[:same] + tuple((t + 1) % ew.VOCABULARY for t in prompt[same:])
    cold = driven.answer(Job(other, 3, "a"))
    warm = driven.add(Job(other, 3, "a", lane_state=states[0]))
    driven.finish()
    assert (warm.reused_tokens, list(warm.tokens())) == (reused, cold[0])


def test_what_a_lane_state_brought_is_not_shared(driven: ew.Driven) -> None:
    states: list[LaneState] = []
    prompt = ew.prompt_of(200)
    driven.add(Job(prompt[:60], 9, "a", on_lane_state=states.append))
    driven.finish()
    driven.add(Job(prompt, 1, "a", lane_state=states[0], root_key=b"root"))
    driven.finish()
    assert len(driven.prefix) == 0


def test_a_purge_is_complete_counted_and_holds_for_what_runs(driven: ew.Driven) -> None:
    def share(name: str | None, key: bytes, seed: int) -> Generation:
        return driven.add(Job(ew.prompt_of(130, seed), 8, name, root_key=key))

    share("a", b"a", 1)
    share(None, b"base", 1)
    driven.finish()
    running = share("a", b"a", 2)
    assert driven.requests.purge("a") == 2
    driven.requests.step()
    driven.requests.step()
    assert driven.requests.purge("a") == 2, "the running one shared its blocks meanwhile"
    driven.finish()
    late = share("a", b"a", 3)
    driven.requests._join(driven.requests._scheduler.waiting[0])
    assert driven.requests.purge("a") == 0
    driven.finish()
    assert running.ended
    assert late.ended
    assert driven.requests.purge("a") == 0
    assert driven.requests.purge(None) == 130 // BLOCK_TOKENS


def test_prefixes_are_shared_under_one_key_and_adapter_only(driven: ew.Driven) -> None:
    prompt = ew.prompt_of(130)

    def reused(name: str | None, key: bytes | None) -> int:
        generation = driven.add(Job(prompt, 1, name, root_key=key))
        driven.finish()
        return generation.reused_tokens

    assert [reused("a", b"one"), reused("a", b"one")] == [0, 128]
    assert [reused("a", b"two"), reused("a", None), reused(None, b"one")] == [0, 0, 0]


# The engine with its thread


@pytest.fixture
def engine() -> Iterator[Engine]:
    workspace = Workspace(
        lanes=2, lane_tokens=128, adapters=2, rank=4, step_tokens=128, outstanding=4
    )
    engine = Engine(ew.base_build("llama"), stop_tokens=frozenset(), workspace=workspace)
    engine.start()
    yield engine
    engine.stop()


@pytest.mark.parametrize(
    ("prompt", "count", "error"),
    [
        ((1,) * 120, 9, TooLongError),
        ((), 1, EngineError),
        ((1,), 0, EngineError),
        ((1, ew.VOCABULARY), 1, EngineError),
        ((-1,), 1, EngineError),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_queued(
    prompt: tuple[int, ...], count: int, error: type[Exception], engine: Engine
) -> None:
    with pytest.raises(error):
        engine.submit(Job(prompt, count))
    assert len(list(engine.submit(Job((1,) * 119, 9)).tokens())) == 9


def test_a_lane_state_of_another_layout_is_refused(engine: Engine) -> None:
    states: list[LaneState] = []
    list(engine.submit(Job((1, 2, 3), 2, on_lane_state=states.append)).tokens())
    good = states[0]
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.to(torch.bfloat16),
        lambda t: t[:, :-1],
        lambda t: t[:1],
        lambda t: t[..., :-1],
    ]
    bad = [LaneState(good.tokens, tuple(map(c, good.keys)), good.values) for c in changes]
    bad += [
        LaneState(good.tokens, good.keys[:1], good.values[:1]),
        LaneState(good.tokens[:-1], good.keys, good.values),
    ]
    for state in bad:
        with pytest.raises(EngineError, match="layout"):
            engine.submit(Job((1, 2, 3), 2, lane_state=state))


def test_the_engine_stops_whatever_runs(engine: Engine) -> None:
    with ew.held_up(engine):
        jobs = [engine.submit(Job((1, 2), 100)) for _ in range(4)]
        with pytest.raises(EngineBusyError):
            engine.submit(Job((1, 2), 3))
        stopping = threading.Thread(target=engine.stop)
        stopping.start()
        until(lambda: not engine.alive)
    stopping.join()
    assert {job.finish_reason for job in jobs} == {"cancelled"}
    assert engine.references == 0
    for call in (
        lambda: engine.submit(Job((1,), 1)),
        lambda: engine.purge("a"),
        lambda: engine.detach("a"),
    ):
        with pytest.raises(EngineError, match="stopped"):
            call()


def test_a_tenant_that_fills_the_queue_holds_up_nobody_else() -> None:
    workspace = Workspace(lanes=2, lane_tokens=128, adapters=1, rank=4, step_tokens=128)
    driven = ew.Driven(ew.base_build("llama"), workspace)
    joined: list[str] = []

    def job(tenant: str, number: int) -> Job:
        prompt = ew.prompt_of(10 + number, number)
        return Job(prompt, 3, tenant=tenant, admit=partial(joined.append, f"{tenant}{number}"))

    jobs = [*(job("a", n) for n in range(6)), job("b", 6), job("c", 7)]
    running = [driven.add(each) for each in jobs]
    driven.finish()
    assert joined == ["a0", "b6", "a1", "c7", "a2", "a3", "a4", "a5"]
    driven.idle_check()
    answers = [list(generation.tokens()) for generation in running]
    assert answers == [driven.answer(each)[0] for each in jobs]
