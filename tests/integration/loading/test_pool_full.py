"""Loads that find the pool full: what lies idle on this node gives its place, or nothing does."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gpu_worker.serving import placements as placements_module
from gpu_worker.serving.eviction import Reason
from registry_service.domain.digests import Digest
from registry_service.domain.errors import (
    PoolFullError,
    PoolTenantFullError,
    RefusedError,
    UnavailableError,
)
from tests.integration.load_world import LoadWorld
from tests.waiting import until

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]
_FULL = "no place in the pool: expected fewer than {} adapters"


@dataclass
class Pool:
    """Refuses as the service does when the nodes of a base hold as many as they may."""

    world: LoadWorld
    take: Callable[..., Any]
    adapters: int = 100
    tenant_adapters: int = 100
    asked: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def placement_take(self, node: str, tenant: str, digest: Digest) -> Any:
        with self.lock:
            self.asked += 1
            self._room_check(tenant, digest)
            answer = self.take(node, tenant, digest)
            self.most = max(self.most, len(self.world.registry.placements))
            return answer

    def _room_check(self, tenant: str, digest: Digest) -> None:
        registry = self.world.registry
        others = [held for held in dict(registry.placements) if held != digest]
        # What is on other nodes only, the registry of these tests knows by its digest alone.
        known = [registry.artifacts[held] for held in others if held in registry.artifacts]
        theirs = sum(artifact.tenant == tenant for artifact in known)
        for kind, count, most in (
            (PoolTenantFullError, theirs, self.tenant_adapters),
            (PoolFullError, len(others), self.adapters),
        ):
            if count >= most:
                raise kind(f"expected fewer than {most} adapters, got {count}")


@pytest.fixture
def pool(world: LoadWorld, monkeypatch: pytest.MonkeyPatch) -> Pool:
    found = Pool(world, world.registry.placement_take)
    monkeypatch.setattr(world.registry, "placement_take", found.placement_take)
    return found


def unloaded(world: LoadWorld) -> dict[Reason, int]:
    return world.node.residents.unloads()


@pytest.mark.parametrize("limit", ["adapters", "tenant_adapters"])
def test_where_all_lie_idle_the_least_recently_used_gives_its_place(
    world: LoadWorld, own: list[Digest], pool: Pool, limit: str
) -> None:
    setattr(pool, limit, 3)
    for digest in own[:3]:
        world.use(digest)
    world.use(own[0])
    world.use(own[3])
    assert set(world.states()) == {own[0], own[2], own[3]}
    assert world.node.residents.unloads_of(world.key(own[1])) == {Reason.POOL: 1}
    assert set(world.registry.placements) == set(world.states())
    for digest in own * 2:
        world.use(digest)
    assert pool.most == 3
    assert set(unloaded(world)) == {Reason.POOL}
    # Only for their places: the files of those that went are here still.
    assert world.registry.pulls == len(own)
    world.ledger_check()


def test_where_all_are_in_use_none_goes_until_one_is_idle(
    world: LoadWorld, own: list[Digest], pool: Pool
) -> None:
    pool.adapters = 2
    leases = [world.acquire(digest) for digest in own[:2]]
    with pytest.raises(UnavailableError, match=_FULL.format(2)) as caught:
        world.acquire(own[2])
    assert caught.value.retry_after
    assert set(world.states()) == set(own[:2])
    assert world.registry.pulls == 2
    leases[1].release()
    world.use(own[3])
    assert set(world.states()) == {own[0], own[3]}
    leases[0].release()
    assert unloaded(world) == {Reason.POOL: 1}


def test_a_tenants_part_costs_its_own_adapters_only(
    world: LoadWorld, own: list[Digest], others: list[Digest], pool: Pool
) -> None:
    pool.tenant_adapters = 1
    world.use(others[0])
    with world.acquire_held(own[0]), pytest.raises(UnavailableError, match="fewer than 1 adapters"):
        world.acquire(own[1])
    assert set(world.states()) == {others[0], own[0]}
    world.use(own[2])
    assert set(world.states()) == {others[0], own[2]}


def test_a_tenant_that_creates_versions_keeps_off_anothers_share_of_a_full_pool(
    world: LoadWorld, own: list[Digest], others: list[Digest], pool: Pool
) -> None:
    pool.adapters = 2
    world.use(others[0])
    for digest in own * 2:
        world.use(digest)
    assert others[0] in world.states()
    assert unloaded(world) == {Reason.POOL: 2 * len(own) - 1}


def test_where_other_nodes_fill_the_pool_nothing_changes_here(
    world: LoadWorld, own: list[Digest], pool: Pool
) -> None:
    pool.adapters = 1
    world.registry.placements["elsewhere"] = "node-2"
    with pytest.raises(UnavailableError, match=_FULL.format(1)):
        world.acquire(own[0])
    assert world.registry.placements == {"elsewhere": "node-2"}
    assert pool.asked == 1
    world.registry.placements.clear()
    world.clean()


def test_where_other_nodes_hold_the_adapter_none_goes_for_it(
    world: LoadWorld, own: list[Digest], pool: Pool
) -> None:
    world.use(own[0])
    world.registry.placements[own[1]] = "node-2"
    with pytest.raises(UnavailableError, match="other nodes"):
        world.acquire(own[1])
    assert world.states() == {own[0]: "SERVING"}
    assert pool.asked == 2


def test_for_what_is_too_large_none_goes(world: LoadWorld, own: list[Digest], pool: Pool) -> None:
    pool.adapters = 1
    world.use(own[0])
    loading = world.node.residents._loading
    loading.limits = replace(loading.limits, adapter_bytes=100)
    with pytest.raises(RefusedError, match="at most 100 bytes"):
        world.acquire(own[1])
    assert world.states() == {own[0]: "SERVING"}
    assert pool.asked == 1


def test_who_comes_first_has_the_place_and_one_load_costs_one_adapter(
    world: LoadWorld, own: list[Digest], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.adapters = 3
    for digest in own[:3]:
        world.use(digest)
    release = world.registry.placement_release

    def taken(*arguments: Any) -> None:
        release(*arguments)
        world.registry.placements["elsewhere"] = "node-2"

    monkeypatch.setattr(world.registry, "placement_release", taken)
    with pytest.raises(UnavailableError, match=_FULL.format(3)):
        world.acquire(own[3])
    assert set(world.states()) == set(own[1:3])
    assert set(world.registry.placements) == {*own[1:3], "elsewhere"}
    assert pool.asked == 5
    world.ledger_check()


def test_a_place_that_cannot_be_given_back_is_not_waited_for_without_end(
    world: LoadWorld, own: list[Digest], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.adapters = 1
    world.use(own[0])
    release, gate = world.registry.placement_release, threading.Event()

    def hangs(*arguments: Any) -> None:
        assert gate.wait(60)
        release(*arguments)

    monkeypatch.setattr(world.registry, "placement_release", hangs)
    monkeypatch.setattr(placements_module, "_RETURN_SECONDS", 0.1)
    with pytest.raises(UnavailableError, match=_FULL.format(1)):
        world.acquire(own[1])
    assert world.states() == {}
    assert pool.asked == 2
    gate.set()
    world.clean()


def test_an_adapter_that_cannot_be_unloaded_gives_no_place_and_the_next_one_does(
    world: LoadWorld, own: list[Digest], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.adapters = 2
    for digest in own[:2]:
        world.use(digest)
    detach, stuck = world.node.engine.detach, world.key(own[0])

    def failing(name: Any) -> int:
        if name == stuck:
            raise MemoryError
        return detach(name)

    with monkeypatch.context() as patch:
        patch.setattr(world.node.engine, "detach", failing)
        world.use(own[2])
        assert world.states() == {own[0]: "DRAINING", own[2]: "SERVING"}
    world.node.follower.heartbeat(world.node.residents)
    until(lambda: set(world.states()) == {own[2]})


def test_loads_at_once_never_hold_more_than_the_pool(
    world: LoadWorld, own: list[Digest], others: list[Digest], pool: Pool
) -> None:
    pool.adapters = 2
    outcomes = Counter[str]()

    def ask(digests: list[Digest]) -> None:
        for digest in digests * 3:
            try:
                world.use(digest)
                outcomes["served"] += 1
            except UnavailableError:
                outcomes["later"] += 1

    threads = [threading.Thread(target=ask, args=(found,)) for found in (own, others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.most == 2
    assert outcomes["served"]
    until(lambda: set(world.registry.placements) == set(world.states()))
    world.ledger_check()
