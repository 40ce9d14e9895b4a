"""Sessions over slots on a real engine: reuse under one identity, and never under another.

The sequences are those that made other servers answer with one adapter's KV under another; each
answer is compared with a cold single run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch

from gpu_worker.serving.adapter import Part
from gpu_worker.serving.lanes import Lanes, LaneState
from gpu_worker.serving.sequence import EngineError
from gpu_worker.serving.slot_events import SlotEventKind
from gpu_worker.serving.slot_sidecar import Refusal
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import MalformedError
from registry_service.trust.routing_context import BASE_MARKER
from tests.identities import A, B
from tests.integration.slot_world import state_hash
from tests.integration.turn_world import (
    NEW,
    PROMPT,
    TENANT_ID,
    Answer,
    TurnNode,
    TurnWorld,
    adapter_make,
    context_make,
    tiny_model,
)

pytestmark = pytest.mark.torch

OTHER_PROMPT = tuple((11 * n) % 90 + 1 for n in range(80))
MORE = (3, 14, 15)


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TurnNode]:
    """A node whose runs know nothing of each other."""
    with TurnWorld(tmp_path_factory.mktemp("cold") / "slots").node() as node:
        yield node


@pytest.fixture
def world(tmp_path: Path) -> TurnWorld:
    return TurnWorld(tmp_path / "slots")


def follow_up(answer: Answer, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    return (*prompt, *answer.tokens, *MORE)


def test_the_two_adapters_and_the_base_answer_differently(cold: TurnNode) -> None:
    answers = {cold.run(digest, PROMPT).tokens for digest in (A, B, BASE_MARKER)}
    assert len(answers) == 3


@pytest.mark.parametrize("digest", [A, BASE_MARKER], ids=["adapter", "base"])
def test_after_a_restart_the_next_turn_reuses_its_tokens_and_answers_as_if_cold(
    world: TurnWorld, cold: TurnNode, digest: Digest
) -> None:
    with world.node() as node:
        first = node.turn(digest, PROMPT)
        assert first.reused == 0
        assert first.same(cold.run(digest, PROMPT))
    prompt = follow_up(first)
    with world.node() as node:
        second = node.turn(digest, prompt)
    # All of the turn before but its last token, which was not run there.
    assert second.reused == len(PROMPT) + len(first.tokens) - 1
    assert second.same(cold.run(digest, prompt))
    assert world.refusals() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_kv_continues_bit_for_bit_like_kv_that_was_never_on_disk(
    world: TurnWorld, dtype: torch.dtype
) -> None:
    states: list[LaneState] = []
    with world.node(dtype=dtype) as node:
        turn = node.turns.begin(context_make(A))

        def keep(state: LaneState) -> None:
            states.append(state)
            turn.on_lane_state(state)

        first = node.run(A, PROMPT, on_lane_state=keep)
        straight = node.run(A, follow_up(first), lane_state=states[0])
    with world.node(dtype=dtype) as node:
        restored = node.turns.begin(context_make(A)).lane_state
        assert restored is not None
        assert state_hash(restored) == state_hash(states[0])
        assert node.run(A, follow_up(first), lane_state=restored) == straight
    assert straight.reused > len(PROMPT)


def test_llama_cpp_adapter_a_then_no_adapter_on_the_same_session(
    world: TurnWorld, cold: TurnNode
) -> None:
    with world.node() as node:
        first = node.turn(A, PROMPT)
        second = node.turn(BASE_MARKER, follow_up(first))
        assert second.reused == 0
        assert second.same(cold.run(BASE_MARKER, follow_up(first)))
        assert world.refusals() == [Refusal.ADAPTER]
        # And back: the base's page under the adapter.
        third = node.turn(A, PROMPT)
        assert third.same(cold.run(A, PROMPT))
        assert world.refusals() == [Refusal.ADAPTER] * 2


def test_llama_cpp_saved_under_a_restored_under_b(world: TurnWorld, cold: TurnNode) -> None:
    with world.node() as node:
        first = node.turn(A, PROMPT)
        second = node.turn(B, follow_up(first))
        assert (second.reused, world.refusals()) == (0, [Refusal.ADAPTER])
        assert second.same(cold.run(B, follow_up(first)))
        # Once: what is saved now is B's, and goes on.
        third = node.turn(B, follow_up(second, follow_up(first)))
        assert third.reused > len(PROMPT)
        assert third.same(cold.run(B, follow_up(second, follow_up(first))))
        assert world.refusals() == [Refusal.ADAPTER]


@pytest.mark.parametrize("digest", [A, B], ids=["the same adapter", "the other one"])
def test_llama_cpp_restarted_with_the_adapters_in_another_order(
    world: TurnWorld, cold: TurnNode, digest: Digest
) -> None:
    with world.node(adapters=(A, B)) as node:
        first = node.turn(A, PROMPT)
    with world.node(adapters=(B, A)) as node:
        second = node.turn(digest, follow_up(first))
    assert (second.reused > 0) is (digest == A)
    assert world.refusals() == ([] if digest == A else [Refusal.ADAPTER])
    assert second.same(cold.run(digest, follow_up(first)))


def test_llama_cpp_restarted_restored_and_no_adapter(world: TurnWorld, cold: TurnNode) -> None:
    with world.node() as node:
        first = node.turn(A, PROMPT)
    with world.node() as node:
        second = node.turn(BASE_MARKER, follow_up(first))
    assert (second.reused, world.refusals()) == (0, [Refusal.ADAPTER])
    assert second.same(cold.run(BASE_MARKER, follow_up(first)))


def test_llama_cpp_a_p_b_p2_b_p_through_the_cache_in_memory(
    world: TurnWorld, cold: TurnNode
) -> None:
    with world.node() as node:
        node.turn(A, PROMPT, "s-1")
        node.turn(B, OTHER_PROMPT, "s-2")
        third = node.turn(B, PROMPT, "s-3")
        assert third.reused == 0
        assert third.same(cold.run(B, PROMPT))
        # The cache does work: a whole block is shared between sessions of one identity.
        again = node.turn(B, PROMPT, "s-4")
        assert again.reused == 64
        assert again == third._replace(reused=64)
        other_tenant = node.turn(B, PROMPT, "s-5", tenant_id=UUID(int=2001))
        assert other_tenant.reused == 0


def test_llama_cpp_an_unknown_adapter_is_refused_and_not_the_base(world: TurnWorld) -> None:
    with world.node() as node, pytest.raises(EngineError, match="not attached"):
        node.turn(digest_of(b"unknown"), PROMPT)


def test_llama_cpp_a_nan_adapter_does_not_break_later_turns_without_one(
    world: TurnWorld, cold: TurnNode
) -> None:
    broken = adapter_make(tiny_model(), 5)
    parts = {
        name: Part(part.a * torch.nan, part.b, part.scaling) for name, part in broken.parts.items()
    }
    with world.node() as node:
        name = digest_of(b"nan")
        node.engine.attach(name, replace(broken, parts=parts))
        with pytest.raises(EngineError, match="not finite"):
            node.turn(name, PROMPT)
        after = node.turn(BASE_MARKER, PROMPT)
        assert after.reused == 0
        assert after.same(cold.run(BASE_MARKER, PROMPT))
        node.turns.begin(context_make(BASE_MARKER))
        assert [entry.adapter_digest for entry in node.slots.entries()] == [BASE_MARKER]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer_digest": digest_of(b"other")}, Refusal.TOKENIZER),
        ({"chat_template_digest": digest_of(b"other")}, Refusal.TEMPLATE),
    ],
)
def test_a_turn_with_another_tokenizer_or_template_is_cold(
    world: TurnWorld, cold: TurnNode, change: dict[str, Any], reason: Refusal
) -> None:
    with world.node() as node:
        first = node.turn(A, PROMPT)
        second = node.turn(A, follow_up(first), **change)
    assert (second.reused, world.refusals()) == (0, [reason])
    assert second.same(cold.run(A, follow_up(first)))


@pytest.mark.parametrize(
    "change",
    [{"tenant_id": UUID(int=2001)}, {"session_id": "s-9"}, {"subject": "other"}],
    ids=["tenant", "session", "subject"],
)
def test_nobody_else_reuses_a_sessions_kv(world: TurnWorld, change: dict[str, Any]) -> None:
    with world.node() as node:
        first = node.turn(A, PROMPT[:40])
        context = context_make(A, **change)
        assert node.turns.begin(context).lane_state is None
        assert node.turns.begin(context_make(A)).lane_state is not None
        assert first.reused == 0


def test_a_revoked_adapters_pages_are_gone_and_none_is_saved_any_more(world: TurnWorld) -> None:
    with world.node() as node:
        node.turn(A, PROMPT, "s-1")
        node.turn(A, PROMPT, "s-2")
        node.turn(B, PROMPT, "s-3")
        # A session's next turn waits for its save.
        for session in ("s-1", "s-2", "s-3"):
            node.turns.begin(context_make(A if session != "s-3" else B, session))
        assert node.slots.remove(A) == 2
        node.turn(A, PROMPT, "s-1")
        node.turns.begin(context_make(A, "s-1"))
        assert [entry.adapter_digest for entry in node.slots.entries()] == [B]


@pytest.mark.parametrize("digest", [A, BASE_MARKER], ids=["adapter", "base"])
def test_a_page_that_no_lane_takes_is_one_cold_prefill_dropped_and_said(
    world: TurnWorld, cold: TurnNode, monkeypatch: pytest.MonkeyPatch, digest: Digest
) -> None:
    restore = Lanes.restore
    tried: list[LaneState] = []

    def torn(lanes: Lanes, lane: int, state: LaneState, count: int) -> None:
        restore(lanes, lane, state, count)
        tried.append(state)
        raise RuntimeError("injected")

    with world.node() as node:
        first = node.turn(digest, PROMPT)
        prompt = follow_up(first)
        with monkeypatch.context() as patch:
            patch.setattr(Lanes, "restore", torn)
            turn = node.turns.begin(context_make(digest))
            options = {
                "lane_state": turn.lane_state,
                "on_restore_failed": turn.on_restore_failed,
            }
            # Two answers to one request: both are cold, and the page is refused once.
            second, again = (node.run(digest, prompt, **options) for _ in range(2))
            assert second == again == cold.run(digest, prompt)
            assert second.reused == 0
            # None of them saved a page: the session has none, and does not try this one again.
            third = node.turn(digest, prompt)
            assert third == second._replace(reused=64), "of the first turn's prompt, in memory"
            assert len(tried) == 2
        assert world.refusals() == [Refusal.LANE]
        (told,) = [event for event in world.events if event.reason == Refusal.LANE]
        assert (told.page, told.tenant_id, told.adapter_digest) == (1, TENANT_ID, digest)
        assert told.got == "'RuntimeError'"
        # The turn after it goes on from what the cold one saved.
        longer = follow_up(third, prompt)
        fourth = node.turn(digest, longer)
        assert fourth.reused == len(prompt) + len(third.tokens) - 1
        assert fourth.same(cold.run(digest, longer))
    assert world.refusals() == [Refusal.LANE]


@pytest.mark.parametrize("digest", [A, BASE_MARKER], ids=["adapter", "base"])
def test_a_page_longer_than_the_lanes_of_a_restarted_node_is_one_cold_prefill(
    world: TurnWorld, digest: Digest
) -> None:
    with world.node() as node:
        node.turn(digest, PROMPT)
    world.lane_tokens = 64
    with world.node() as node:
        first = node.turn(digest, MORE)
        assert first == node.run(digest, MORE)
        assert node.turn(digest, (*MORE, *first.tokens, 5)).reused > len(MORE)
    (told,) = [event for event in world.events if event.kind is SlotEventKind.REFUSED]
    assert (told.reason, told.page, told.tenant_id) == (Refusal.LANE, 1, TENANT_ID)
    assert (told.expected, told.got) == ("'at most 64 tokens'", repr(str(len(PROMPT) + NEW - 1)))
    assert [event.tokens for event in world.events if event.kind is SlotEventKind.RESTORED] == [
        len(MORE) + NEW - 1
    ]


def test_a_page_as_long_as_a_lane_is_restored(world: TurnWorld) -> None:
    with world.node() as node:
        # A turn's last token is not run.
        node.run(
            A, PROMPT[:52], new=13, on_lane_state=node.turns.begin(context_make(A)).on_lane_state
        )
    world.lane_tokens = 64
    with world.node() as node:
        turn = node.turns.begin(context_make(A))
        assert turn.lane_state is not None
        assert len(turn.lane_state.tokens) == 64
        assert node.run(A, PROMPT[:40], lane_state=turn.lane_state).reused == 39


def test_a_whole_older_folder_that_is_put_back_gives_its_own_session_older_kv_and_right_answers(
    world: TurnWorld, cold: TurnNode, tmp_path: Path
) -> None:
    with world.node() as node:
        first = node.turn(A, PROMPT)
    older = tmp_path / "older"
    shutil.copytree(world.folder, older)
    with world.node() as node:
        prompt = follow_up(first)
        second = node.turn(A, prompt)
    shutil.rmtree(world.folder)
    older.rename(world.folder)
    with world.node() as node:
        prompt = follow_up(second, prompt)
        assert node.turns.begin(context_make(A, "s-2")).lane_state is None
        third = node.turn(A, prompt)
        # What the older page knows of the prompt; the rest is computed.
        assert third.reused == len(PROMPT) + len(first.tokens) - 1
        assert third.same(cold.run(A, prompt))
        assert node.turn(B, prompt).reused == 0
    assert world.refusals() == [Refusal.ADAPTER]


def test_a_page_that_was_replaced_meanwhile_is_not_dropped(world: TurnWorld) -> None:
    with world.node() as node:
        node.turn(A, PROMPT)
        late = node.turns.begin(context_make(A))
        assert late.on_restore_failed is not None
        node.turn(A, OTHER_PROMPT)
        node.turns.begin(context_make(A))
        late.on_restore_failed(RuntimeError("injected"))
        assert node.turns.begin(context_make(A)).lane_state is not None
        assert [entry.page for entry in node.slots.entries()] == [2]
    assert world.refusals() == []


def test_a_turn_without_a_page_has_nothing_to_refuse(world: TurnWorld) -> None:
    with world.node() as node:
        assert node.turns.begin(context_make(A)).on_restore_failed is None


def test_a_context_without_every_part_begins_no_turn(world: TurnWorld) -> None:
    with world.node() as node:
        for change in ({"chat_template_digest": ""}, {"tokenizer_digest": ""}, {"subject": ""}):
            with pytest.raises(MalformedError):
                node.turns.begin(context_make(A, **change))
        pair: Any = [A, B]
        with pytest.raises(MalformedError):
            node.turns.begin(context_make(pair))
