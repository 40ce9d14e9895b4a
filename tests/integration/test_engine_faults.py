"""A fault at every step of attach, forward and detach: nothing half done stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from gpu_worker.serving import requests
from gpu_worker.serving.adapter import Adapter
from gpu_worker.serving.bank import Bank, Rows, Stack
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.lanes import Lanes
from gpu_worker.serving.linear import Stacked
from gpu_worker.serving.parameters import parameters_digest, parameters_named
from gpu_worker.serving.prefix import PrefixCache
from gpu_worker.serving.sampler import Sampler
from gpu_worker.serving.sequence import EngineError, Job
from gpu_worker.serving.workspace import Workspace
from tests.integration import engine_world as ew

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

ERRORS = [RuntimeError("injected"), MemoryError("injected")]
WORKSPACE = Workspace(lanes=4, lane_tokens=256, adapters=2, rank=4, step_tokens=128)


class World:
    """A running engine, its base's digest, and two adapters of which one is attached."""

    def __init__(self) -> None:
        model = ew.base_build("llama")
        self.named = parameters_named(model)
        self.digest = parameters_digest(self.named)
        self.model = model
        self.engine = Engine(model, stop_tokens=frozenset(), workspace=WORKSPACE)
        self.engine.start()
        plain = ew.base_build("llama")
        self.one = ew.adapter_from(ew.peft_build(plain, 1, use_dora=True))
        self.other = ew.adapter_from(ew.peft_build(plain, 2))
        self.modules, self.size = self.engine.attach("one", self.one)
        self.before = self.answers()

    @property
    def stacks(self) -> list[Stack]:
        return list(self.engine._runner.bank.stacks.values())

    def answers(self, *names: str | None) -> list[list[int]]:
        """Answers of the base and an adapter to a prompt of two blocks, and of one token."""
        jobs = [Job(ew.prompt_of(n), 6, name) for name in names or (None, "one") for n in (1, 130)]
        running = [self.engine.submit(job) for job in jobs]
        return [list(generation.tokens()) for generation in running]

    def check(self) -> None:
        """All is as it was before the fault."""
        assert self.answers() == self.before
        assert parameters_digest(self.named) == self.digest
        assert self.engine.references == 0
        assert self.engine._runner.lanes.free == WORKSPACE.lanes
        assert self.engine._runner._current.batch is None

    def other_is_gone(self) -> bool:
        """No trace of the other adapter: its row adds nothing, and nothing runs on it."""
        with pytest.raises(EngineError, match="not attached"):
            self.answers("other")
        row = 2
        return all(
            row not in stack.used
            and row not in stack.dora
            and not bool(stack.a[row].any())
            and not bool(stack.b[row].any())
            and bool((stack.m[row] == 1).all())
            for stack in self.stacks
        )


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World()
    yield world
    world.engine.stop()


