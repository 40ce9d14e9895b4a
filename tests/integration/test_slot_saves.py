"""Places of saves: each tenant has a part of them, tenants take turns, a session's are in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from gpu_worker.serving.save_queue import PLACES, TENANT_PLACES
from gpu_worker.serving.slot_events import SlotEvent, SlotEventKind
from gpu_worker.serving.turns import Turn
from tests.identities import A
from tests.integration.session_world import OTHER_TENANT, STATE, SessionWorld
from tests.integration.slot_world import state_hash, state_make
from tests.integration.turn_world import TENANT_ID, context_make
from tests.waiting import until

pytestmark = pytest.mark.torch

TOKENS = len(STATE.tokens)
Begin = Callable[..., Turn]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[SessionWorld]:
    with SessionWorld.stuck(tmp_path / "slots") as world:
        yield world


@pytest.fixture
def begin(held: SessionWorld) -> Begin:
    """Begins the next turn of a new session of a tenant, or of the one that is named."""
    numbers = iter(range(100))

    def begin(tenant: UUID = TENANT_ID, session: str = "") -> Turn:
        session = session or f"s-{next(numbers)}"
        return held.turns.begin(context_make(A, session, tenant_id=tenant))

    return begin


def save(turn: Turn) -> None:
    assert turn.wants_lane_state(TOKENS)
    turn.on_lane_state(STATE)


def saved(world: SessionWorld) -> list[UUID]:
    return [e.tenant_id for e in world.events if e.kind is SlotEventKind.SAVED]


def test_one_tenants_backlog_costs_no_other_tenants_save_and_lets_it_go_first(
    held: SessionWorld, begin: Begin
) -> None:
    save(begin())
    held.key.sealing.wait()
    for _ in range(TENANT_PLACES):
        save(begin())
    assert not begin().wants_lane_state(TOKENS)
    for _ in range(2):
        save(begin(OTHER_TENANT))
    held.key.go.set()
    held.turns.close()
    one, other = TENANT_ID, OTHER_TENANT
    assert saved(held) == [one, other, one, other, one, one, one]


def test_all_tenants_together_have_so_many_places(held: SessionWorld, begin: Begin) -> None:
    save(begin())
    held.key.sealing.wait()
    tenants = [UUID(int=number) for number in range(PLACES // TENANT_PLACES)]
    for tenant in tenants * TENANT_PLACES:
        save(begin(tenant))
    assert not begin(OTHER_TENANT).wants_lane_state(TOKENS)
    assert held.skipped() == ["too many saves wait"]
    held.key.go.set()
    held.turns.close()
    assert saved(held) == [TENANT_ID, *tenants * TENANT_PLACES]
    assert held.ledger.holdings() == ()


def test_saves_of_one_session_are_done_in_order_beside_other_tenants(
    held: SessionWorld, begin: Begin
) -> None:
    turns = [begin(session="s") for _ in range(3)]
    states = [state_make(range(1, 401), seed=seed) for seed in range(3)]
    for turn, state in zip(turns, states, strict=True):
        turn.on_lane_state(state)
        save(begin(OTHER_TENANT))
    held.key.go.set()
    restored = begin(session="s").lane_state
    assert restored is not None
    assert state_hash(restored) == state_hash(states[-1])


def test_a_save_that_ends_with_a_fault_of_ours_ends_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SessionWorld(tmp_path / "slots", 2**30)
    told: list[SlotEvent] = []

    def hear(event: Any) -> None:
        told.append(event)
        if len(told) == 1:
            raise RuntimeError("injected")

    monkeypatch.setattr(world.slots, "_on_event", hear)
    for session in ("s-1", "s-2"):
        world.turns.begin(context_make(A, session)).on_lane_state(STATE)
    until(lambda: not world.turns._pending)
    assert [event.kind for event in told] == [SlotEventKind.SAVED] * 2
    assert world.ledger.holdings() == ()
    world.close()
