"""A node's folder: what is kept of an adapter's bytes, durably, and what a start does not trust."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from gpu_worker.serving.disk import Disk
from gpu_worker.serving.residency import Key
from gpu_worker.serving.store import NodeStore, Stored
from registry_service.domain import limits
from registry_service.domain.canonical import canonical_json
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import ConflictError, UnavailableError

KEY, OTHER = (Key(UUID(int=1), digest_of(name)) for name in (b"a", b"b"))
WEIGHTS, CONTENT = digest_of(b"weights"), digest_of(b"content")


class Folder:
    """A store, opened again over the same folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = self.made()

    def made(self) -> NodeStore:
        return NodeStore(self.root, url="http://r", node="n")

    def restart(self) -> NodeStore:
        self.store.close()
        self.store = self.made()
        return self.store

    def pulled(self, key: Key, size: int = 3) -> Path:
        folder = self.store.folder(key)
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x" * size)
        return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    made.store.close()


def test_what_bytes_are_revoked_by_outlives_them_and_a_restart(folder: Folder) -> None:
    pulled = folder.pulled(KEY)
    folder.store.revocable_write(KEY, WEIGHTS, CONTENT)
    beside = pulled.with_name(f"{pulled.name}.json")
    document = {"weightsDigest": WEIGHTS, "contentDigest": CONTENT}
    assert beside.read_bytes() == canonical_json(document)
    store = folder.restart()
    assert store.keys() == (KEY,)
    assert store.files_remove(KEY) == 3
    store = folder.restart()
    assert store.keys() == ()
    assert store.revocable_keys() == (KEY,)
    assert store.revocable(KEY) == (WEIGHTS, CONTENT)
    assert store.remove(KEY) == 0
    assert store.revocable(KEY) == ()
    assert not beside.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"7", b"{}", b'{"weightsDigest":"x","contentDigest":"y"}'],
)
def test_files_whose_record_cannot_be_read_are_removed_at_the_start(
    folder: Folder, content: bytes
) -> None:
    pulled = folder.pulled(KEY)
    folder.store.revocable_write(KEY, WEIGHTS, CONTENT)
    pulled.with_name(f"{pulled.name}.json").write_bytes(content)
    kept = folder.pulled(OTHER)
    folder.store.revocable_write(OTHER, WEIGHTS, CONTENT)
    store = folder.restart()
    assert store.keys() == (OTHER,)
    assert kept.exists()
    assert not pulled.exists()


def test_a_record_that_cannot_be_written_is_none(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space left on device")

    folder.pulled(KEY)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(UnavailableError, match="cannot be written"):
            folder.store.revocable_write(KEY, WEIGHTS, CONTENT)
    assert folder.store.revocable(KEY) == ()
    assert folder.restart().keys() == ()


def test_a_fault_of_the_disk_names_no_path_to_whoever_asked(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bad(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    pulled = folder.pulled(KEY)
    folder.store.revocable_write(KEY, WEIGHTS, CONTENT)
    folder.store.list_mark_write("k", 1, CONTENT)
    disk = Disk(folder.store, [], set)
    monkeypatch.setattr(limits, "STORED_ADAPTERS", 1)
    told = []
    for target, ask in (
        ("shutil.rmtree", lambda: disk.room_make(OTHER, 1)),
        ("shutil.rmtree", lambda: folder.store.remove(KEY)),
        ("pathlib.Path.rename", lambda: folder.store.revocable_write(OTHER, WEIGHTS, CONTENT)),
        ("pathlib.Path.rename", lambda: folder.store.feed_index_write(1)),
        ("pathlib.Path.read_bytes", lambda: folder.store.list_mark("k")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, bad)
            with pytest.raises(UnavailableError, match="a file of this node cannot be") as caught:
                ask()
        told.append(caught.value.message)
    for secret in (str(folder.root), str(KEY.tenant_id), pulled.name):
        assert not any(secret in message for message in told)
        assert secret in caplog.text


def test_what_is_about_to_come_counts_and_what_went_does_not(folder: Folder) -> None:
    folder.pulled(KEY, 5)
    folder.store.expect(OTHER, 7)
    sizes = {item.key: item.size for item in folder.store.stored()}
    assert sizes == {KEY: 5, OTHER: 7}
    folder.store.files_remove(OTHER)
    folder.pulled(OTHER, 9)
    folder.store.touch(KEY)
    last = max(folder.store.stored(), key=lambda item: item.used)
    assert last == Stored(KEY, 5, last.used)
    folder.store.touch(Key(UUID(int=9), KEY.digest))


def test_one_node_at_a_time(folder: Folder) -> None:
    with pytest.raises(ConflictError, match="another node"):
        folder.made()
