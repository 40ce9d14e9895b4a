"""A blob store in a folder: atomic, fsynced, content-addressed, one subtree a tenant.

Staged bytes lie under ``uploads/``; a blob appears under its digest by one rename, after its bytes
are on disk. Whatever the machine dies at, a blob is whole or not there.

1. One request at a time has an upload: its writer and the commit hold a lock on the staged file
   (``flock``, so across the service's processes too), or the digest that was computed while the
   bytes arrived would say nothing about the bytes that lie there.
2. A write that fails takes back the part of its chunk that was written.
3. Folders are made durable before what lies in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from uuid import UUID

from registry_service.backends.disk import disk_faults, file_size, folder_make, folder_sync
from registry_service.domain.digests import Digest, digest_equal, digest_parse
from registry_service.domain.errors import (
    ConflictError,
    CorruptStoreError,
    NotFoundError,
    RefusedError,
    TooLargeError,
)

_CHUNK: Final = 1024 * 1024
_SAFE: Final = os.O_CLOEXEC | os.O_NOFOLLOW


class _Writer:
    """Implements ``ports.StagedWriter`` on a file descriptor."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size

    def write(self, chunk: bytes) -> None:
        """Append ``chunk``, whole or not at all."""
        view = memoryview(chunk)
        with disk_faults():
            try:
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError:
                os.ftruncate(self._descriptor, self._size)
                raise
        self._size += len(chunk)

    def close(self) -> None:
        """End the request; safe to repeat."""
        # Not fsynced here but once, at commit: what a crash loses before it can be sent again,
        # and after a restart the commit hashes what lies there.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FilesystemBlobStore:
    """Implements ``ports.BlobStore``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        with disk_faults():
            for name in ("uploads", "blobs"):
                folder_make(root / name)

    def upload_begin(self, tenant: UUID, upload: UUID) -> None:
        """Open an empty upload.

        Raises:
            ConflictError: there is one of this id.
        """
        path = self._staged(tenant, upload)
        with disk_faults():
            folder_make(path.parent)
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600))
            except FileExistsError as error:
                raise ConflictError("the upload was begun before") from error

    def upload_writer(self, tenant: UUID, upload: UUID, offset: int) -> _Writer:
        """Append to an upload that holds ``offset`` bytes; a context manager.

        Raises:
            NotFoundError: no such upload. ConflictError: it holds another number of bytes, or
                another request has it.
        """
        with disk_faults():
            descriptor = self._locked(tenant, upload, os.O_WRONLY | os.O_APPEND)
            actual = os.fstat(descriptor).st_size
        if actual != offset:
            os.close(descriptor)
            raise ConflictError(f"the upload holds {actual} bytes, expected {offset}")
        return _Writer(descriptor, offset)

    def upload_size(self, tenant: UUID, upload: UUID) -> int | None:
        """Bytes of an upload so far, or None."""
        return file_size(self._staged(tenant, upload))

    def upload_commit(
        self, tenant: UUID, upload: UUID, digest: Digest, known: tuple[int, Digest] | None
    ) -> int:
        """Make an upload the blob ``digest``; its size in bytes. Safe to repeat.

        Raises:
            NotFoundError: neither the upload nor the blob. RefusedError: its bytes have another
                digest. ConflictError: another request has it.
        """
        staged, final = self._staged(tenant, upload), self._blob(tenant, digest)
        with disk_faults():
            try:
                descriptor = self._locked(tenant, upload, os.O_RDWR)
            except NotFoundError:
                # Committed before, and the answer was lost: what is asked for is so.
                size = file_size(final)
                if size is None:
                    raise
                return size
            try:
                size = os.fstat(descriptor).st_size
                # What was hashed on the way counts only while the bytes are those, and no more.
                fits = known is not None and known[0] == size
                actual = known[1] if known is not None and fits else _digest(descriptor)
                if not digest_equal(actual, digest):
                    raise RefusedError(f"expected bytes of digest {digest}, got {actual}")
                os.fchmod(descriptor, 0o400)
                os.fsync(descriptor)
                folder_make(final.parent)
                # Replacing an equal blob is harmless, and mends one that the disk has spoiled.
                staged.replace(final)
                folder_sync(final.parent)
                return size
            finally:
                os.close(descriptor)

    def upload_abort(self, tenant: UUID, upload: UUID) -> None:
        """Drop an upload; safe to repeat."""
        with disk_faults():
            self._staged(tenant, upload).unlink(missing_ok=True)

    def size(self, tenant: UUID, digest: Digest) -> int | None:
        """Size of a blob, or None."""
        return file_size(self._blob(tenant, digest))

    def open(
        self, tenant: UUID, digest: Digest, *, size: int, start: int = 0, end: int | None = None
    ) -> Iterator[bytes]:
        """The bytes [start, end) of a blob, in chunks; a whole read is verified.

        Raises:
            CorruptStoreError: wrong bytes, a wrong length, or no such blob.
        """
        # Looked at before the first chunk is asked for, so that a missing blob is an error answer
        # and not the broken body of a good one.
        actual = self.size(tenant, digest)
        if actual is None:
            raise CorruptStoreError(f"blob {digest} is missing from the store")
        if actual != size:
            raise CorruptStoreError(f"blob {digest}: expected {size} bytes, got {actual}")
        stop = size if end is None else min(end, size)
        whole = start == 0 and stop == size
        path = self._blob(tenant, digest)
        return _stream(path, start, max(0, stop - start), digest if whole else None)

    def read(self, tenant: UUID, digest: Digest, *, limit: int) -> bytes:
        """A small blob, whole and verified.

        Raises:
            CorruptStoreError: wrong bytes or no such blob. TooLargeError: over ``limit`` bytes.
        """
        size = self.size(tenant, digest)
        if size is None:
            raise CorruptStoreError(f"blob {digest} is missing from the store")
        if size > limit:
            raise TooLargeError(f"blob {digest}: expected at most {limit} bytes, got {size}")
        return b"".join(self.open(tenant, digest, size=size))

    def delete(self, tenant: UUID, digest: Digest) -> None:
        """Remove a blob; safe to repeat."""
        with disk_faults():
            self._blob(tenant, digest).unlink(missing_ok=True)

    def list(self, tenant: UUID) -> Iterator[tuple[Digest, datetime]]:
        """Every blob of a tenant and when it was committed, in no order; for the sweeper."""
        folder = self._blobs(tenant)
        with disk_faults():
            for path in folder.glob("*/*"):
                with contextlib.suppress(FileNotFoundError):
                    changed = datetime.fromtimestamp(path.stat().st_ctime, UTC)
                    yield digest_parse(f"sha256:{path.name}"), changed

    def uploads(self, tenant: UUID) -> Iterator[tuple[UUID, datetime]]:
        """Every upload of a tenant and when it was last written, in no order; for the sweeper."""
        with disk_faults():
            for path in (self._root / "uploads" / str(tenant)).glob("*"):
                with contextlib.suppress(FileNotFoundError):
                    yield UUID(path.name), datetime.fromtimestamp(path.stat().st_mtime, UTC)

    def _locked(self, tenant: UUID, upload: UUID, flags: int) -> int:
        """A descriptor of the staged file that nobody else has."""
        path = self._staged(tenant, upload)
        try:
            descriptor = os.open(path, flags | _SAFE)
        except FileNotFoundError as error:
            raise NotFoundError("no such upload; start a new one") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and lock it may have become a blob, which nobody writes to.
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(descriptor)):
                raise NotFoundError("no such upload; start a new one")
        except BlockingIOError as error:
            os.close(descriptor)
            raise ConflictError("another request has this upload; wait for it to end") from error
        except BaseException:
            # Whatever stopped it, the lock goes with its descriptor.
            os.close(descriptor)
            raise
        return descriptor

    def _staged(self, tenant: UUID, upload: UUID) -> Path:
        return self._root / "uploads" / str(UUID(str(tenant))) / str(UUID(str(upload)))

    def _blob(self, tenant: UUID, digest: Digest) -> Path:
        digits = digest_parse(digest).removeprefix("sha256:")
        return self._blobs(tenant) / digits[:2] / digits

    def _blobs(self, tenant: UUID) -> Path:
        return self._root / "blobs" / str(UUID(str(tenant))) / "sha256"


def _stream(path: Path, start: int, count: int, digest: Digest | None) -> Iterator[bytes]:
    with disk_faults():
        try:
            descriptor = os.open(path, os.O_RDONLY | _SAFE)
        except FileNotFoundError as error:
            raise CorruptStoreError("a blob is missing from the store") from error
        try:
            if start:
                os.lseek(descriptor, start, os.SEEK_SET)
            yield from _chunks(descriptor, count, digest)
        finally:
            os.close(descriptor)


def _chunks(descriptor: int, count: int, digest: Digest | None) -> Iterator[bytes]:
    """``count`` bytes; with ``digest``, the last chunk only when all of them match it."""
    hasher = hashlib.sha256()
    left = count
    while left:
        chunk = os.read(descriptor, min(_CHUNK, left))
        if not chunk:
            raise CorruptStoreError("a blob ended before its length")
        left -= len(chunk)
        if digest is not None:
            hasher.update(chunk)
            if not left:
                break
        yield chunk
    if digest is None:
        return
    actual = "sha256:" + hasher.hexdigest()
    if not digest_equal(actual, digest):
        raise CorruptStoreError(f"the store answered with bytes of {actual}, expected {digest}")
    if count:
        yield chunk


def _digest(descriptor: int) -> Digest:
    with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
        return Digest("sha256:" + hashlib.file_digest(file, "sha256").hexdigest())
