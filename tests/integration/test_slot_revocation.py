"""A revoked adapter's KV beside lanes is gone before it is acknowledged, whatever holds it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.serving.lanes import LaneState
from gpu_worker.serving.ledger import Category
from gpu_worker.serving.residency import Key
from gpu_worker.serving.slot_sidecar import Refusal
from registry_service.domain.digests import Digest
from registry_service.trust.routing_context import BASE_MARKER
from tests.identities import A, B
from tests.integration import http_world as hw
from tests.integration import serving_world as sw
from tests.integration.engine_world import held_up
from tests.integration.session_world import SIZE, STATE, SessionWorld
from tests.integration.slot_world import state_make
from tests.integration.turn_world import TENANT_ID, context_make
from tests.waiting import until

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

KEY = Key(TENANT_ID, A)
_OF_TESTS: set[int] = set()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[SessionWorld]:
    with SessionWorld.stuck(tmp_path / "slots") as world:
        yield world


def hand_over(world: SessionWorld, digest: Digest, *sessions: str) -> list[weakref.ref[Any]]:
    """End a turn of each session; what its state is gone with."""
    left = []
    for number, session in enumerate(sessions):
        state = state_make(range(1, 401), seed=number)
        left.append(weakref.ref(state.keys[0]))
        world.turns.begin(context_make(digest, session)).on_lane_state(state)
    return left


def test_what_waits_of_a_revoked_adapter_is_dropped_at_once_and_nothing_else(
    held: SessionWorld,
) -> None:
    first = hand_over(held, B, "s-0")
    held.key.sealing.wait()
    revoked, kept = hand_over(held, A, "s-1", "s-2"), hand_over(held, B, "s-3")
    assert held.turns.purge(KEY) == 0, "none of it is a block"
    assert [state() for state in revoked] == [None, None]
    assert KEY not in held.ledger.by_owner()
    assert held.skipped() == [Refusal.REVOKED] * 2
    # Nobody waits for what was dropped.
    held.turns.begin(context_make(BASE_MARKER, "s-1")).release()
    assert held.turns._pending.total() == 2
    assert all(state() is not None for state in (*first, *kept))
    held.key.go.set()
    for session in ("s-0", "s-3"):
        held.turns.begin(context_make(B, session)).release()
    assert [entry.adapter_digest for entry in held.slots.entries()] == [B, B]


def test_a_purge_waits_for_the_save_that_is_under_way_and_no_longer(held: SessionWorld) -> None:
    (state,) = hand_over(held, A, "s-0")
    held.key.sealing.wait()
    hand_over(held, B, "s-1")
    alive: list[Any] = []

    def purge() -> None:
        held.turns.purge(KEY)
        alive.extend([state(), held.ledger.by_owner().get(KEY)])

    thread = threading.Thread(target=purge)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert held.ledger.by_owner()[KEY] == {Category.KV: 3 * SIZE}
    held.key.go.set()
    thread.join()
    assert alive == [None, None]
    assert held.turns.remove(A) == 1


def test_what_comes_of_a_revoked_adapter_is_not_kept(held: SessionWorld) -> None:
    late, wanted, asks = (held.turns.begin(context_make(A, f"s-{n}")) for n in range(3))
    assert wanted.wants_lane_state(len(STATE.tokens))
    held.turns.purge(KEY)
    state = state_make(range(1, 401))
    left = weakref.ref(state.keys[0])
    # Its memory was there before, or it was never asked for.
    for turn in (wanted, late):
        turn.on_lane_state(state)
    del state
    assert left() is None
    assert not asks.wants_lane_state(len(STATE.tokens))
    assert held.ledger.holdings() == ()
    assert held.skipped() == [Refusal.REVOKED] * 3
    assert not held.turns._pending
    assert held.turns.keys() == set()
    assert not held.key.sealing.is_set()


def test_an_adapter_whose_state_waits_is_here_until_its_page_is(held: SessionWorld) -> None:
    hand_over(held, A, "s-0")
    held.key.sealing.wait()
    hand_over(held, B, "s-1")
    assert held.slots.keys() == set()
    keys = {KEY, Key(TENANT_ID, B)}
    assert held.turns.keys() == keys
    held.key.go.set()
    held.turns.close()
    assert held.turns.keys() == held.slots.keys() == keys


# A real node


class SlowDisk:
    """Page writes of a node that wait from now on, until ``go``."""

    def __init__(self, node: Any) -> None:
        self.go, self.writing = threading.Event(), threading.Event()
        self._write = node.slots._pages.write
        node.slots._pages.write = self

    def __call__(self, *page: Any) -> None:
        self.writing.set()
        self.go.wait()
        self._write(*page)


@dataclass
class Told:
    """What ledgers had of an adapter, and which states were alive, at each acknowledgement."""

    world: hw.HttpWorld
    digest: Digest
    left: list[tuple[dict[Any, Any], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        registry: Any = self.world.registry
        acknowledge = registry.node_acknowledge

        def told(*arguments: Any) -> None:
            self.left.append((self.of_adapter(), states()))
            acknowledge(*arguments)

        registry.node_acknowledge = told

    def of_adapter(self) -> dict[Any, Any]:
        """What the ledgers have of the adapter."""
        ledgers = (self.world.node.ledgers.host, self.world.node.ledgers.device)
        owners = {owner: sizes for ledger in ledgers for owner, sizes in ledger.by_owner().items()}
        return {owner: sizes for owner, sizes in owners.items() if self.digest in str(owner)}


def states() -> int:
    """How many states are alive beside those of tests; nothing is collected for that."""
    found = [item for item in gc.get_objects() if isinstance(item, LaneState)]
    return sum(id(state) not in _OF_TESTS for state in found)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[hw.HttpWorld]:
    gc.collect()
    _OF_TESTS.clear()
    _OF_TESTS.update(id(item) for item in gc.get_objects() if isinstance(item, LaneState))
    base = hw.base_with_template(tmp_path / "base")
    registry = sw.FakeRegistry(tmp_path / "registry", base)
    with hw.listening(registry, base, tmp_path) as world:
        yield world


@pytest.fixture
def digest(world: hw.HttpWorld, tmp_path: Path) -> Digest:
    base = world.registry.base
    sw.peft_make(base.dir, tmp_path / "adapter", 1)
    return world.registry.publish(sw.adapter_files(base, tmp_path / "adapter"))


def ask(world: hw.HttpWorld, digest: Digest | None, session: str) -> int:
    return world.send(digest, claims={"session_id": session}).status_code


def test_a_revocation_is_acknowledged_when_no_state_of_the_adapter_waits_for_the_disk(
    world: hw.HttpWorld, digest: Digest
) -> None:
    told, disk = Told(world, digest), SlowDisk(world.node)
    asked = [(None, "s-0"), (digest, "s-1"), (digest, "s-2"), (None, "s-3")]
    try:
        assert [ask(world, *one) for one in asked] == [200] * 4
        until(disk.writing.is_set)
        world.registry.revoke(digest, deadline=0)
        # What waits of others waits on, and holds up nothing.
        until(lambda: bool(told.left))
        assert told.left == [({}, 2)]
    finally:
        disk.go.set()
    until(lambda: not world.node.turns._pending)
    assert [e.adapter_digest for e in world.node.slots.entries()] == [BASE_MARKER] * 2
    assert states() == 0


def test_a_revocation_is_not_acknowledged_while_a_state_of_the_adapter_is_being_saved(
    world: hw.HttpWorld, digest: Digest
) -> None:
    told, disk = Told(world, digest), SlowDisk(world.node)
    try:
        assert [ask(world, digest, session) for session in ("s-1", "s-2")] == [200] * 2
        until(disk.writing.is_set)
        world.registry.revoke(digest, deadline=0)
        until(lambda: states() == 1)
        assert not world.node.residents.residents()[0].references
        assert told.left == []
        assert told.of_adapter()
    finally:
        disk.go.set()
    until(lambda: bool(told.left))
    assert told.left == [({}, 0)]
    assert world.node.slots.entries() == ()


def test_a_state_that_waits_outlives_its_adapter_but_not_its_revocation(
    world: hw.HttpWorld, digest: Digest
) -> None:
    told, disk = Told(world, digest), SlowDisk(world.node)
    key = Key(TENANT_ID, digest)
    try:
        assert [ask(world, *one) for one in ((None, "s-0"), (digest, "s-1"))] == [200] * 2
        until(disk.writing.is_set)
        world.node.residents.placement_lost(key)
        until(lambda: not world.node.residents.residents())
        world.node.store.remove(key)
        world.registry.revoke(digest)
        until(lambda: bool(told.left))
        assert told.left == [({}, 1)]
    finally:
        disk.go.set()
    until(lambda: not world.node.turns._pending)
    assert [e.adapter_digest for e in world.node.slots.entries()] == [BASE_MARKER]


@pytest.mark.parametrize("deadline", [0, None], ids=["cancelled", "refused"])
def test_what_a_turn_begins_with_goes_when_its_adapter_is_revoked_before_it_has_a_lane(
    world: hw.HttpWorld, digest: Digest, deadline: int | None
) -> None:
    told, engine = Told(world, digest), world.node.engine
    assert ask(world, digest, "s-1") == 200
    until(lambda: not world.node.turns._pending)
    with ThreadPoolExecutor() as callers:
        with held_up(engine):
            answer = callers.submit(ask, world, digest, "s-1")
            until(lambda: states() == 1 and bool(engine._open))
            assert told.of_adapter()
            world.registry.revoke(digest, deadline)
            until(lambda: world.node.residents.letting_go)
            if deadline is not None:
                until(lambda: all(g.cancelled for g in tuple(engine._open)))
            assert told.left == []
        assert answer.result() != 200
    until(lambda: bool(told.left))
    assert told.left == [({}, 0)]
