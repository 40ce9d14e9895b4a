"""What sessions take beside lanes: in the ledger while it is there, within shares, or not taken."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from gpu_worker.serving.lanes import Lanes, LaneState
from gpu_worker.serving.ledger import Category, Ledger, LedgerFullError
from gpu_worker.serving.residency import Key
from gpu_worker.serving.sequence import Job
from gpu_worker.serving.slot_events import SlotEventKind
from gpu_worker.serving.slot_memory import SlotMemory
from registry_service.domain.digests import Digest
from registry_service.trust.routing_context import BASE_MARKER
from tests.identities import A
from tests.integration.session_world import OTHER_TENANT, SIZE, STATE, SessionWorld, claimed
from tests.integration.slot_world import state_hash, state_make
from tests.integration.turn_world import PROMPT, TENANT_ID, TurnWorld, context_make

pytestmark = pytest.mark.torch

KEY = Key(TENANT_ID, A)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "slots"


@pytest.fixture
def held(folder: Path) -> Iterator[SessionWorld]:
    with SessionWorld.stuck(folder) as world:
        yield world


def test_a_sessions_next_turn_waits_for_the_save_before_it(held: SessionWorld) -> None:
    held.turns.begin(context_make(A)).on_lane_state(STATE)
    held.key.sealing.wait()
    found: list[LaneState | None] = []
    next_turn = threading.Thread(
        target=lambda: found.append(held.turns.begin(context_make(A)).lane_state)
    )
    next_turn.start()
    assert found == []
    held.key.go.set()
    next_turn.join()
    assert found[0] is not None
    assert state_hash(found[0]) == state_hash(STATE)


def test_when_the_disk_cannot_follow_saves_are_left_out_before_they_are_copied(
    held: SessionWorld,
) -> None:
    begun = [held.turns.begin(context_make(A, f"s-{number}")) for number in range(8)]
    begun[0].on_lane_state(STATE)
    held.key.sealing.wait()
    for turn in begun[1:5]:
        assert turn.wants_lane_state(len(STATE.tokens))
        turn.on_lane_state(STATE)
    # One is being saved and four wait: no more is wanted, nor taken from whoever does not ask.
    assert not begun[5].wants_lane_state(len(STATE.tokens))
    begun[6].on_lane_state(STATE)
    assert held.skipped() == ["too many saves wait"] * 2
    # Five states, and the page that one of them becomes, plain and sealed.
    assert held.ledger.by_owner() == {KEY: {Category.KV: 7 * SIZE}}
    held.key.go.set()
    for number in range(5):
        turn = held.turns.begin(context_make(A, f"s-{number}"))
        assert turn.lane_state is not None
        turn.release()
    assert len(held.slots.entries()) == 5
    assert held.ledger.holdings() == ()


def test_a_state_is_gone_when_the_ledger_has_it_no_more(folder: Path) -> None:
    world = SessionWorld(folder, 2**30)
    state = state_make(range(1, 9))
    left = weakref.ref(state.keys[0])
    world.turns.begin(context_make(A)).on_lane_state(state)
    del state
    world.turns.begin(context_make(A)).release()
    gc.collect()
    assert left() is None
    assert world.ledger.holdings() == ()
    world.close()


def test_what_a_page_takes_at_its_fullest_is_reserved_before(folder: Path) -> None:
    world = SessionWorld(folder, 2**30)
    world.save("s-1")
    (entry,) = world.slots.entries()
    sidecar = (folder / "1.sidecar").stat().st_size
    # Sealed and plain, then plain and tensors; saving, with the state that it comes from.
    assert world.key.sealed == [3 * SIZE]
    assert world.key.opened == [2 * (entry.size - sidecar)]
    assert world.ledger.holdings() == ()
    world.close()


def test_what_was_wanted_and_never_came_is_given_back_with_the_turn(folder: Path) -> None:
    world = SessionWorld(folder, 2**30)
    turn = world.turns.begin(context_make(A))
    for _ in range(2):
        assert turn.wants_lane_state(len(STATE.tokens))
        assert world.ledger.by_owner() == {KEY: {Category.KV: SIZE}}
    turn.release()
    assert world.ledger.holdings() == ()
    world.close()


@pytest.mark.parametrize(
    ("states", "said"),
    # Of what is free a tenant may have a quarter: for a state, or for its page as well.
    [(0.9, "no memory: KV"), (2.9, "no memory: KV"), (3.1, "")],
)
def test_a_state_that_there_is_no_memory_for_is_not_saved_and_the_page_before_stays(
    folder: Path, states: float, said: str
) -> None:
    world = SessionWorld(folder, 2**30)
    world.save("s-1")
    world.close()
    world = SessionWorld(folder, int(4 * states * SIZE))
    turn = world.turns.begin(context_make(A))
    turn.release()
    assert turn.wants_lane_state(len(STATE.tokens)) is (states > 1)
    turn.on_lane_state(state_make(range(1, 401), seed=2))
    world.turns.close()
    assert [reason[: len(said)] for reason in {*world.skipped()}] == ([said] if said else [])
    assert [entry.page for entry in world.slots.entries()] == [1 if said else 2]
    assert world.ledger.holdings() == ()
    world.slots.close()


def test_sessions_leave_half_of_what_is_free_to_loads_and_half_of_theirs_to_other_tenants() -> None:
    ledger = Ledger(1000)
    ledger.hold(Category.BASE, 200)
    memory = SlotMemory(ledger)
    first = memory.reserve(150, TENANT_ID)
    memory.reserve(50, Key(TENANT_ID, A))
    with pytest.raises(LedgerFullError) as caught:
        memory.reserve(1, Key(TENANT_ID, A))
    assert (caught.value.size, caught.value.free) == (1, 0)
    others = [memory.reserve(200, OTHER_TENANT)]
    with pytest.raises(LedgerFullError):
        memory.reserve(1, UUID(int=3001))
    assert ledger.free(Category.WORKSPACE) == 400
    first.commit(30)
    others.append(memory.reserve(120, UUID(int=3001)))
    for room in (first, first, *others):
        room.release()
    assert ledger.by_owner() == {Key(TENANT_ID, A): {Category.KV: 50}}
    assert memory.reserve(150, TENANT_ID)


def test_what_the_ledger_has_no_room_for_counts_against_nobodys_share() -> None:
    ledger = Ledger(1000)
    memory = SlotMemory(ledger)
    load = ledger.hold(Category.WORKSPACE, 990)
    for _ in range(30):
        with pytest.raises(LedgerFullError):
            memory.reserve(20, TENANT_ID)
    load.release()
    assert memory.reserve(250, TENANT_ID)


def test_one_tenants_waiting_pages_leave_loads_and_others_sessions_their_room(
    folder: Path,
) -> None:
    world = SessionWorld(folder, 2**30)
    for number in range(6):
        world.save(f"s-{number}")
    world.turns.begin(context_make(A, "o", tenant_id=OTHER_TENANT)).on_lane_state(STATE)
    world.close()
    budget = 20 * SIZE
    world = SessionWorld(folder, budget)
    # All of them wait in the engine's queue, say.
    begun = [world.turns.begin(context_make(A, f"s-{number}")) for number in range(6)]
    warm = [turn for turn in begun if turn.lane_state is not None]
    assert 0 < len(warm) < 6
    assert claimed(world.ledger) <= budget // 4
    assert world.turns.begin(context_make(A, "o", tenant_id=OTHER_TENANT)).lane_state is not None
    world.ledger.reserve(Category.WORKSPACE, budget // 2)
    # Nothing is wrong with those that were left out.
    assert len(world.slots.entries()) == 7
    for turn in begun:
        turn.release()
    cold = begun.index(next(turn for turn in begun if turn.lane_state is None))
    assert world.turns.begin(context_make(A, f"s-{cold}")).lane_state is not None
    world.close()


@pytest.mark.parametrize("digest", [A, BASE_MARKER])
def test_a_page_is_in_the_ledger_until_every_sequence_of_its_turn_has_it(
    tmp_path: Path, digest: Digest
) -> None:
    world = TurnWorld(tmp_path / "slots")
    with world.node() as node:
        node.turn(digest, PROMPT)
        turn = node.turns.begin(context_make(digest), 2)
        assert turn.lane_state is not None
        owner = TENANT_ID if digest == BASE_MARKER else KEY
        held = {owner: {Category.KV: turn.lane_state.size}}
        turn.on_lane_filled()
        assert world.ledger.by_owner() == held
        turn.on_lane_filled()
        assert world.ledger.holdings() == ()
        turn.release()
        # However it ends.
        turn = node.turns.begin(context_make(digest), 2)
        assert world.ledger.by_owner() == held
        turn.release()
        assert world.ledger.holdings() == ()


def test_a_session_goes_on_cold_where_there_is_no_memory_for_its_page(tmp_path: Path) -> None:
    world = TurnWorld(tmp_path / "slots")
    with world.node() as node:
        cold = node.turn(A, PROMPT)
    world.ledger = Ledger(1)
    with world.node() as node:
        turn = node.turns.begin(context_make(A))
        turn.release()
        assert turn.lane_state is None
        assert node.turn(A, PROMPT) == cold
        assert world.ledger.holdings() == ()
    # The page is as it was: nothing is wrong with it.
    world.ledger = Ledger(2**30)
    with world.node() as node:
        assert node.turn(A, (*PROMPT, *cold.tokens, 3)).reused > 0


def test_a_session_without_a_page_holds_nothing(tmp_path: Path) -> None:
    world = TurnWorld(tmp_path / "slots")
    with world.node() as node:
        node.turns.begin(context_make(A))
        assert world.ledger.holdings() == ()


def test_a_page_is_gone_and_out_of_the_ledger_once_it_is_in_its_lanes(tmp_path: Path) -> None:
    world = TurnWorld(tmp_path / "slots")
    with world.node() as node:
        first = node.turn(A, PROMPT)
        prompt = (*PROMPT, *first.tokens, 3)
        node.saved()
        turn = node.turns.begin(context_make(A), 2)
        assert turn.lane_state is not None
        left = weakref.ref(turn.lane_state.keys[0])
        jobs = [
            Job(
                prompt,
                300,
                A,
                lane_state=turn.lane_state,
                on_lane_filled=turn.on_lane_filled,
                root_key=turn.root_key,
            )
            for _ in range(2)
        ]
        release = turn.release
        del turn
        generations = [node.engine.submit(job) for job in jobs]
        del jobs
        for generation in generations:
            next(generation.tokens())
            assert generation.reused_tokens > len(PROMPT)
        # They run on.
        assert not any(generation.ended for generation in generations)
        assert world.ledger.holdings() == ()
        assert left() is None
        for generation in generations:
            generation.cancel()
            list(generation.tokens())
        release()


def test_no_state_is_copied_that_nobody_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    state = Lanes.state

    def seen(lanes: Lanes, lane: int, tokens: tuple[int, ...]) -> LaneState:
        copied.append(lane)
        return state(lanes, lane, tokens)

    monkeypatch.setattr(Lanes, "state", seen)
    world = TurnWorld(tmp_path / "slots", ledger=Ledger(1))
    with world.node() as node:
        node.turn(A, PROMPT)
        assert copied == []
    world.ledger = Ledger(2**30)
    with world.node() as node:
        node.turn(A, PROMPT)
        assert len(copied) == 1
    assert [e.kind for e in world.events] == [SlotEventKind.NOT_SAVED, SlotEventKind.SAVED]
