"""Push and pull over the OCI data plane: bytes stream, are hashed on the way, and resume."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import shutil
import struct
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import httpx

from registry_service.client_http import HttpSession, path_of
from registry_service.domain import limits
from registry_service.domain.base_model import base_precision
from registry_service.domain.digests import Digest, digest_equal, digest_of, is_digest
from registry_service.domain.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    RegistryError,
    UnavailableError,
    UntrustedError,
)
from registry_service.domain.manifest import (
    MANIFEST_MEDIA_TYPE,
    WEIGHT_PATH,
    FileEntry,
    Manifest,
    adapter_manifest_build,
    manifest_parse,
    media_type_of,
)

CHUNK_BYTES: Final = 1024 * 1024
UPLOAD_TRIES: Final = 6
_BACKOFF_SECONDS: Final = 0.25

Progress = Callable[[str, int, int], None]
"""Called with a file's path, the bytes done and all its bytes."""


@dataclass(frozen=True, slots=True)
class PublishFile:
    """One file to publish: its path in the artifact, and its bytes or where they lie."""

    path: str
    source: Path | bytes

    @property
    def name(self) -> str:
        """Tells this file from others and from itself once it is changed; empty for bytes."""
        if isinstance(self.source, bytes):
            return ""
        found = self.source.stat()
        return f"{self.source.resolve()} {found.st_size} {found.st_mtime_ns}"


@dataclass(frozen=True, slots=True)
class _Begun:
    """What is remembered of one file's upload; nothing for one without a name."""

    uploads: MutableMapping[str, str]
    key: str

    def get(self) -> str | None:
        return None if self.key.endswith(" ") else self.uploads.get(self.key)

    def set(self, value: str | None) -> None:
        if self.key.endswith(" ") or not self.key:
            return
        if value is None:
            self.uploads.pop(self.key, None)
        else:
            self.uploads[self.key] = value


class HashingReader:
    """Reads a file from any offset, and hashes each byte once, the first time it passes."""

    def __init__(self, source: Path | bytes) -> None:
        try:
            self._file: BinaryIO = (
                io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
            )
        except OSError as error:
            raise MalformedError(f"cannot read {source!s}: {error.strerror}") from error
        self.size = self._file.seek(0, os.SEEK_END)
        self._hash = hashlib.sha256()
        self._hashed = 0

    def __enter__(self) -> HashingReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def chunks(self, offset: int) -> Iterator[bytes]:
        """The bytes from ``offset`` on."""
        while self._hashed < offset:
            self._file.seek(self._hashed)
            skipped = self._file.read(min(CHUNK_BYTES, offset - self._hashed))
            if not skipped:
                return
            self._hash.update(skipped)
            self._hashed += len(skipped)
        self._file.seek(offset)
        while chunk := self._file.read(CHUNK_BYTES):
            end = offset + len(chunk)
            if end > self._hashed:
                self._hash.update(chunk[self._hashed - offset :])
                self._hashed = end
            yield chunk
            offset = end

    def head(self, size: int) -> bytes:
        """The first ``size`` bytes, or all."""
        self._file.seek(0)
        return self._file.read(size)

    def digest(self) -> Digest:
        """The digest of the whole file."""
        for _ in self.chunks(self._hashed):
            pass
        return Digest("sha256:" + self._hash.hexdigest())


