"""Loads that fail at every step, and hundreds that do not: nothing of them is left."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.base_files import ProvenBase
from gpu_worker.serving import admission as admission_module
from gpu_worker.serving import filling as filling_module
from gpu_worker.serving.bank import Stack
from gpu_worker.serving.eviction import Reason
from gpu_worker.serving.lanes import LaneState
from gpu_worker.serving.ledger import Ledger, Reservation
from gpu_worker.serving.loader import QueueLimits
from gpu_worker.serving.options import LoadLimits
from gpu_worker.serving.parameters import Unchanged
from gpu_worker.serving.residency import Residency
from gpu_worker.serving.sequence import CANCELLED, EngineError, Job
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import RefusedError, UnavailableError
from tests.integration import serving_world as sw
from tests.integration.load_world import LIMITS, LoadWorld, adapters_publish, world_start
from tests.waiting import until

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

# Every step of a load, where a fault is injected before it.
STEPS: dict[str, Callable[[LoadWorld], tuple[object, str]]] = {
    "thread": lambda _: (filling_module, "compute_briefly"),
    "verdict": lambda world: (world.registry, "verdict"),
    "placement": lambda world: (world.registry, "placement_take"),
    "manifest": lambda world: (world.registry, "manifest"),
    "room": lambda _: (Ledger, "by_owner"),
    "reserve": lambda _: (Ledger, "reserve"),
    "disk": lambda world: (world.node.store, "expect"),
    "pull": lambda world: (world.registry, "pull"),
    "read": lambda _: (admission_module, "files_read"),
    "check": lambda _: (admission_module, "adapter_read"),
    "revocable": lambda world: (world.node.store, "revocable_write"),
    "prepare": lambda world: (world.node.engine._runner.bank, "prepare"),
    "attach": lambda world: (world.node.engine._runner.bank, "attach"),
    "base hash": lambda world: (world.node.residents._loading._admission, "_base_unchanged"),
    "commit": lambda _: (Reservation, "commit"),
    "serve": lambda _: (Residency, "load_end"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_fault_at_any_step_leaves_nothing_and_the_next_load_works(
    world: LoadWorld, own: list[Digest], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    target, name = STEPS[step](world)
    for digest, error in ((own[0], RuntimeError("fault")), (own[1], MemoryError())):

        def fault(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(target, name, fault)
            with pytest.raises((UnavailableError, RefusedError)):
                world.acquire(digest)
        world.clean()
        assert world.node.store.keys() == ()
        world.use(digest)
        world.unload(digest)
        world.node.store.remove(world.key(digest))
        world.clean()


def test_a_row_that_is_half_written_is_empty_again(
    world: LoadWorld, own: list[Digest], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = Stack.write, []

    def failing(self: Stack, row: int, rows: Any) -> None:
        write(self, row, rows)
        written.append(row)
        if len(written) == 3:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Stack, "write", failing)
        with pytest.raises(UnavailableError, match="not enough memory"):
            world.acquire(own[0])
    assert len(written) == 3
    world.clean()
    world.use(own[0])


def test_a_multiplier_of_dora_goes_with_its_row(
    base: ProvenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = sw.FakeRegistry(tmp_path / "registry", base)
    (digest,) = adapters_publish(registry, tmp_path, 1, use_dora=True)
    world = world_start(registry, tmp_path, base, LIMITS)
    stacks = world.node.engine._runner.bank.stacks.values()
    write, written = Stack.write, []

    def failing(self: Stack, row: int, rows: Any) -> None:
        write(self, row, rows)
        written.append(float((self.m[row] - 1).abs().max()))
        raise MemoryError

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Stack, "write", failing)
            with pytest.raises(UnavailableError, match="not enough memory"):
                world.acquire(digest)
        assert max(written) > 0.01
        world.clean()
        world.use(digest)
        assert any(stack.m.ne(1).any() for stack in stacks)
        world.unload(digest)
        world.clean()
    finally:
        world.node.stop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_whatever_way_the_base_is_written_to_is_seen(dtype: torch.dtype) -> None:
    def made() -> tuple[tuple[str, torch.Tensor], ...]:
        return (("a", torch.ones(3, 5).to(dtype)), ("b", torch.ones(7).to(dtype)))

    def by_torch(tensor: torch.Tensor) -> None:
        with torch.inference_mode():
            tensor.flatten()[-1] = 2

    def unseen_by_torch(tensor: torch.Tensor) -> None:
        tensor.data.view(torch.uint8).flatten()[-1] ^= 1

    def back_again(tensor: torch.Tensor) -> None:
        with torch.inference_mode():
            tensor.add_(1).sub_(1)

    for write in (by_torch, unseen_by_torch, back_again):
        for number in range(2):
            named = made()
            unchanged = Unchanged(named)
            assert unchanged()
            write(named[number][1])
            assert not unchanged(), (write, number)


@pytest.mark.usefixtures("lasting")
def test_a_load_that_changes_the_base_is_refused_and_nothing_runs_any_more(
    world: LoadWorld,
    own: list[Digest],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tensor = world.loaded.parameters[0][1]
    attach = world.node.engine.attach
    running = world.node.engine.submit(Job((1, 2, 3), 900))

    def harmful(name: Any, adapter: Any) -> tuple[int, int]:
        with torch.inference_mode():
            tensor.add_(0)
        return attach(name, adapter)

    monkeypatch.setattr(world.node.engine, "attach", harmful)
    with pytest.raises((RefusedError, UnavailableError)):
        world.acquire(own[0])
    assert not world.node.engine.alive
    assert len(list(running.tokens())) < 900
    assert running.finish_reason == CANCELLED
    with pytest.raises(EngineError, match="the engine is stopped"):
        world.node.engine.submit(Job((1, 2, 3), 4))
    assert [r.__dict__["event"] for r in caplog.records if "event" in r.__dict__] == [
        "base.changed"
    ]
    assert world.states() == {}
    assert world.node.engine.references == 0
    assert world.node.ledgers.device.by_owner() == {}
    until(lambda: world.registry.placements == {})


def test_bytes_that_differ_are_fetched_again_once_and_then_refused(
    world: LoadWorld, own: list[Digest]
) -> None:
    artifact = world.registry.artifacts[own[0]]
    good = dict(artifact.files)
    pull = world.registry.pull

    def wrong(tenant: str, adapter: str, digest: str, into: Path) -> None:
        pull(tenant, adapter, digest, into)
        weights = into / "adapter_model.safetensors"
        weights.chmod(0o644)
        weights.write_bytes(good[weights.name][:-1] + b"\x00")

    client: Any = world.registry
    client.pull = wrong
    try:
        with pytest.raises(RefusedError, match="expected sha256"):
            world.acquire(own[0])
    finally:
        del client.pull
    world.clean()
    assert world.node.store.keys() == ()
    world.use(own[0])


@pytest.mark.slow
def test_three_hundred_loads_and_unloads_leave_the_memory_as_it_was(
    base: ProvenBase, tmp_path: Path
) -> None:
    # Large ones, for this base: what all loads read together is many times the bound.
    registry = sw.FakeRegistry(tmp_path / "registry", base)
    digests = adapters_publish(registry, tmp_path, 3, target_modules="all-linear", r=64)
    read = 100 * sum(
        len(data) for digest in digests for data in registry.artifacts[digest].files.values()
    )
    limits = LoadLimits(adapters=2, rank=64, queue=QueueLimits(per_minute=100_000))
    world = world_start(registry, tmp_path, base, limits)

    def cycles(count: int) -> int:
        for number in range(count):
            digest = digests[number % len(digests)]
            with world.acquire_held(digest):
                # Lanes, blocks, a state and a page come and go with it.
                assert len(answer(world, digest)) == 2
                world.slot_save(digest)
            assert world.node.engine.memory().blocks > 0
            world.unload(digest)
            assert world.node.engine.memory().blocks == 0
        return resident_bytes()

    before = cycles(60)
    after = cycles(300)
    world.clean()
    world.node.stop()
    assert world.node.residents.unloads() == {Reason.PLACEMENT_LOST: 360}
    # What one file of each load would leave behind is over the bound, however large the process is.
    assert read > 2 * 0.02 * before
    assert after <= before * 1.02


def answer(world: LoadWorld, digest: Digest) -> list[int]:
    """What an adapter says to a prompt of some blocks, which is then known."""
    key = world.key(digest)
    states: list[LaneState] = []
    job = Job(
        tuple(range(1, 81)) * 2,
        2,
        adapter=key,
        tenant=key.tenant_id,
        root_key=digest_of(digest.encode()).encode(),
        on_lane_state=states.append,
    )
    said = list(world.node.engine.submit(job).tokens())
    until(lambda: len(states) == 1)
    return said


def resident_bytes() -> int:
    """What the process holds once everything that can be given back is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
