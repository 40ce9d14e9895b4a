"""Loading on a real node: one load each, room and shares, places in the pool, limits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpu_worker.serving.eviction import Reason
from gpu_worker.serving.ledger import Category
from gpu_worker.serving.loader import QueueLimits
from gpu_worker.serving.options import LoadLimits
from gpu_worker.serving.residents import Lease
from registry_service.domain.digests import Digest
from registry_service.domain.errors import NotFoundError, RefusedError, UnavailableError
from tests.integration import serving_world as sw
from tests.integration.load_world import LIMITS, LoadWorld
from tests.waiting import until

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]


def test_a_hundred_requests_for_one_digest_are_one_load(
    world: LoadWorld, own: list[Digest]
) -> None:
    leases: list[Lease] = []
    gate = threading.Barrier(100)

    def ask() -> None:
        gate.wait()
        leases.append(world.acquire(own[0]))

    threads = [threading.Thread(target=ask) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.registry.pulls == 1
    assert [item.references for item in world.node.residents.residents()] == [100]
    for lease in leases:
        lease.release()
        lease.release()
    assert [item.references for item in world.node.residents.residents()] == [0]
    world.ledger_check()
    world.unload(own[0])
    world.clean()


def test_the_ledger_is_what_the_tensors_take_by_digest_and_tenant(
    world: LoadWorld, own: list[Digest], others: list[Digest]
) -> None:
    world.clean()
    for digest in (own[0], others[0]):
        world.use(digest)
        world.ledger_check()
    sizes = world.node.ledgers.device.by_owner()
    assert set(sizes) == {world.key(own[0]), world.key(others[0])}
    residents = {item.key: item.size for item in world.node.residents.residents()}
    assert {key: line[Category.ADAPTER] for key, line in sizes.items()} == residents
    assert set(world.node.ledgers.device.by_tenant()) == {sw.TENANT_ID, sw.OTHER_ID}
    for digest in (own[0], others[0]):
        world.unload(digest)
    world.clean()


def test_what_a_load_takes_on_its_way_is_in_the_ledger_until_it_is_there(
    world: LoadWorld, own: list[Digest], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ledgers = world.node.engine, world.node.ledgers
    before = ledgers.device.taken()[Category.WORKSPACE]
    found: list[int] = []

    def look(*arguments: Any) -> Any:
        found.append(ledgers.device.taken()[Category.WORKSPACE] - before)
        return attach(*arguments)

    attach = engine.attach
    monkeypatch.setattr(engine, "attach", look)
    world.use(own[0])
    files = sum(map(len, world.registry.artifacts[own[0]].files.values()))
    assert found == [files + engine.memory().preparing]
    world.ledger_check()


def test_least_recently_used_make_room_and_what_is_in_use_stays(
    world: LoadWorld, own: list[Digest]
) -> None:
    held = world.acquire(own[0])
    for digest in own[1:4]:
        world.use(digest)
    world.use(own[1])
    world.use(own[4])
    assert set(world.states()) == {own[0], own[1], own[3], own[4]}
    assert world.node.residents.unloads_of(world.key(own[2])) == {Reason.ROOM: 1}
    # Its files stay: it comes back without being fetched again.
    pulls = world.registry.pulls
    world.use(own[2])
    assert world.registry.pulls == pulls
    assert own[0] in world.states()
    held.release()
    assert world.node.residents.unloads() == {Reason.ROOM: 2}
    world.ledger_check()
    until(lambda: set(world.registry.placements) == set(world.states()))


def test_when_all_are_in_use_a_request_is_told_to_come_back(
    world: LoadWorld, own: list[Digest]
) -> None:
    leases = [world.acquire(digest) for digest in own[:4]]
    with pytest.raises(UnavailableError, match="no room: the node is full"):
        world.acquire(own[4])
    assert own[4] not in world.states()
    until(lambda: own[4] not in world.registry.placements)
    leases[0].release()
    world.use(own[4])
    assert own[0] not in world.states()


def test_a_tenant_that_creates_versions_keeps_off_anothers_share(
    world: LoadWorld, own: list[Digest], others: list[Digest]
) -> None:
    world.use(others[0])
    for _ in range(3):
        for digest in own:
            world.use(digest)
    assert others[0] in world.states()
    assert world.node.residents.unloads_of(world.key(others[0])) == {}


def test_above_the_high_water_mark_the_oldest_go_though_there_is_room(
    own: list[Digest], start: Callable[[LoadLimits], LoadWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("registry_service.domain.limits.ADAPTER_MARK_PERCENT", 25)
    world = start(LoadLimits(adapters=8, rank=8, queue=LIMITS.queue))
    mark = world.node.ledgers.row * 2
    for digest in own:
        world.use(digest)
    until(lambda: world.node.ledgers.device.taken()[Category.ADAPTER] <= mark)
    assert world.node.residents.unloads() == {Reason.HIGH_WATER: len(own) - len(world.states())}
    assert list(world.states()) == own[-len(world.states()) :]


def test_limits_of_an_adapter_and_of_a_tenant(
    own: list[Digest],
    others: list[Digest],
    start: Callable[[LoadLimits], LoadWorld],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = start(
        LoadLimits(
            adapters=4,
            rank=8,
            sequences=2,
            tenant_adapters=2,
            queue=QueueLimits(waiting_each=2, per_minute=5),
        )
    )
    # The minute does not end.
    monkeypatch.setattr(world.node.residents._queue, "_elapsed", lambda: 1.0)
    with pytest.raises(UnavailableError, match="at most 2 sequences that wait for one adapter"):
        world.acquire(own[0], sequences=3)
    leases = [world.acquire(own[0]), world.acquire(own[0])]
    with pytest.raises(UnavailableError, match="at most 2 sequences at once on one adapter"):
        world.acquire(own[0])
    leases.append(world.acquire(own[1]))
    with pytest.raises(UnavailableError, match="the tenant's adapters"):
        world.acquire(own[2])
    for lease in leases:
        lease.release()
    world.use(own[2])
    assert world.node.residents.unloads() == {Reason.TENANT_LIMIT: 1}
    world.use(own[3])
    with pytest.raises(UnavailableError, match="at most 5 loads a minute"):
        world.acquire(own[4])
    world.use(others[0])


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        (LoadLimits(adapters=2, rank=2, queue=LIMITS.queue), "a rank of at most 2, got 4"),
        (LoadLimits(adapters=2, rank=8, adapter_bytes=100, queue=LIMITS.queue), "at most 100 byte"),
    ],
)
def test_an_adapter_over_a_limit_is_refused_and_leaves_nothing(
    own: list[Digest], start: Callable[[LoadLimits], LoadWorld], limits: LoadLimits, what: str
) -> None:
    world = start(limits)
    with pytest.raises(RefusedError, match=what):
        world.acquire(own[0])
    world.clean()
    assert world.node.store.keys() == ()


def test_without_a_place_in_the_pool_nothing_is_loaded(world: LoadWorld, own: list[Digest]) -> None:
    world.registry.placements[own[0]] = "node-2"
    with pytest.raises(UnavailableError, match="no place in the pool") as caught:
        world.acquire(own[0])
    assert caught.value.retry_after
    assert world.registry.pulls == 0
    assert world.states() == {}
    del world.registry.placements[own[0]]
    world.use(own[0])
    assert world.registry.placements[own[0]] == sw.NODE


def test_a_place_that_is_lost_is_drained_and_unloaded(world: LoadWorld, own: list[Digest]) -> None:
    lease = world.acquire(own[0])
    lost = {"tenantId": str(sw.TENANT_ID), "adapterDigest": own[0]}
    world.registry.lost_placements = [lost]
    try:
        world.node.follower.heartbeat(world.node.residents)
        assert world.states() == {own[0]: "DRAINING"}
        with pytest.raises(UnavailableError, match="being unloaded"):
            world.acquire(own[0])
        world.node.follower.heartbeat(world.node.residents)
        lease.release()
        until(lambda: world.states() == {})
    finally:
        world.registry.lost_placements = []
    world.clean()
    assert world.node.residents.unloads() == {Reason.PLACEMENT_LOST: 1}
    assert world.registry.acknowledged == []
    # Not revoked: its files lie there, and it may come back.
    assert world.node.store.keys() == (world.key(own[0]),)
    world.use(own[0])


def test_revoked_while_it_is_retired_it_is_purged_and_acknowledged_too(
    world: LoadWorld, own: list[Digest]
) -> None:
    lease = world.acquire(own[0])
    world.node.residents.placement_lost(world.key(own[0]))
    world.node.residents.revoke(world.key(own[0]), None)
    lease.release()
    until(lambda: bool(world.registry.acknowledged))
    world.registry.acknowledged.clear()
    assert world.node.store.keys() == ()
    until(lambda: world.states() == {})
    world.clean()
    with pytest.raises(NotFoundError):
        world.acquire(own[0])


def test_a_limit_of_sequences_counts_those_of_each_request(
    own: list[Digest], start: Callable[[LoadLimits], LoadWorld]
) -> None:
    world = start(
        LoadLimits(
            adapters=4, rank=8, sequences=9, queue=QueueLimits(waiting_each=9, per_minute=60)
        )
    )
    many = world.acquire(own[0], sequences=8)
    assert [item.references for item in world.node.residents.residents()] == [8]
    one = world.acquire(own[0])
    with pytest.raises(UnavailableError, match="at most 9 sequences at once"):
        world.acquire(own[0])
    many.release()
    many.release()
    assert [item.references for item in world.node.residents.residents()] == [1]
    world.acquire(own[0], sequences=8).release()
    one.release()
    assert [item.references for item in world.node.residents.residents()] == [0]


def test_a_request_that_waits_too_long_goes_and_the_load_serves_the_next(
    own: list[Digest], start: Callable[[LoadLimits], LoadWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = start(LoadLimits(adapters=4, rank=8))
    begun, gate = threading.Event(), threading.Event()
    pull = world.registry.pull

    def slow(*arguments: Any) -> None:
        begun.set()
        assert gate.wait(60)
        pull(*arguments)

    monkeypatch.setattr(world.registry, "pull", slow)
    filling = world.node.residents._filling
    with world.node.residents._changed:
        ticket = filling.ticket(world.load(own[0]), 1)
    assert begun.wait(60)
    with pytest.raises(UnavailableError, match="still being loaded"):
        filling.wait(ticket, 1, 0.01)
    gate.set()
    until(lambda: world.states() == {own[0]: "SERVING"})
    assert [item.references for item in world.node.residents.residents()] == [0]


def test_a_load_that_fails_again_and_again_is_left_alone_for_a_while(
    world: LoadWorld, own: list[Digest], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The while does not end by itself.
    monkeypatch.setattr(world.node.residents._queue, "_elapsed", lambda: 1.0)
    world.registry.verdict_changes = {"catalog_digest": Digest("sha256:" + "0" * 64)}
    try:
        for _ in range(2):
            with pytest.raises(RefusedError, match="a catalog that this node's base has not"):
                world.acquire(own[0])
        with pytest.raises(UnavailableError, match="again and again") as caught:
            world.acquire(own[0])
        assert caught.value.retry_after == 1
    finally:
        world.registry.verdict_changes = {}
    world.use(own[1])
