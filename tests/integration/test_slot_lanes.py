"""Every reason to refuse a page, on a real engine: no byte of any lane changes, and once.

Lanes are filled before the turn begins, so that zeroing one would be seen as well as filling it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch

from gpu_worker.serving import turns
from gpu_worker.serving.identity import Layout
from gpu_worker.serving.lanes import Lanes, LaneState
from gpu_worker.serving.slot_sidecar import Refusal
from registry_service.domain.canonical import canonical_json, json_parse
from registry_service.domain.digests import Digest, digest_of
from registry_service.trust.routing_context import BASE_MARKER
from tests.identities import A, B
from tests.integration.turn_world import (
    PROMPT,
    TurnNode,
    TurnWorld,
    adapter_make,
    context_make,
    tiny_model,
)

pytestmark = pytest.mark.torch

OTHER = digest_of(b"other")
OTHER_TENANT = UUID(int=2001)
# The page that is asked for; the session's page before it; and the pages of others.
CURRENT, OLDER, OF_SESSION, OF_SUBJECT, OF_TENANT = 2, 1, 3, 4, 5
BASE_SESSION = "s-base"


@dataclass(frozen=True)
class Saved:
    """Folders as nodes left them: the one that is asked, one before its last turn, another's."""

    folder: Path
    before: Path
    other_node: Path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    root = tmp_path_factory.mktemp("saved")
    found = Saved(root / "slots", root / "before", root / "other")
    with TurnWorld(found.folder).node() as node:
        node.turn(A, PROMPT)
        node.saved()
        shutil.copytree(found.folder, found.before)
        turns: list[dict[str, Any]] = [
            {},
            {"session": "s-2"},
            {"subject": "other"},
            {"tenant_id": OTHER_TENANT},
        ]
        for turn in turns:
            node.turn(A, PROMPT, **turn)
            # Pages have their numbers in the order in which they are saved.
            node.saved()
        node.turn(BASE_MARKER, PROMPT, BASE_SESSION)
    with TurnWorld(found.other_node, secret=b"o" * 32).node() as node:
        node.turn(A, PROMPT)
    yield found


@dataclass(frozen=True)
class Case:
    """A page that must not be restored: how it came to be so, and why it is refused."""

    name: str
    reason: Refusal
    spoil: Callable[[Path, Saved], object] = lambda *_: None
    digest: Digest = A
    context: dict[str, Any] = field(default_factory=dict)
    node: dict[str, Any] = field(default_factory=dict)
    code: dict[str, Any] = field(default_factory=dict)
    lane_tokens: int = 512


def remove(name: str) -> Callable[[Path, Saved], object]:
    return lambda folder, _: (folder / f"{CURRENT}.{name}").unlink()


def content(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path, Saved], object]:
    def spoil(folder: Path, _: Saved) -> None:
        path = folder / f"{CURRENT}.{name}"
        path.write_bytes(change(path.read_bytes()))

    return spoil