def push(
    session: HttpSession,
    tenant: str,
    adapter: str,
    files: Sequence[PublishFile],
    *,
    label: str | None = None,
    progress: Progress | None = None,
    begun: MutableMapping[str, str] | None = None,
) -> Digest:
    """Publish files as one artifact: blobs, then the manifest, under the label if there is one.

    ``begun`` remembers uploads beyond this process, by file: where one stands, and, once it is
    whole, its digest.

    Raises:
        MalformedError: a file that no adapter has. RegistryError: what the service refused.
    """
    kinds = {file.path: media_type_of(file.path) for file in files}
    entries = []
    for file in files:
        with HashingReader(file.source) as reader:
            known = _Begun({} if begun is None else begun, f"{session.url} {tenant} {file.name}")
            digest = _blob_push(session, tenant, adapter, file.path, reader, progress, known)
            entries.append(FileEntry(file.path, digest, reader.size, kinds[file.path]))
    built = adapter_manifest_build(adapter, entries, precision_of(files))
    with HashingReader(built.config) as reader:
        _blob_push(session, tenant, adapter, "", reader, None, _Begun({}, ""))
    session.request(
        "PUT",
        path_of("v2", tenant, adapter, "manifests", label or built.digest),
        content=built.manifest,
        headers={"Content-Type": MANIFEST_MEDIA_TYPE},
    )
    return built.digest


