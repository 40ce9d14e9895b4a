"""Whose KV is: at any moment the ledger says of each digest and tenant what lies there for it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID

import pytest
from torch import Tensor

from gpu_worker.serving.engine import Engine
from gpu_worker.serving.ledger import Category, LedgerFullError, Owner, error_of
from gpu_worker.serving.memory import ledgers_open, storages_bytes
from gpu_worker.serving.residency import Key
from gpu_worker.serving.sequence import EngineError, Generation, Job
from gpu_worker.serving.step import Step
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import RefusedError
from tests.integration import engine_world as ew

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]
ONE_ID, TWO_ID = UUID(int=1), UUID(int=2)
ONE, TWO = Key(ONE_ID, digest_of(b"a")), Key(TWO_ID, digest_of(b"b"))
NAN = Key(ONE_ID, digest_of(b"nan"))
# Room for nine blocks of a tenant and for fourteen in all: some are pushed out.
BLOCK = 2 * 2 * 64 * 2 * 16 * 4
WORKSPACE = replace(ew.SMALL, tenant_bytes=9 * BLOCK, prefix_bytes=14 * BLOCK)


class World:
    """A running engine with two tenants' adapters, and its ledger.

    Who has begun to answer waits until somebody else wants to begin: nobody ends by itself.
    """

    def __init__(self) -> None:
        model = ew.base_build("llama")
        self.parameters = list(model.parameters())
        self.engine = Engine(model, stop_tokens=frozenset(), workspace=WORKSPACE)
        self.engine.start()
        self.ledger = ledgers_open(self.engine, self.parameters, device="cpu", budget=0).device
        one, two = (ew.adapter_from(ew.peft_build(ew.base_build("llama"), n)) for n in (1, 2))
        for name, adapter in ((ONE, one), (TWO, two), (NAN, ew.poisoned(two))):
            self.engine.attach(name, adapter)
        scheduler = self.engine._requests._scheduler
        self._plan, self._running = scheduler.plan, scheduler.running
        scheduler.plan = self._held_plan  # type: ignore[method-assign]  # a probe

    def _held_plan(self) -> Step | None:
        if all(sequence.produced for sequence in self._running):
            threading.Event().wait(0.001)
            return None
        return self._plan()

    def start(self, tenant: UUID, name: Key | None, seed: int) -> Generation:
        """A request with two blocks of a prompt, that has begun to answer."""
        root = repr((tenant, name)).encode()
        prompt = ew.prompt_of(130, seed)
        job = Job(prompt, 120, name, root_key=root, tenant=tenant)
        generation = self.engine.submit(job)
        next(generation.tokens())
        return generation

    def check(self) -> dict[Owner, int]:
        """The ledger's KV by owner, which is what lies in the engine, and by tenant."""
        found: dict[Owner, int] = self.engine._call(self._check)
        return found

    def _check(self) -> dict[Owner, int]:
        """Between two steps: nothing moves meanwhile."""
        counted: Counter[Owner] = Counter()
        lanes = self.engine._runner.lanes
        slabs = [*lanes.keys, *lanes.values]
        for sequence in self.engine._requests._scheduler.running:
            job, lane = sequence.job, sequence.lane
            counted[job.adapter or job.tenant] += sum(  # type: ignore[index]  # keys and tenants
                slab[lane].numel() * slab.element_size() for slab in slabs
            )
        blocks: list[Tensor] = []
        for block in self.engine._prefix._blocks.values():
            tensors = [*block.kv.keys, *block.kv.values]
            blocks += tensors
            size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            counted[block.adapter or block.tenant] += size  # type: ignore[index]  # the same
        kv = {owner: line[Category.KV] for owner, line in self.ledger.by_owner().items()}
        assert kv == counted
        tenants: Counter[UUID] = Counter()
        for owner, size in counted.items():
            tenants[owner.tenant_id if isinstance(owner, Key) else owner] += size
        by_tenant = self.ledger.by_tenant()
        assert {tenant: line[Category.KV] for tenant, line in by_tenant.items()} == tenants
        bank = [t for s in self.engine._runner.bank.stacks.values() for t in (s.a, s.b, s.m)]
        named = {"base": self.parameters, "bank": bank, "lanes": slabs, "blocks": blocks}
        measured = storages_bytes(named)
        taken = self.ledger.taken()
        assert taken[Category.KV] == measured["lanes"] + measured["blocks"]
        assert error_of(taken, sum(measured.values())) < 0.05
        return kv