def flip(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


def sidecar(**fields: Any) -> Callable[[Path, Saved], object]:
    """Other words in the sidecar, in its form."""
    return content(
        "sidecar",
        lambda data: canonical_json({**json_parse(data, what="sidecar", limit=2**20), **fields}),
    )


def page(number: int, source: str = "folder") -> Callable[[Path, Saved], object]:
    """Another page in its place, with its sidecar."""

    def spoil(folder: Path, saved: Saved) -> None:
        for name in ("sidecar", "page"):
            shutil.copyfile(
                getattr(saved, source) / f"{number}.{name}", folder / f"{CURRENT}.{name}"
            )

    return spoil


def pipe(folder: Path, _: Saved) -> None:
    (folder / f"{CURRENT}.page").unlink()
    os.mkfifo(folder / f"{CURRENT}.page")


def link(folder: Path, saved: Saved) -> None:
    (folder / f"{CURRENT}.page").unlink()
    (folder / f"{CURRENT}.page").symlink_to(saved.folder / f"{CURRENT}.page")


ONE, TWO = {"digest": A, "scale": 1}, {"digest": B, "scale": 1}
CASES = (
    Case("no sidecar", Refusal.MISSING, remove("sidecar")),
    Case("no state", Refusal.MISSING, remove("page")),
    Case("an empty sidecar", Refusal.UNREADABLE, content("sidecar", lambda _: b"")),
    Case("another form", Refusal.UNREADABLE, content("sidecar", lambda data: data + b" ")),
    Case("a pipe", Refusal.UNREADABLE, pipe),
    Case("a link to the page itself", Refusal.UNREADABLE, link),
    Case("a longer state", Refusal.UNREADABLE, content("page", lambda data: data + b" ")),
    Case("a shorter state", Refusal.STATE, content("page", lambda data: data[:-1])),
    Case("an empty state", Refusal.STATE, content("page", lambda _: b"")),
    Case("a changed state", Refusal.STATE, content("page", flip)),
    Case("a changed sidecar", Refusal.SIDECAR, sidecar(tokenCount=80)),
    Case("an older format", Refusal.FORMAT, sidecar(formatVersion=0)),
    Case("a newer node's format", Refusal.FORMAT, code={"FORMAT_VERSION": 2}),
    Case("two adapters", Refusal.COMBINATION, sidecar(adapters=[ONE, TWO])),
    Case("two in the other order", Refusal.COMBINATION, sidecar(adapters=[TWO, ONE])),
    Case("another node's page", Refusal.NODE_KEY, page(1, "other_node")),
    Case("the page before", Refusal.OLDER_PAGE, page(OLDER, "before")),
    Case("another session's page", Refusal.SESSION, page(OF_SESSION)),
    Case("another subject's page", Refusal.SUBJECT, page(OF_SUBJECT)),
    Case("another tenant's page", Refusal.TENANT, page(OF_TENANT)),
    Case("another adapter", Refusal.ADAPTER, digest=B),
    Case("an adapter replaced in place", Refusal.ADAPTER, digest=digest_of(b"second upload")),
    Case("an adapter's page, no adapter", Refusal.ADAPTER, digest=BASE_MARKER),
    Case("the base's page, an adapter", Refusal.ADAPTER, context={"session_id": BASE_SESSION}),
    Case("another scale", Refusal.SCALE, code={"_SCALE": 0.5}),
    Case("another base", Refusal.BASE, node={"base_digest": OTHER}),
    Case("another tokenizer", Refusal.TOKENIZER, context={"tokenizer_digest": OTHER}),
    Case("another template", Refusal.TEMPLATE, context={"chat_template_digest": OTHER}),
    Case("another dtype", Refusal.DTYPE, node={"dtype": torch.bfloat16}),
    Case(
        "another layout",
        Refusal.LAYOUT,
        node={"layout": Layout(layers=((2, 8, 8),) * 2, block_tokens=32)},
    ),
    Case("another engine", Refusal.ENGINE, code={"ENGINE_VERSION": "0"}),
    Case("other libraries", Refusal.LIBRARIES, node={"library_versions": (("torch", "0"),)}),
    Case("longer than a lane", Refusal.LANE, lane_tokens=64),
)


def fill(node: TurnNode) -> None:
    """Put something into every lane."""
    generator = torch.Generator().manual_seed(9)
    for slab in node.slabs:
        slab.copy_(torch.randn(slab.shape, generator=generator))


def test_every_reason_for_which_a_page_is_refused_is_here() -> None:
    # No page of a revoked adapter is there to be refused.
    assert {case.reason for case in CASES} == {*Refusal} - {Refusal.REVOKED}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_page_is_refused_once_and_every_lane_is_as_it_was(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    folder = Path(shutil.copytree(saved.folder, tmp_path / "slots", symlinks=True))
    case.spoil(folder, saved)
    for name, value in case.code.items():
        monkeypatch.setattr(turns, name, value)
    world = TurnWorld(folder, lane_tokens=case.lane_tokens)
    prompt = PROMPT[:32]
    with world.node(**case.node) as node:
        if case.digest not in {A, B, BASE_MARKER}:
            node.engine.attach(case.digest, adapter_make(tiny_model(), 7))
        pages = len(node.slots.entries())
        fill(node)
        before = node.lanes_hash()
        for _ in range(2):
            turn = node.turns.begin(context_make(case.digest, **case.context))
            assert turn.lane_state is None
            assert node.lanes_hash() == before
            # The second time there is nothing to be refused any more.
            assert world.refusals() == [case.reason]
            assert len(node.slots.entries()) == pages - 1
        assert world.ledger.holdings() == ()
        for slab in node.slabs:
            slab.zero_()
        first = node.turn(case.digest, prompt, **case.context)
        assert first.reused == 0
        assert first == node.run(case.digest, prompt)
        # The session goes on, with what it saved now.
        second = node.turn(case.digest, (*prompt, *first.tokens, 3), **case.context)
        assert second.reused == len(prompt) + len(first.tokens) - 1
    assert world.refusals() == [case.reason]


def test_a_page_that_holds_changes_a_lane_when_its_turn_runs_and_not_before(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = Lanes.restore
    hashes: list[str] = []

    def seen(lanes: Lanes, lane: int, state: LaneState, count: int) -> None:
        hashes.append(node.lanes_hash())
        restore(lanes, lane, state, count)
        hashes.append(node.lanes_hash())

    monkeypatch.setattr(Lanes, "restore", seen)
    world = TurnWorld(Path(shutil.copytree(saved.folder, tmp_path / "slots")))
    with world.node() as node:
        before = node.lanes_hash()
        node.turns.begin(context_make(A)).release()
        assert node.lanes_hash() == before
        assert node.turn(A, (*PROMPT, 3)).reused == len(PROMPT)
        assert hashes[0] == before != hashes[1]
    assert world.refusals() == []