def pull(session: HttpSession, tenant: str, adapter: str, digest: Digest, into: Path) -> Manifest:
    """Fetch an artifact into the new folder ``into``: all of it and verified, or nothing.

    Raises:
        ConflictError: ``into`` exists. UntrustedError: bytes that differ from their digest.
    """
    if into.exists() or into.is_symlink():
        raise ConflictError(f"{into} exists already; name a new folder")
    manifest = manifest_parse(manifest_fetch(session, tenant, adapter, digest))
    into.parent.mkdir(parents=True, exist_ok=True)
    staging = into.parent / f".{into.name}.{secrets.token_hex(8)}"
    staging.mkdir(mode=0o700)
    try:
        for file in manifest.files:
            _file_pull(session, tenant, adapter, file, staging / file.path)
        staging.chmod(0o755)
        staging.rename(into)
    except OSError as error:
        raise UnavailableError(f"cannot write to {into}: {error.strerror}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return manifest


def manifest_fetch(session: HttpSession, tenant: str, adapter: str, reference: str) -> bytes:
    """The manifest's bytes; when ``reference`` is a digest they are those of that digest.

    Raises:
        UntrustedError: other bytes, or more than a manifest may have.
    """
    path = path_of("v2", tenant, adapter, "manifests", reference)
    content = b""
    with session.stream("GET", path, headers={"Accept": MANIFEST_MEDIA_TYPE}) as response:
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > limits.MANIFEST_BYTES:
                raise UntrustedError(f"manifest: more than {limits.MANIFEST_BYTES} bytes")
    if ":" in reference and not digest_equal(digest_of(content), reference):
        raise UntrustedError(f"manifest: expected {reference}, got {digest_of(content)}")
    return content


def blob_stream(session: HttpSession, tenant: str, adapter: str, digest: str) -> Iterator[bytes]:
    """A blob's bytes. The last chunk comes only after all bytes were verified.

    Raises:
        UntrustedError: the bytes have another digest.
    """
    path = path_of("v2", tenant, adapter, "blobs", digest)
    state = hashlib.sha256()
    held: bytes | None = None
    with session.stream("GET", path, headers={"Accept": "*/*"}) as response:
        for chunk in response.iter_bytes(CHUNK_BYTES):
            state.update(chunk)
            if held is not None:
                yield held
            held = chunk
    got = "sha256:" + state.hexdigest()
    if not digest_equal(got, digest):
        raise UntrustedError(f"blob: expected {digest}, got bytes of {got}")
    if held is not None:
        yield held


def precision_of(files: Sequence[PublishFile]) -> str:
    """The precision of the weights, for the manifest's config.

    It is descriptive, so bytes that cannot be read count as ``mixed`` here and get their finding
    from the scan.
    """
    weights = next((file.source for file in files if file.path == WEIGHT_PATH), b"")
    try:
        with HashingReader(weights) as reader:
            head = reader.head(8 + limits.SAFETENSORS_HEADER_BYTES)
        (length,) = struct.unpack("<Q", head[:8])
        header = json.loads(head[8 : 8 + length])
        return base_precision(
            info["dtype"] for name, info in header.items() if name != "__metadata__"
        )
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return base_precision(())


def _blob_push(
    session: HttpSession,
    tenant: str,
    adapter: str,
    name: str,
    reader: HashingReader,
    progress: Progress | None,
    begun: _Begun,
) -> Digest:
    """Upload one blob, continuing after a broken connection, a bounded number of times."""
    location = begun.get()
    if location is not None and is_digest(location):
        if _blob_there(session, tenant, adapter, reader.digest()):
            return reader.digest()
        location = None
    failure: RegistryError | None = None
    for attempt in range(UPLOAD_TRIES):
        if failure is not None:
            time.sleep(_BACKOFF_SECONDS * 2 ** (attempt - 1))
        fresh = location is None
        try:
            location, offset = _upload_at(session, tenant, adapter, location)
            begun.set(location)
            if offset < reader.size:
                location = _upload_append(session, location, name, reader, offset, progress)
            digest = reader.digest()
            _upload_finish(session, location, digest)
        except UnavailableError as error:
            failure = error
        except (ConflictError, NotFoundError) as error:
            # The upload is not where we think it is, or gone: start another. When already that
            # was refused, the refusal is the answer.
            if fresh and location is None:
                raise
            failure, location = error, None
        else:
            begun.set(digest)
            return digest
    assert failure is not None  # noqa: S101 - every turn returns or keeps its failure
    raise failure


def _upload_at(
    session: HttpSession, tenant: str, adapter: str, location: str | None
) -> tuple[str, int]:
    """Where an upload is and how far: a new one, or one that was begun."""
    if location is None:
        return _upload_begin(session, tenant, adapter), 0
    return _upload_offset(session, location)


def _blob_there(session: HttpSession, tenant: str, adapter: str, digest: str) -> bool:
    try:
        session.request("HEAD", path_of("v2", tenant, adapter, "blobs", digest))
    except NotFoundError:
        return False
    return True


def _upload_begin(session: HttpSession, tenant: str, adapter: str) -> str:
    response = session.request(
        "POST", path_of("v2", tenant, adapter, "blobs", "uploads") + "/", content=b""
    )
    location = response.headers.get("location")
    if location is None:
        raise UnavailableError(f"{session.url} began an upload and did not say where")
    return session.address(location)


def _upload_offset(session: HttpSession, location: str) -> tuple[str, int]:
    response = session.request("GET", location)
    _, _, last = response.headers.get("range", "0-0").partition("-")
    # "0-0" stands for nothing as well as for one byte. The second is corrected by a 416.
    offset = int(last) + 1 if last.isdigit() and last != "0" else 0
    return session.address(response.headers.get("location", location)), offset


def _upload_append(
    session: HttpSession,
    location: str,
    name: str,
    reader: HashingReader,
    offset: int,
    progress: Progress | None,
) -> str:
    def body() -> Iterator[bytes]:
        done = offset
        for chunk in reader.chunks(offset):
            yield chunk
            done += len(chunk)
            if progress is not None:
                progress(name, done, reader.size)

    response = session.request(
        "PATCH",
        location,
        content=body(),
        headers={
            "Content-Type": "application/octet-stream",
            "Content-Length": str(reader.size - offset),
            "Content-Range": f"{offset}-{reader.size - 1}",
        },
    )
    return session.address(response.headers.get("location", location))


def _upload_finish(session: HttpSession, location: str, digest: Digest) -> None:
    # The Location is opaque: what its query says has to stay.
    address = httpx.URL(location).copy_merge_params({"digest": digest})
    session.request("PUT", str(address), content=b"")


def _file_pull(
    session: HttpSession, tenant: str, adapter: str, file: FileEntry, target: Path
) -> None:
    size = 0
    with target.open("xb") as out:
        for chunk in blob_stream(session, tenant, adapter, file.digest):
            size += len(chunk)
            if size > file.size:
                break
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if size != file.size:
        with suppress(OSError):
            target.unlink()
        raise UntrustedError(f"{file.path}: expected {file.size} bytes, got another number")
    target.chmod(0o444)
