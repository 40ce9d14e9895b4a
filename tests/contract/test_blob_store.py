"""What every blob store has to do; a store joins by one entry in ``STORES``."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from registry_service.backends.filesystem import FilesystemBlobStore
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import (
    ConflictError,
    CorruptStoreError,
    MalformedError,
    NotFoundError,
    RefusedError,
    TooLargeError,
    UnavailableError,
)
from registry_service.ports import BlobStore

TENANT, OTHER = UUID(int=1), UUID(int=2)
STORES: dict[str, Callable[[Path], BlobStore]] = {"filesystem": FilesystemBlobStore}
# Equal in every process: some tests run a part of theirs in another one.
DATA = random.Random(0).randbytes(3 * 1024 * 1024 + 17)
DIGEST = digest_of(DATA)


@pytest.fixture(params=sorted(STORES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return STORES[request.param](tmp_path)


def stage(store: BlobStore, *chunks: bytes, tenant: UUID = TENANT) -> UUID:
    upload = uuid4()
    store.upload_begin(tenant, upload)
    writer = store.upload_writer(tenant, upload, 0)
    for chunk in chunks:
        writer.write(chunk)
    writer.close()
    return upload


def put(store: BlobStore, data: bytes, tenant: UUID = TENANT) -> Digest:
    store.upload_commit(tenant, stage(store, data, tenant=tenant), digest_of(data), None)
    return digest_of(data)


class TestBlobStore:
    """The contract."""

    @pytest.mark.parametrize("data", [b"", b"x", DATA], ids=["empty", "one", "chunks"])
    def test_what_goes_in_comes_out(self, store: BlobStore, data: bytes) -> None:
        digest = put(store, data)
        assert b"".join(store.open(TENANT, digest, size=len(data))) == data
        assert store.read(TENANT, digest, limit=len(data)) == data
        assert store.size(TENANT, digest) == len(data)
        assert [found for found, _ in store.list(TENANT)] == [digest]

    def test_an_upload_goes_on_where_it_stands(self, store: BlobStore) -> None:
        upload = stage(store, DATA[:1000])
        assert store.upload_size(TENANT, upload) == 1000
        with pytest.raises(ConflictError):
            store.upload_writer(TENANT, upload, 0)
        with pytest.raises(ConflictError):
            store.upload_writer(TENANT, upload, 1001)
        writer = store.upload_writer(TENANT, upload, 1000)
        writer.write(DATA[1000:])
        writer.close()
        writer.close()
        assert store.upload_commit(TENANT, upload, DIGEST, None) == len(DATA)
        assert store.upload_size(TENANT, upload) is None

    def test_one_request_at_a_time_has_an_upload(self, store: BlobStore) -> None:
        upload = stage(store, b"a")
        writer = store.upload_writer(TENANT, upload, 1)
        with pytest.raises(ConflictError):
            store.upload_writer(TENANT, upload, 1)
        with pytest.raises(ConflictError):
            store.upload_commit(TENANT, upload, digest_of(b"a"), None)
        writer.close()
        assert store.upload_commit(TENANT, upload, digest_of(b"a"), None) == 1

    def test_another_digest_is_refused_and_nothing_appears(self, store: BlobStore) -> None:
        upload = stage(store, DATA)
        for known in (None, (len(DATA), DIGEST)):
            with pytest.raises(RefusedError):
                store.upload_commit(TENANT, upload, digest_of(b"x"), known)
        assert store.size(TENANT, digest_of(b"x")) is None
        assert store.upload_commit(TENANT, upload, DIGEST, (len(DATA), DIGEST)) == len(DATA)

    def test_commit_is_safe_to_repeat(self, store: BlobStore) -> None:
        first, second = stage(store, DATA), stage(store, DATA)
        for upload in (first, first, second, second):
            assert store.upload_commit(TENANT, upload, DIGEST, None) == len(DATA)
        assert store.read(TENANT, DIGEST, limit=len(DATA)) == DATA
        with pytest.raises(NotFoundError):
            store.upload_commit(TENANT, uuid4(), digest_of(b"never"), None)

    def test_unknown_aborted_and_repeated_uploads(self, store: BlobStore) -> None:
        upload = stage(store, b"a")
        with pytest.raises(ConflictError):
            store.upload_begin(TENANT, upload)
        store.upload_abort(TENANT, upload)
        store.upload_abort(TENANT, upload)
        assert store.upload_size(TENANT, upload) is None
        with pytest.raises(NotFoundError):
            store.upload_writer(TENANT, upload, 0)

    def test_tenants_are_apart(self, store: BlobStore) -> None:
        upload = stage(store, b"mine")
        put(store, DATA)
        assert store.size(OTHER, DIGEST) is None
        assert store.upload_size(OTHER, upload) is None
        assert list(store.list(OTHER)) == []
        with pytest.raises(CorruptStoreError):
            store.read(OTHER, DIGEST, limit=10)
        store.delete(OTHER, DIGEST)
        assert store.size(TENANT, DIGEST) == len(DATA)

    def test_ranges(self, store: BlobStore) -> None:
        put(store, DATA)
        size = len(DATA)
        for start, end in ((0, 8), (8, 8), (8, None), (size - 5, size), (size, None), (0, size)):
            got = b"".join(store.open(TENANT, DIGEST, size=size, start=start, end=end))
            assert got == DATA[start:end]

    def test_delete_and_limits(self, store: BlobStore) -> None:
        put(store, DATA)
        with pytest.raises(TooLargeError):
            store.read(TENANT, DIGEST, limit=len(DATA) - 1)
        store.delete(TENANT, DIGEST)
        store.delete(TENANT, DIGEST)
        assert store.size(TENANT, DIGEST) is None

    def test_a_missing_blob_is_noticed_before_the_first_chunk(self, store: BlobStore) -> None:
        with pytest.raises(CorruptStoreError, match="missing"):
            store.open(TENANT, DIGEST, size=len(DATA))

    @pytest.mark.parametrize("tenant", ["../x", "", "0" * 31])
    def test_only_ids_become_paths(self, store: BlobStore, tenant: str) -> None:
        with pytest.raises(ValueError, match="badly formed"):
            store.upload_begin(tenant, uuid4())  # type: ignore[arg-type]  # a stand-in, or wrong on purpose
        with pytest.raises(ValueError, match="badly formed"):
            store.upload_begin(TENANT, tenant)  # type: ignore[arg-type]  # a stand-in, or wrong on purpose
        with pytest.raises(MalformedError):
            store.size(TENANT, Digest("sha256:../../x"))


@pytest.fixture
def disk(tmp_path: Path) -> FilesystemBlobStore:
    return FilesystemBlobStore(tmp_path)


def blob_path(root: Path, digest: Digest = DIGEST, tenant: UUID = TENANT) -> Path:
    digits = digest.removeprefix("sha256:")
    return root / "blobs" / str(tenant) / "sha256" / digits[:2] / digits


def lie(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("place", [0, len(DATA) // 2, len(DATA) - 1])
def test_wrong_bytes_are_caught_before_the_last_chunk(
    disk: FilesystemBlobStore, tmp_path: Path, place: int
) -> None:
    put(disk, DATA)
    spoiled = bytearray(DATA)
    spoiled[place] ^= 1
    lie(blob_path(tmp_path), bytes(spoiled))
    got = b""
    with pytest.raises(CorruptStoreError):
        for chunk in disk.open(TENANT, DIGEST, size=len(DATA)):
            got += chunk
    assert len(got) < len(DATA)
    with pytest.raises(CorruptStoreError):
        disk.read(TENANT, DIGEST, limit=len(DATA))
    # Publishing the same bytes again mends the store.
    put(disk, DATA)
    assert disk.read(TENANT, DIGEST, limit=len(DATA)) == DATA


@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"x", b""], ids=["short", "long", "empty"])
def test_a_wrong_length_is_caught_at_once(
    disk: FilesystemBlobStore, tmp_path: Path, data: bytes
) -> None:
    put(disk, DATA)
    lie(blob_path(tmp_path), data)
    with pytest.raises(CorruptStoreError, match="bytes"):
        disk.open(TENANT, DIGEST, size=len(DATA))
    with pytest.raises(CorruptStoreError):
        disk.read(TENANT, DIGEST, limit=len(DATA) + 1)


@pytest.mark.parametrize("left", [0, 1024 * 1024 + 5])
def test_a_blob_that_shrinks_or_goes_while_it_is_read(
    disk: FilesystemBlobStore, tmp_path: Path, left: int
) -> None:
    put(disk, DATA)
    chunks = disk.open(TENANT, DIGEST, size=len(DATA))
    if left:
        next(chunks)
        os.truncate(blob_path(tmp_path), left)
    else:
        blob_path(tmp_path).unlink()
    with pytest.raises(CorruptStoreError):
        list(chunks)


def _full(root: Path, upload: UUID, connection: object) -> None:
    # In a process of its own: the limit cannot be taken back.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    store = FilesystemBlobStore(root)
    writer = store.upload_writer(TENANT, upload, 0)
    writer.write(DATA[:4000])
    try:
        writer.write(DATA[4000:8000])
    except UnavailableError as error:
        connection.send((error.http_status, error.retry_after))  # type: ignore[attr-defined]  # a stand-in, or wrong on purpose
    writer.close()


def test_a_full_disk_leaves_nothing_half_written(disk: FilesystemBlobStore, tmp_path: Path) -> None:
    upload = uuid4()
    disk.upload_begin(TENANT, upload)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_full, args=(tmp_path, upload, there))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert here.recv() == (503, 30)
    # 1000 bytes of the second chunk fitted; they were taken back, and the upload goes on.
    assert disk.upload_size(TENANT, upload) == 4000
    with disk.upload_writer(TENANT, upload, 4000) as writer:
        writer.write(DATA[4000:])
    assert disk.upload_commit(TENANT, upload, DIGEST, None) == len(DATA)


def _dies(root: Path, upload: UUID) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Path.replace = die  # type: ignore[method-assign,assignment]  # a stand-in, or wrong on purpose
    FilesystemBlobStore(root).upload_commit(TENANT, upload, DIGEST, (len(DATA), DIGEST))


def test_a_crash_before_the_rename_leaves_nothing_visible(
    disk: FilesystemBlobStore, tmp_path: Path
) -> None:
    upload = stage(disk, DATA)
    process = multiprocessing.get_context("spawn").Process(target=_dies, args=(tmp_path, upload))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert disk.size(TENANT, DIGEST) is None
    assert list(disk.list(TENANT)) == []
    # What the dead process held is free, and repeating the request is safe.
    assert disk.upload_commit(TENANT, upload, DIGEST, None) == len(DATA)
    assert disk.upload_commit(TENANT, upload, DIGEST, None) == len(DATA)


def test_a_known_digest_spares_reading(
    disk: FilesystemBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = stage(disk, DATA)

    def read(*_: object) -> None:
        raise AssertionError("the staged file was read")

    monkeypatch.setattr(hashlib, "file_digest", read)
    disk.upload_commit(TENANT, upload, DIGEST, (len(DATA), DIGEST))


def test_bytes_are_on_disk_before_their_name(
    disk: FilesystemBlobStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    upload = stage(disk, DATA)
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(descriptor: int) -> None:
        steps.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def note_replace(path: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    disk.upload_commit(TENANT, upload, DIGEST, (len(DATA), DIGEST))
    folder = blob_path(tmp_path).parent.name
    assert steps[0] == str(upload)
    assert steps[-2:] == ["rename", folder]


def test_a_store_that_is_down(disk: FilesystemBlobStore, tmp_path: Path) -> None:
    uploads = tmp_path / "uploads"
    uploads.rmdir()
    uploads.write_bytes(b"")
    with pytest.raises(UnavailableError) as caught:
        disk.upload_begin(TENANT, uuid4())
    assert caught.value.retry_after