class Nth:
    """Calls through, and raises at one call."""

    def __init__(self, function: Callable[..., Any], number: int, error: Exception) -> None:
        self.function, self.left, self.error = function, number, error
        self.raised = False

    def __get__(self, instance: Any, _: type) -> Callable[..., Any]:
        return lambda *args, **options: self(instance, *args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            self.raised = True
            raise self.error
        return self.function(*args, **options)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("step", [(Bank, "_prepare"), (Stack, "write")], ids=lambda s: s[1])
@pytest.mark.parametrize("number", [0, 6, 13])
def test_attach(
    number: int,
    step: tuple[type, str],
    error: Exception,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(world.other.parts) == 14
    owner, name = step
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Nth(getattr(owner, name), number, error))
        with pytest.raises(type(error), match="injected"):
            world.engine.attach("other", world.other)
    assert world.other_is_gone()
    world.check()
    # The row is free again.
    assert world.engine.attach("other", world.other)[0] == 14
    assert world.engine.detach("other") > 0
    assert world.other_is_gone()


def test_attach_that_fails_in_the_middle_of_a_module(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = Bank.prepare

    def torn(bank: Bank, adapter: Adapter) -> dict[str, Rows]:
        prepared = prepare(bank, adapter)
        name, rows = list(prepared.items())[5]
        return prepared | {name: Rows(rows.a, rows.b[:, :-1], rows.m)}

    with monkeypatch.context() as patch:
        patch.setattr(Bank, "prepare", torn)
        with pytest.raises(RuntimeError, match="size"):
            world.engine.attach("other", world.other)
    assert world.other_is_gone()
    world.check()


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("number", [0, 7, 13])
def test_detach(
    number: int, error: Exception, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.engine.attach("other", world.other)
    with monkeypatch.context() as patch:
        patch.setattr(Stack, "clear", Nth(Stack.clear, number, error))
        with pytest.raises(type(error), match="injected"):
            world.engine.detach("other")
    # Half of it is zeroed: nothing may run on the rest, nor may the row be given to another.
    with pytest.raises(EngineError, match="not attached"):
        world.answers("other")
    with pytest.raises(EngineError, match="already"):
        world.engine.attach("other", world.other)
    world.check()
    world.engine.detach("other")
    assert world.other_is_gone()


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("place", ["a module", "lanes", "the sampler", "the last layer"])
@pytest.mark.parametrize("number", [0, 3])
def test_one_fault_in_a_forward_harms_nobody_or_its_own_request_only(
    number: int, place: str, error: Exception, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = {
        "a module": (Stacked, "forward"),
        "lanes": (Lanes, "extend"),
        "the sampler": (Sampler, "choose"),
        "the last layer": (type(world.model.model.norm), "forward"),
    }[place]
    with monkeypatch.context() as patch:
        fault = Nth(getattr(owner, name), number, error)
        patch.setattr(owner, name, fault)
        jobs = [Job(ew.prompt_of(n), 6, who) for who in (None, "one") for n in (1, 130)]
        running = [world.engine.submit(job) for job in jobs]
        failed = 0
        for generation, expected in zip(running, world.before, strict=True):
            try:
                assert list(generation.tokens()) == expected
            except EngineError:
                failed += 1
    assert fault.raised
    # A step that failed is run again, each request alone: only one that was alone then ends.
    assert failed == 1 if place == "the sampler" else failed <= 1
    world.check()


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_forward_that_always_fails_ends_each_request(
    error: Exception, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def broken(_: Any) -> Any:
            raise error

        patch.setattr(world.model.model.layers[1].mlp, "forward", broken)
        running = [world.engine.submit(Job((1, 2, 3), 4, who)) for who in (None, "one", "one")]
        for generation in running:
            with pytest.raises(EngineError):
                list(generation.tokens())
    world.check()


def test_a_fault_of_one_token_ends_its_request_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = world.model.model.layers[0]
    forward = layer.forward

    def broken(hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
        batch = world.engine._runner._current.batch
        if batch is not None and bool((batch.tokens == 95).any()):
            raise RuntimeError("injected")
        return forward(hidden, *args, **options)

    clean = [Job((1, 2, 3), 5, "one"), Job(tuple(range(70)), 5)]
    alone = [list(world.engine.submit(job).tokens()) for job in clean]
    assert not any(95 in tokens for tokens in alone)
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", broken)
        jobs = [clean[0], Job((4, 95, 6), 5, "one"), clean[1]]
        running = [world.engine.submit(job) for job in jobs]
        assert [list(running[n].tokens()) for n in (0, 2)] == alone
        with pytest.raises(EngineError):
            list(running[1].tokens())
    world.check()


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("owner", "name"), [(Lanes, "block"), (PrefixCache, "publish")])
def test_a_fault_while_blocks_are_published_ends_its_request_only(
    owner: type, name: str, error: Exception, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.engine.purge("one")
    key = b"root"
    bystander = Job(ew.prompt_of(40, 3), 5)
    alone = list(world.engine.submit(bystander).tokens())
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Nth(getattr(owner, name), 0, error))
        beside = world.engine.submit(bystander)
        failing = world.engine.submit(Job(ew.prompt_of(130), 4, "one", root_key=key))
        with pytest.raises(EngineError):
            list(failing.tokens())
        assert list(beside.tokens()) == alone
    assert world.engine.purge("one") == 0
    world.check()


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_fault_before_a_request_begins_ends_it_only(
    error: Exception, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(requests, "Sampler", Nth(Sampler, 1, error))
        running = [
            world.engine.submit(Job((1, 2, 3), 4, on_end=partial(ended.append, name)))
            for name in ("first", "failing", "last")
        ]
        for number in (0, 2):
            assert len(list(running[number].tokens())) == 4
        with pytest.raises(EngineError):
            list(running[1].tokens())
    assert sorted(ended) == ["failing", "first", "last"]
    world.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "always"])
def test_a_lane_that_cannot_be_zeroed_ends_the_engine_and_every_request(
    monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    engine = Engine(ew.base_build("llama"), stop_tokens=frozenset(), workspace=WORKSPACE)
    engine.start()
    ended: list[int] = []
    jobs = [
        Job(ew.prompt_of(4), 250 if number else 1, on_end=partial(ended.append, number))
        for number in range(6)
    ]

    def never(*_: Any) -> None:
        # As every call does after a fault of the device.
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        once = Nth(Lanes.clear, 0, RuntimeError("injected"))
        patch.setattr(Lanes, "clear", never if lasting else once)
        with ew.held_up(engine):
            running = [engine.submit(job) for job in jobs]
        engine._thread.join(60)
    assert not engine.alive
    assert all(generation.ended for generation in running)
    assert sorted(ended) == list(range(6))
    # A dirty lane is the one's who wrote to it: it is not given to another.
    assert engine._runner.lanes.free == (0 if lasting else WORKSPACE.lanes - 1)
    assert engine.references == 0


def test_adapters_come_and_go_and_leave_the_bank_as_it_was(world: World) -> None:
    def nothing_of(adapter: Adapter) -> None:
        applied, size = world.engine.attach("other", adapter)
        assert (applied, world.engine.detach("other")) == (14, size)

    blank = [(s.a[2].clone(), s.b[2].clone(), s.m[2].clone()) for s in world.stacks]
    for _ in range(20):
        nothing_of(world.other)
        nothing_of(world.one)
    after = [(s.a[2], s.b[2], s.m[2]) for s in world.stacks]
    assert all(
        torch.equal(a, b)
        for x, y in zip(blank, after, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    world.check()
