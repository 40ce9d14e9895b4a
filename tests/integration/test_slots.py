"""Slots on a real disk: what restores, and everything that is refused, once.

That no lane is touched meanwhile is seen on an engine, in ``test_slot_lanes``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from gpu_worker.serving.identity import Identity
from gpu_worker.serving.slot_events import SlotEventKind
from gpu_worker.serving.slot_key import NodeKey
from gpu_worker.serving.slot_sidecar import Refusal, Session
from registry_service.domain import limits
from registry_service.domain.digests import digest_of
from registry_service.trust.routing_context import BASE_MARKER
from tests.identities import IDENTITY, A, B
from tests.integration.slot_world import (
    SESSION,
    TOKENS,
    World,
    names,
    saved,
    state_hash,
    state_make,
    under,
)

pytestmark = pytest.mark.torch


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "slots")
    with ExitStack() as world.stack:
        yield world


def refused(
    world: World,
    reason: Refusal,
    identity: Identity = IDENTITY,
    session: Session = SESSION,
    **changes: Any,
) -> None:
    """The page is refused for this reason, dropped, and that is said once."""
    world.events.clear()
    slots = world.open(**changes)
    assert not world.restore(slots, session, identity)
    assert world.refusals() == [reason]
    # The turn after is cold without another word, and the next page restores.
    assert not world.restore(slots, session, identity)
    assert world.refusals() == [reason]
    assert not [name for name in names(world.folder) if name != "index"]
    state = state_make(TOKENS, identity=identity)
    assert slots.save(session, identity, state) is not None
    assert world.restore(slots, session, identity) == state_hash(state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("digest", [A, BASE_MARKER])
def test_after_a_restart_a_page_restores_bit_for_bit(world: World, digest: str, dtype: str) -> None:
    identity = replace(under(digest), dtype=dtype)
    expected = saved(world, identity)
    slots = world.open()
    assert world.restore(slots, SESSION, identity) == expected
    assert world.kinds() == [SlotEventKind.SAVED, SlotEventKind.RESTORED]
    assert world.events[-1].tokens == len(TOKENS)


def test_a_turn_without_a_page_is_cold_without_an_event(world: World) -> None:
    assert world.open().restore(SESSION, IDENTITY) is None
    assert world.events == []


def test_a_page_restores_until_the_next_one_is_saved(world: World) -> None:
    slots = world.open()
    for seed in (1, 2):
        state = state_make(TOKENS, seed)
        assert slots.save(SESSION, IDENTITY, state) == seed
        for _ in range(2):
            assert world.restore(slots) == state_hash(state)
    assert names(world.folder) == ["2.page", "2.sidecar", "index"]


OTHER = digest_of(b"other")


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("base_digest", OTHER, Refusal.BASE),
        ("adapters", ((B, 1.0),), Refusal.ADAPTER),
        ("adapters", ((A, 0.5),), Refusal.SCALE),
        ("adapters", BASE_MARKER, Refusal.ADAPTER),
        ("tokenizer_digest", OTHER, Refusal.TOKENIZER),
        ("chat_template_digest", OTHER, Refusal.TEMPLATE),
        ("dtype", "bfloat16", Refusal.DTYPE),
        ("layout", replace(IDENTITY.layout, block_tokens=32), Refusal.LAYOUT),
        ("engine_version", "2", Refusal.ENGINE),
        ("library_versions", (("torch", "0"),), Refusal.LIBRARIES),
    ],
)
def test_a_page_of_another_identity_is_refused_in_both_directions(
    world: World, part: str, value: Any, reason: Refusal
) -> None:
    other = replace(IDENTITY, **{part: value})
    saved(world)
    refused(world, reason, other)
    # What was saved under the other one is now refused under the first.
    refused(world, reason, IDENTITY)


def test_vllm_44250_and_llama_cpp_26207_kv_does_not_cross_adapters_through_a_file(
    world: World,
) -> None:
    saved(world, under(A))
    refused(world, Refusal.ADAPTER, under(B))


def test_an_adapter_replaced_in_place_is_another_digest(world: World) -> None:
    # Same name, same place, other bytes: the identity knows the bytes alone.
    saved(world, under(digest_of(b"weights, first upload")))
    refused(world, Refusal.ADAPTER, under(digest_of(b"weights, second upload")))


def test_a_base_page_is_refused_under_an_adapter(world: World) -> None:
    saved(world, under(BASE_MARKER))
    refused(world, Refusal.ADAPTER, under(A))


def test_pages_of_an_older_format_are_refused_once_after_an_upgrade(world: World) -> None:
    saved(world, IDENTITY)
    refused(world, Refusal.FORMAT, replace(IDENTITY, format_version=2))


def test_another_tenant_session_or_subject_has_another_slot(world: World) -> None:
    saved(world)
    slots = world.open()
    for identity, session in (
        (replace(IDENTITY, tenant_id=UUID(int=2001)), SESSION),
        (IDENTITY, Session("s-2", SESSION.subject)),
        (IDENTITY, Session(SESSION.session_id, "other")),
        (IDENTITY, Session("s-", "1app")),
    ):
        assert not world.restore(slots, session, identity)
    assert world.restore(slots, SESSION, IDENTITY)


@pytest.mark.parametrize(
    ("identity", "session", "reason"),
    [
        (replace(IDENTITY, tenant_id=UUID(int=2001)), SESSION, Refusal.TENANT),
        (IDENTITY, Session("s-2", SESSION.subject), Refusal.SESSION),
        (IDENTITY, Session(SESSION.session_id, "other"), Refusal.SUBJECT),
    ],
)
def test_somebody_elses_page_in_a_slots_place_is_refused(
    world: World, identity: Identity, session: Session, reason: Refusal
) -> None:
    saved(world, identity, session)
    saved(world)
    for name in ("sidecar", "page"):
        shutil.copyfile(world.folder / f"1.{name}", world.folder / f"2.{name}")
    slots = world.open()
    world.events.clear()
    assert not world.restore(slots, SESSION, IDENTITY)
    assert world.refusals() == [reason]
    assert [entry.page for entry in slots.entries()] == [1]


def test_an_older_page_of_the_same_session_is_refused(world: World, tmp_path: Path) -> None:
    saved(world)
    shutil.copytree(world.folder, tmp_path / "older")
    saved(world)
    for name in ("sidecar", "page"):
        shutil.copyfile(tmp_path / "older" / f"1.{name}", world.folder / f"2.{name}")
    refused(world, Refusal.OLDER_PAGE)


def test_a_page_of_the_same_number_that_is_not_the_named_one_is_refused(
    world: World, tmp_path: Path
) -> None:
    # As a save leaves it that was cut off before the index: sealed by this node, for this session.
    saved(world)
    other = World(tmp_path / "other", stack=world.stack)
    assert other.open().save(SESSION, IDENTITY, state_make(TOKENS, seed=5)) == 1
    for name in ("1.sidecar", "1.page"):
        shutil.copyfile(other.folder / name, world.folder / name)
    refused(world, Refusal.SIDECAR)


def test_an_older_page_under_its_own_name_is_swept(world: World, tmp_path: Path) -> None:
    saved(world)
    shutil.copytree(world.folder, tmp_path / "older")
    saved(world)
    for name in ("sidecar", "page"):
        shutil.copyfile(tmp_path / "older" / f"1.{name}", world.folder / f"1.{name}")
    world.open()
    assert {*names(world.folder)} == {"index", "2.sidecar", "2.page"}


@pytest.mark.parametrize("name", ["1.sidecar", "1.page"])
def test_a_missing_half_is_refused(world: World, name: str) -> None:
    saved(world)
    (world.folder / name).unlink()
    refused(world, Refusal.MISSING)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to("aside")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def large(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(limits.SLOT_STATE_BYTES + 1)


@pytest.mark.parametrize("spoil", [link, pipe, large])
@pytest.mark.parametrize("name", ["1.sidecar", "1.page"])
def test_what_is_no_plain_file_of_allowed_size_is_unreadable(
    world: World, name: str, spoil: Callable[[Path], None]
) -> None:
    saved(world)
    slots = world.open()
    spoil(world.folder / name)
    assert not world.restore(slots, SESSION, IDENTITY)
    assert world.refusals() == [Refusal.UNREADABLE]
    assert slots.entries() == ()


@pytest.mark.parametrize(
    ("name", "reason"), [("1.sidecar", Refusal.UNREADABLE), ("1.page", Refusal.STATE)]
)
def test_an_empty_file_is_refused(world: World, name: str, reason: Refusal) -> None:
    saved(world)
    empty(world.folder / name)
    refused(world, reason)


def test_a_page_of_another_node_is_refused(world: World, tmp_path: Path) -> None:
    other = World(tmp_path / "other", secret=b"o" * 32)
    saved(other)
    saved(world)
    for name in ("1.sidecar", "1.page"):
        shutil.copyfile(other.folder / name, world.folder / name)
    refused(world, Refusal.NODE_KEY)


def test_with_a_new_node_key_no_page_counts(world: World) -> None:
    saved(world)
    world.events.clear()
    slots = world.open(key=NodeKey(b"n" * 32))
    assert world.refusals() == [Refusal.UNREADABLE]
    assert not world.restore(slots, SESSION, IDENTITY)
    assert slots.entries() == ()
    assert not [name for name in names(world.folder) if name != "index"]
    # The next save makes an index of the new key.
    slots.save(SESSION, IDENTITY, state_make(TOKENS))
    slots.close()
    world.stack.pop_all()
    assert len(world.open(key=NodeKey(b"n" * 32)).entries()) == 1


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_without_its_index_no_page_counts(world: World, content: bytes) -> None:
    saved(world)
    (world.folder / "index").write_bytes(content)
    slots = world.open()
    assert not world.restore(slots, SESSION, IDENTITY)
    assert slots.entries() == ()


def test_a_page_tells_nothing_without_the_key(world: World) -> None:
    saved(world)
    plain = state_make(TOKENS).keys[0].numpy().tobytes()
    page = (world.folder / "1.page").read_bytes()
    assert plain[:64] not in page
    assert b"tokens" not in page
    # Equal states look different, so equal answers cannot be told.
    saved(world)
    assert (world.folder / "2.page").read_bytes()[12:] != page[12:]
    # A plain digest of the tokens would let whoever reads it confirm a guess.
    from gpu_worker.serving.identity import tokens_encode

    guess = digest_of(tokens_encode(TOKENS))
    assert guess.encode() not in (world.folder / "2.sidecar").read_bytes()