@pytest.fixture
def world() -> Iterator[World]:
    with ew.one_thread():
        world = World()
        yield world
        world.engine.stop()


def end(*running: Generation) -> None:
    """Cancel these and wait until nothing is held of them."""
    for generation in running:
        generation.cancel()
        list(generation.tokens())


def test_kv_is_counted_by_digest_and_tenant_on_every_way_in_and_out(world: World) -> None:
    lane = world.engine.memory().lanes // WORKSPACE.lanes
    assert world.check() == {}
    who: list[tuple[UUID, Key | None, Owner]] = [
        (ONE_ID, ONE, ONE),
        (TWO_ID, TWO, TWO),
        (ONE_ID, None, ONE_ID),
        (TWO_ID, None, TWO_ID),
    ]
    running = {owner: world.start(tenant, name, 1) for tenant, name, owner in who}
    assert world.check() == dict.fromkeys(running, lane + 2 * BLOCK)
    # Two on one digest; the second of them reuses the first one's blocks.
    again = world.start(ONE_ID, ONE, 1)
    assert again.reused_tokens == 128
    assert world.check()[ONE] == 2 * lane + 2 * BLOCK
    # One that fails publishes nothing and holds nothing.
    with pytest.raises(EngineError, match="not finite"):
        list(world.engine.submit(Job(ew.prompt_of(130), 3, NAN, tenant=ONE_ID)).tokens())
    assert NAN not in world.check()
    end(again, running[TWO_ID])
    kv = world.check()
    assert (kv[ONE], kv[TWO_ID]) == (lane + 2 * BLOCK, 2 * BLOCK)
    # More blocks than there is room for: the tenant's own go, and then whoever's.
    for seed in range(2, 9):
        end(world.start(ONE_ID, ONE, seed), world.start(TWO_ID, TWO, seed))
        world.check()
    assert world.engine.memory().blocks == 14 * BLOCK
    assert world.engine.purge(ONE) > 0
    assert world.check()[ONE] == lane
    end(*running.values())
    kv = world.check()
    assert ONE not in kv
    for name in (ONE, TWO, NAN):
        world.engine.detach(name)
        assert name not in world.check()
    world.engine.purge(None)  # type: ignore[arg-type]  # the base's blocks
    assert world.check() == {}


def test_what_runs_when_the_engine_stops_holds_nothing_afterwards(world: World) -> None:
    running = [world.start(ONE_ID, ONE, 1), world.start(TWO_ID, None, 1)]
    for generation in running:
        generation.cancel()
    world.engine.stop()
    assert all(generation.ended for generation in running)
    # Its blocks lie there as long as it does.
    kv = {owner: line[Category.KV] for owner, line in world.ledger.by_owner().items()}
    assert kv == {ONE: 2 * BLOCK, TWO_ID: 2 * BLOCK}


def test_whoever_asks_meanwhile_never_sees_more_than_is_claimed(world: World) -> None:
    wrong: list[object] = []
    stop = threading.Event()

    def ask() -> None:
        try:
            while not stop.wait(0.0005):
                lines = world.ledger.by_owner()
                if any(size <= 0 for line in lines.values() for size in line.values()):
                    wrong.append(lines)
                world.ledger.taken()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
            wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for seed in range(12):
        running = [
            world.start(tenant, name, seed)
            for tenant, name in ((ONE_ID, ONE), (TWO_ID, TWO), (ONE_ID, None))
        ]
        end(*running)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    world.check()


def test_a_node_without_room_for_lanes_and_blocks_does_not_start(world: World) -> None:
    sizes = storages_bytes({"base": world.parameters})["base"] + world.engine.memory().bank
    enough = sizes + world.engine.memory().lanes + WORKSPACE.prefix_bytes
    ledgers_open(world.engine, world.parameters, device="cpu", budget=enough)
    with pytest.raises(RefusedError, match="--memory-mib") as caught:
        ledgers_open(world.engine, world.parameters, device="cpu", budget=enough - 1)
    assert isinstance(caught.value.__cause__, LedgerFullError)
