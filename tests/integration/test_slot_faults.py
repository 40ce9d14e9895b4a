"""Slots against changed bytes, crashes and failing disks: refused or whole, never half."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.serving import slot_files
from gpu_worker.serving.slot_events import SlotEventKind
from gpu_worker.serving.slot_key import NodeKey
from gpu_worker.serving.slot_sidecar import Refusal, Session
from gpu_worker.serving.slots import Slots
from registry_service.domain.errors import UnavailableError
from tests.architecture.sources import ROOT
from tests.identities import IDENTITY, A
from tests.integration.slot_world import MOST, SESSION, Crash, Disk, World, state_hash, state_make

pytestmark = pytest.mark.torch

TOKENS = tuple(range(1, 9))
OLD, NEW = (state_make(TOKENS, seed) for seed in (1, 2))
OTHER = Session("s-2", "app")


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    """A folder with the pages of two sessions, 1 and 2."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        world = World(Path(name) / "slots", stack=stack)
        slots = world.open()
        slots.save(SESSION, IDENTITY, OLD)
        slots.save(OTHER, IDENTITY, NEW)
        yield world.folder


def restored(folder: Path) -> tuple[World, bool]:
    """What a node that starts on this folder restores of the first session."""
    with ExitStack() as stack:
        world = World(folder, stack=stack)
        found = world.restore(world.open())
        assert found in {"", state_hash(OLD)}
        return world, bool(found)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of them, to be broken."""
    return Path(shutil.copytree(saved, tmp_path / "slots"))


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(["1.sidecar", "1.page", "index"]), st.data())
def test_any_changed_byte_is_refused(saved: Path, name: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "slots"
        shutil.copytree(saved, folder)
        content = bytearray((folder / name).read_bytes())
        where = data.draw(st.integers(0, len(content) - 1))
        content[where] ^= data.draw(st.integers(1, 255))
        (folder / name).write_bytes(content)
        world, done = restored(folder)
        assert not done
        assert len(world.refusals()) == 1
        assert restored(folder)[0].refusals() == []


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["1.sidecar", "1.page", "index"]), st.data())
def test_any_truncated_or_longer_file_is_refused(
    saved: Path, name: str, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "slots"
        shutil.copytree(saved, folder)
        content = (folder / name).read_bytes()
        end = data.draw(st.integers(0, len(content) - 1))
        longer = data.draw(st.binary(min_size=1, max_size=20))
        (folder / name).write_bytes(data.draw(st.sampled_from([content[:end], content + longer])))
        world, done = restored(folder)
        assert not done
        assert len(world.refusals()) == 1


@pytest.mark.parametrize("swapped", [["page"], ["sidecar"], ["page", "sidecar"]])
def test_files_swapped_between_sessions_are_refused(
    saved: Path, folder: Path, swapped: list[str]
) -> None:
    for name in swapped:
        shutil.copyfile(saved / f"2.{name}", folder / f"1.{name}")
        shutil.copyfile(saved / f"1.{name}", folder / f"2.{name}")
    world, done = restored(folder)
    assert not done
    assert world.refusals() == [Refusal.STATE if swapped == ["page"] else Refusal.SESSION]


@pytest.mark.parametrize("at", range(1, MOST + 1))
def test_a_save_cut_off_anywhere_leaves_the_old_page_or_the_new_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    with ExitStack() as stack:
        slots = World(folder, stack=stack).open()
        with monkeypatch.context() as patch:
            disk = Disk(patch, at, Crash)
            with suppress(Crash):
                slots.save(SESSION, IDENTITY, NEW)
    with ExitStack() as stack:
        world = World(folder, stack=stack)
        slots = world.open()
        found = slots.restore(SESSION, IDENTITY)
        other = slots.restore(OTHER, IDENTITY)
        assert other is not None
        assert state_hash(other.state) == state_hash(NEW)
        assert found is not None
        assert state_hash(found.state) in {state_hash(OLD), state_hash(NEW)}
        assert disk.failed is (at < MOST)
        assert disk.failed or state_hash(found.state) == state_hash(NEW)
        # Nothing of the one that was cut off is left.
        assert len(list(folder.iterdir())) == 1 + 2 * 2


@pytest.mark.parametrize("error", [OSError, MemoryError])
@pytest.mark.parametrize("at", range(1, MOST + 1))
def test_a_save_on_a_failing_disk_is_no_fault_of_the_turn(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    error: type[Exception],
) -> None:
    with ExitStack() as stack:
        world = World(folder, stack=stack)
        slots = world.open()
        with monkeypatch.context() as patch:
            disk = Disk(patch, at, error)
            page = slots.save(SESSION, IDENTITY, NEW)
        found = slots.restore(SESSION, IDENTITY)
        kinds = world.kinds()
        if page is not None:
            assert found is not None
            assert state_hash(found.state) == state_hash(NEW)
        else:
            assert disk.failed
            assert SlotEventKind.NOT_SAVED in kinds
            assert found is None or state_hash(found.state) == state_hash(OLD)
        assert world.refusals() == []
        assert disk.failed is (at < MOST)
        # Afterwards everything works, and what is held is what lies on the disk.
        assert slots.save(SESSION, IDENTITY, OLD) is not None
        held = sorted(slots.entries(), key=lambda entry: entry.page)
    with ExitStack() as stack:
        slots = World(folder, stack=stack).open()
        assert sorted(slots.entries(), key=lambda entry: entry.page) == held
        found = slots.restore(SESSION, IDENTITY)
        assert found is not None
        assert state_hash(found.state) == state_hash(OLD)
        assert len(list(folder.iterdir())) == 1 + 2 * 2


@pytest.mark.parametrize("error", [OSError, MemoryError])
@pytest.mark.parametrize("at", [1, 2])
def test_a_restore_on_a_failing_disk_is_a_cold_prefill(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    error: type[Exception],
) -> None:
    with ExitStack() as stack:
        world = World(folder, stack=stack)
        slots = world.open()
        with monkeypatch.context() as patch:
            disk = Disk(patch, at, error)
            assert slots.restore(SESSION, IDENTITY) is None
        assert disk.failed
        assert world.refusals() == [Refusal.UNREADABLE]
        assert slots.restore(SESSION, IDENTITY) is None
        assert slots.restore(OTHER, IDENTITY) is not None


class FailingKey(NodeKey):
    """A node key that runs out of memory in one of its functions."""

    def __init__(self, secret: bytes, function: str) -> None:
        super().__init__(secret)
        self.armed = False
        real = getattr(self, function)

        def failing(*arguments: Any) -> Any:
            if self.armed:
                raise MemoryError
            return real(*arguments)

        setattr(self, function, failing)


@pytest.mark.parametrize("function", ["open", "digest"])
def test_no_memory_while_a_page_is_opened_is_a_cold_prefill(folder: Path, function: str) -> None:
    with ExitStack() as stack:
        world = World(folder, stack=stack)
        key = FailingKey(world.secret, function)
        slots = world.open(key=key)
        key.armed = True
        assert slots.restore(SESSION, IDENTITY) is None
        assert world.refusals() == [Refusal.UNREADABLE]
        key.armed = False
        assert slots.restore(SESSION, IDENTITY) is None
        assert world.refusals() == [Refusal.UNREADABLE]


def test_files_that_cannot_be_removed_are_said_and_removed_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        world = World(folder, stack=stack)
        slots = world.open()

        def unlink(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patch:
            patch.setattr(slot_files.os, "unlink", unlink)
            with pytest.raises(UnavailableError, match="4 files"):
                slots.remove(A)
        # They lie there still, and restore nothing.
        assert len(list(folder.iterdir())) == 1 + 2 * 2
        assert slots.restore(SESSION, IDENTITY) is None
        assert slots.remove(A) == 0
        assert [path.name for path in folder.iterdir()] == ["index"]


def test_a_refused_page_that_cannot_be_removed_is_not_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "1.page").write_bytes(b"changed")
    with ExitStack() as stack:
        world = World(folder, stack=stack)
        slots = world.open()

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(30, "Read-only file system")

        with monkeypatch.context() as patch:
            for name in ("unlink", "rename"):
                patch.setattr(slot_files.os, name, fail)
            for _ in range(3):
                assert slots.restore(SESSION, IDENTITY) is None
        assert world.refusals() == [Refusal.STATE]


_SAVING = """
import sys
from pathlib import Path
from tests.identities import IDENTITY
from tests.integration.slot_world import SESSION, World, state_make
slots = World(Path(sys.argv[1])).open()
for number in range(1, 100000):
    print(slots.save(SESSION, IDENTITY, state_make(range(1, 9), seed=number)), flush=True)
"""


@pytest.mark.parametrize("pages", [1, 7])
def test_after_a_killed_process_the_last_page_that_it_reported_or_a_later_one_restores(
    tmp_path: Path, pages: int
) -> None:
    folder = tmp_path / "slots"
    process = subprocess.Popen(
        [sys.executable, "-c", _SAVING, str(folder)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert process.stdout is not None
    reported = [int(process.stdout.readline()) for _ in range(pages)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with ExitStack() as stack:
        world = World(folder, stack=stack)
        slots: Slots = world.open()
        found = slots.restore(SESSION, IDENTITY)
        (entry,) = slots.entries()
        assert entry.page >= reported[-1]
        assert found is not None
        assert state_hash(found.state) == state_hash(state_make(range(1, 9), seed=entry.page))
        assert len(list(folder.iterdir())) == 3
