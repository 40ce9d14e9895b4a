"""A node whose save fails or is cut off, at each of its file operations: base, memory, answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpu_worker.serving.ledger import Category, Ledger
from gpu_worker.serving.slot_events import SlotEventKind
from tests.identities import A
from tests.integration.slot_world import MOST, Crash, Disk
from tests.integration.turn_world import PROMPT, Answer, TurnNode, TurnWorld, context_make

pytestmark = pytest.mark.torch


@pytest.fixture
def world(tmp_path: Path) -> TurnWorld:
    return TurnWorld(tmp_path / "slots", whole=True)


def ledger_check(node: TurnNode, ledger: Ledger, pages: int = 0) -> None:
    """What the ledger says is what lies there, and ``pages`` bytes of restored ones."""
    taken, there = ledger.taken(), node.taken()
    assert taken[Category.BASE] == there["base"]
    assert taken[Category.ADAPTER] + taken[Category.WORKSPACE] == there["bank"]
    assert taken[Category.KV] == there["lanes"] + there["blocks"] + pages
    assert node.engine.references == 0


def next_turn(node: TurnNode, ledger: Ledger, prompt: tuple[int, ...]) -> Answer:
    """The session's next turn, with a look at the memory at each stage."""
    turn = node.turns.begin(context_make(A))
    ledger_check(node, ledger, 0 if turn.lane_state is None else turn.lane_state.size)
    turn.release()
    ledger_check(node, ledger)
    answer = node.turn(A, prompt)
    assert answer.same(node.run(A, prompt))
    node.saved()
    ledger_check(node, ledger)
    return answer


@dataclass(frozen=True)
class Cut:
    """A session's second turn, whose save met a fault: its prompt, its answer, and the disk."""

    prompt: tuple[int, ...]
    answer: Answer
    disk: Disk


def cut_turn(node: TurnNode, at: int, error: type[BaseException], wait: Callable[[], None]) -> Cut:
    """Two turns; the file operation of this number fails in the second. ``wait`` for its save."""
    first = node.turn(A, PROMPT)
    turn = node.turns.begin(context_make(A))
    prompt = (*PROMPT, *first.tokens, 3)
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, at, error)
        answer = node.go_on(turn, A, prompt)
        wait()
    assert disk.failed is (at < MOST)
    return Cut(prompt, answer, disk)


@pytest.mark.parametrize("error", [OSError, MemoryError])
@pytest.mark.parametrize("at", range(1, MOST + 1))
def test_a_node_whose_save_fails_goes_on_with_the_same_base_and_memory(
    world: TurnWorld, at: int, error: type[Exception]
) -> None:
    with world.node() as node:
        base = node.base_digest()
        cut = cut_turn(node, at, error, node.saved)
        ledger_check(node, world.ledger)
        assert cut.disk.failed or SlotEventKind.NOT_SAVED not in [e.kind for e in world.events]
        next_turn(node, world.ledger, (*cut.prompt, *cut.answer.tokens, 4))
        assert node.base_digest() == base
    assert world.refusals() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("at", range(1, MOST + 1))
def test_a_node_whose_save_was_cut_off_starts_again_with_the_same_base_and_memory(
    world: TurnWorld, at: int
) -> None:
    with world.node() as node:
        base = node.base_digest()
        # The thread that saves is gone as the process would be, or done.
        cut = cut_turn(node, at, Crash, node.turns.close)
    with world.node() as node:
        assert node.base_digest() == base
        ledger_check(node, world.ledger)
        longer = (*cut.prompt, *cut.answer.tokens, 4)
        reused = next_turn(node, world.ledger, longer).reused
        # The page before or the new one, whole: all of its turn but the last token.
        # The third turn's two tokens are new, and the second's was one more than the first's.
        assert reused in {len(cut.prompt) - 2, len(longer) - 2}
        assert cut.disk.failed or reused == len(longer) - 2
        assert node.base_digest() == base
    assert world.refusals() == []
