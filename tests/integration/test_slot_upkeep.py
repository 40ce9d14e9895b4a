"""The folder of slots over time: its key and modes, shares, revocation, and many at once."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch

from gpu_worker.serving.slot_events import SlotEventKind
from gpu_worker.serving.slot_index import Budget
from gpu_worker.serving.slot_key import NodeKey
from gpu_worker.serving.slot_sidecar import Refusal, Session
from gpu_worker.serving.store import NodeStore
from registry_service.domain.errors import UnavailableError
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

GOOD = state_make(TOKENS)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "slots")
    with ExitStack() as world.stack:
        yield world


def test_files_and_folder_are_this_processs_alone(world: World) -> None:
    saved(world)
    assert stat.S_IMODE(world.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in world.folder.iterdir()} == {0o600}


def test_a_folder_that_others_can_enter_or_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "file").write_text("")
    for name in ("open", "link", "file", "no/parent"):
        with pytest.raises(UnavailableError, match=name):
            World(tmp_path / name).open()


def test_the_node_key_is_made_once_and_refused_when_others_can_read_it(tmp_path: Path) -> None:
    store = NodeStore(tmp_path / "node", url="http://registry.test", node="node-1")
    path = tmp_path / "node" / "node.key"
    assert store.node_key().key_id == store.node_key().key_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(names(tmp_path / "node")) == ["adapters", "lock", "node.key"]
    path.chmod(0o640)
    with pytest.raises(UnavailableError, match="0600"):
        store.node_key()
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(UnavailableError, match="32 bytes"):
        store.node_key()
    path.rename(tmp_path / "aside")
    path.symlink_to(tmp_path / "aside")
    with pytest.raises(UnavailableError, match=r"node\.key"):
        store.node_key()
    store.close()


def test_two_node_keys_share_nothing() -> None:
    one, two = NodeKey(b"1" * 32), NodeKey(b"2" * 32)
    assert one.key_id != two.key_id
    assert one.digest("tokens", b"x") != two.digest("tokens", b"x")
    assert one.digest("tokens", b"x") != one.digest("state", b"x")
    assert b"1111" not in repr(vars(one)).encode()


def test_one_tenant_keeps_its_share_and_page_and_sidecar_count_as_one(world: World) -> None:
    saved(world)
    (size,) = [entry.size for entry in world.open().entries()]
    on_disk = sum((world.folder / f"1.{name}").stat().st_size for name in ("page", "sidecar"))
    assert size == on_disk
    world.stack.close()
    world.budget = Budget(node_bytes=100 * size, tenant_bytes=2 * size + 20)
    slots = world.open()
    other = replace(IDENTITY, tenant_id=UUID(int=2001))
    assert slots.save(SESSION, other, GOOD) is not None
    for number in range(4):
        assert slots.save(Session(f"t-{number}", "app"), IDENTITY, GOOD) is not None
    held = slots.entries()
    assert [entry.tenant_id for entry in held].count(IDENTITY.tenant_id) == 2
    assert world.restore(slots, SESSION, other)
    assert not world.restore(slots, Session("t-0", "app"), IDENTITY)
    assert world.restore(slots, Session("t-3", "app"), IDENTITY)
    files = {f"{e.page}.{name}" for e in held for name in ("page", "sidecar")}
    assert {*names(world.folder)} == files | {"index"}
    assert world.kinds().count(SlotEventKind.TRIMMED) == 3


def test_a_page_over_the_budget_is_not_saved_and_the_one_before_stays(world: World) -> None:
    saved(world)
    (size,) = [entry.size for entry in world.open().entries()]
    world.stack.close()
    world.budget = Budget(tenant_bytes=size)
    slots = world.open()
    assert slots.save(SESSION, IDENTITY, state_make(range(1, 60))) is None
    assert world.events[-1].kind is SlotEventKind.NOT_SAVED
    assert "bytes" in world.events[-1].reason
    assert world.restore(slots, SESSION, IDENTITY)


@pytest.mark.parametrize("between", [False, True], ids=["before", "meanwhile"])
def test_a_page_that_would_have_to_go_at_once_is_not_saved_and_the_one_before_stays(
    world: World, monkeypatch: pytest.MonkeyPatch, between: bool
) -> None:
    saved(world)
    (size,) = [entry.size for entry in world.open().entries()]
    world.stack.close()
    world.budget = Budget(node_bytes=3 * size, tenant_bytes=3 * size)
    slots = world.open()
    others = [replace(IDENTITY, tenant_id=UUID(int=2000 + number)) for number in range(2)]

    def others_save() -> None:
        for other in others:
            assert slots.save(SESSION, other, GOOD) is not None

    write = slots._pages.write

    def late(*arguments: Any) -> None:
        write(*arguments)
        monkeypatch.setattr(slots._pages, "write", write)
        others_save()

    if between:
        monkeypatch.setattr(slots._pages, "write", late)
    else:
        others_save()
    assert slots.save(SESSION, IDENTITY, state_make(range(1, 90))) is None
    assert world.events[-1].kind is SlotEventKind.NOT_SAVED
    assert world.events[-1].reason == "over the budget"
    for identity in (IDENTITY, *others):
        assert world.restore(slots, SESSION, identity)
    assert len(names(world.folder)) == 7


@pytest.mark.parametrize(
    "state",
    [
        state_make(()),
        state_make(TOKENS, identity=replace(IDENTITY, dtype="bfloat16")),
        replace(GOOD, tokens=TOKENS[:-1]),
        replace(GOOD, keys=GOOD.keys[:1]),
        replace(GOOD, values=(*GOOD.values, GOOD.values[0])),
        replace(GOOD, keys=tuple(k * torch.nan for k in GOOD.keys)),
        replace(GOOD, values=tuple(v * torch.inf for v in GOOD.values)),
    ],
    ids=["empty", "dtype", "count", "layer short", "layer long", "nan", "infinity"],
)
def test_a_state_that_is_not_as_its_identity_says_is_not_saved(world: World, state: Any) -> None:
    slots = world.open()
    assert slots.save(SESSION, IDENTITY, state) is None
    assert world.kinds() == [SlotEventKind.NOT_SAVED]
    assert slots.entries() == ()
    assert names(world.folder) == []


def test_revocation_removes_every_page_of_the_adapter_and_counts_them(world: World) -> None:
    slots = world.open()
    other = replace(under(A), tenant_id=UUID(int=2001))
    for identity in (under(A), other, under(B), under(BASE_MARKER)):
        for session in ("s-1", "s-2"):
            assert slots.save(Session(session, "app"), identity, GOOD) is not None
    # The sessions of under(A) and of under(BASE_MARKER) are the same slots: the last page counts.
    assert {entry.adapter_digest for entry in slots.entries()} == {A, BASE_MARKER}
    assert slots.remove(A) == 2
    assert slots.remove(A) == 0
    assert {entry.adapter_digest for entry in slots.entries()} == {BASE_MARKER}
    assert len(names(world.folder)) == 1 + 2 * 2
    assert not world.restore(slots, SESSION, other)
    assert world.restore(slots, SESSION, under(BASE_MARKER))
    # Nothing of it is saved any more.
    assert slots.save(SESSION, other, GOOD) is None
    assert world.events[-1].reason == Refusal.REVOKED
    assert world.kinds().count(SlotEventKind.REMOVED) == 2


class Hooked(NodeKey):
    """A node key that calls back before it seals a page, which is in the middle of a save."""

    hook: Callable[[], None] = staticmethod(lambda: None)

    def seal(self, plain: bytes, associated: bytes) -> bytearray:
        if associated.startswith(b"{"):
            hook, self.hook = self.hook, lambda: None
            hook()
        return super().seal(plain, associated)


def test_a_save_under_way_when_its_adapter_is_revoked_saves_nothing(world: World) -> None:
    key = Hooked(world.secret)
    slots = world.open(key=key)
    removed: list[int] = []
    waits: list[bool] = []
    thread = threading.Thread(target=lambda: removed.append(slots.remove(A)))

    def revoke() -> None:
        thread.start()
        # It waits for this very save, so that it is only waited for until it began.
        while slots.save(Session("s-2", "app"), under(A), state_make(TOKENS)) is not None:
            slots.entries()
        # It does not say that all is gone while this save can still write.
        thread.join(0.2)
        waits.append(thread.is_alive())

    key.hook = revoke
    assert slots.save(SESSION, IDENTITY, state_make(TOKENS)) is None
    thread.join()
    assert waits == [True]
    assert len(removed) == 1
    assert slots.entries() == ()
    assert [name for name in names(world.folder) if name != "index"] == []


def test_of_two_saves_of_a_session_the_later_one_stays(world: World) -> None:
    key = Hooked(world.secret)
    slots = world.open(key=key)
    newer = state_make(TOKENS, seed=2)
    key.hook = lambda: slots.save(SESSION, IDENTITY, newer) and None
    assert slots.save(SESSION, IDENTITY, state_make(TOKENS, seed=1)) is None
    assert world.restore(slots) == state_hash(newer)
    assert names(world.folder) == ["2.page", "2.sidecar", "index"]


def test_sessions_save_and_restore_at_once(world: World) -> None:
    states = {number: state_make(TOKENS, seed=number) for number in range(6)}
    slots = world.open()
    wrong: list[int] = []

    def turns(number: int) -> None:
        session = Session(f"s-{number}", "app")
        for _ in range(5):
            slots.save(session, IDENTITY, states[number])
            found = slots.restore(session, IDENTITY)
            if found is None or state_hash(found.state) != state_hash(states[number]):
                wrong.append(number)

    threads = [threading.Thread(target=turns, args=(number,)) for number in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(names(world.folder)) == 1 + 2 * len(states)
