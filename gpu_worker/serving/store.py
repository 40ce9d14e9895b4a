"""The node's folder: pulled files by tenant and digest, how far it has read the feed, and the
highest number of a revocation list that it has held.

adapters/<tenant id>/<hex>/   the files of one adapter, read-only
adapters/<tenant id>/<hex>.json   {"contentDigest", "weightsDigest"}, once they were proven
feed.json                     {"url", "node", "index"}
node.key                      what slots are sealed with
slots/                        the KV of sessions
revocation-list.json          {"keyId", "number", "digest"}
lock                          held while a node uses the folder
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from gpu_worker.serving.residency import Key
from gpu_worker.serving.slot_key import NodeKey
from registry_service.domain.canonical import canonical_json, json_parse
from registry_service.domain.digests import Digest, digest_parse, is_digest
from registry_service.domain.errors import ConflictError, MalformedError, UnavailableError

_LOG = logging.getLogger(__name__)
_FEED: Final = "feed.json"
_LIST: Final = "revocation-list.json"
_SMALL: Final = 4096


@dataclass(frozen=True, slots=True)
class Stored:
    """One adapter's files, there or about to be: their bytes, and when last used, in any order."""

    key: Key
    size: int
    used: int


class NodeStore:
    """One node's folder, held alone."""

    def __init__(self, root: Path, *, url: str, node: str) -> None:
        self._root = root
        self._identity = {"url": url, "node": node}
        self._adapters = root / "adapters"
        try:
            self._adapters.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConflictError(f"{root}: another node uses this store") from error
        except OSError as error:
            raise UnavailableError(f"{root}: cannot be used: {error.strerror}") from error
        # Bytes by key, so that they are counted once; of files that are about to come, too.
        self._sizes: dict[Key, int] = {}
        self._sizes_lock = threading.Lock()
        self._revocable = self._revocable_read()
        # Never held while the disk is asked: every request looks at what may be revoked.
        self._revocable_lock = threading.Lock()
        self._leftovers_remove()

    def close(self) -> None:
        """Let another node have the folder."""
        os.close(self._lock)

    @property
    def slots(self) -> Path:
        """Where the node's slots lie, or will."""
        return self._root / "slots"

    def node_key(self) -> NodeKey:
        """The key of this node's slots, made when there is none.

        Raises:
            UnavailableError: it cannot be read, or others can read it.
        """
        return NodeKey.load_or_create(self._root / "node.key")

    def folder(self, key: Key) -> Path:
        """Where a key's files lie, or will."""
        return self._adapters / str(key.tenant_id) / key.digest.removeprefix("sha256:")

    def keys(self) -> tuple[Key, ...]:
        """What is pulled."""
        return tuple(key for path in sorted(self._adapters.glob("*/*")) if (key := _key_of(path)))

    def stored(self) -> tuple[Stored, ...]:
        """What is pulled, or is about to be."""
        keys = self.keys()
        with self._sizes_lock:
            for key in keys:
                if key not in self._sizes:
                    self._sizes[key] = _bytes_of(self.folder(key))
            return tuple(Stored(key, size, self._used(key)) for key, size in self._sizes.items())

    def expect(self, key: Key, size: int) -> None:
        """Count ``size`` bytes of a key that is about to be pulled."""
        with self._sizes_lock:
            self._sizes[key] = size

    def touch(self, key: Key) -> None:
        """A key's files were used just now."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.folder(key))

    def free(self) -> int:
        """Bytes that are free on the folder's disk."""
        return shutil.disk_usage(self._root).free

    def holds(self, key: Key) -> bool:
        """True when there is something of a key, or may be: the disk does not say."""
        try:
            return bool(self.revocable(key)) or self.folder(key).exists()
        except OSError:
            return True

    def revocable(self, key: Key) -> tuple[Digest, ...]:
        """What a key may be revoked by beside its own digest; empty before it was proven."""
        with self._revocable_lock:
            return self._revocable.get(key, ())

    def revocable_keys(self) -> tuple[Key, ...]:
        """The keys that were proven, whether or not their files are here still."""
        with self._revocable_lock:
            return tuple(self._revocable)

    def revocable_write(self, key: Key, weights: Digest, content: Digest) -> None:
        """Keep what a key may be revoked by, durably: files without it do not outlive a restart.

        Raises:
            UnavailableError: it cannot be written.
        """
        digests = (weights, content)
        if self.revocable(key) != digests:
            document = {"weightsDigest": weights, "contentDigest": content}
            self._write(self._revocable_path(key), canonical_json(document))
            with self._revocable_lock:
                self._revocable[key] = digests

    def files_remove(self, key: Key) -> int:
        """Remove a key's files, if there are any; their bytes.

        Raises:
            UnavailableError: some could not be removed.
        """
        folder = self.folder(key)
        size = 0
        try:
            if folder.exists():
                size = _bytes_of(folder)
                shutil.rmtree(folder)
        except OSError as error:
            raise _unavailable(folder, "removed", error) from error
        with self._sizes_lock:
            self._sizes.pop(key, None)
        return size

    def remove(self, key: Key) -> int:
        """Remove a key's files and what it may be revoked by; the files' bytes.

        Raises:
            UnavailableError: some could not be removed.
        """
        size = self.files_remove(key)
        path = self._revocable_path(key)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _unavailable(path, "removed", error) from error
        with self._revocable_lock:
            self._revocable.pop(key, None)
        return size

    def feed_index(self) -> int:
        """The last index that was handled; 0 at first, and for another service or node."""
        try:
            known = json_parse((self._root / _FEED).read_bytes(), what=_FEED, limit=_SMALL)
        except (FileNotFoundError, MalformedError):
            return 0
        index = known.pop("index", 0) if isinstance(known, dict) else 0
        return index if known == self._identity and isinstance(index, int) else 0

    def feed_index_write(self, index: int) -> None:
        """Keep the index, durably.

        Raises:
            UnavailableError: it cannot be written.
        """
        self._write(self._root / _FEED, canonical_json({**self._identity, "index": index}))

    def list_mark(self, key_id: str) -> tuple[int, Digest | None]:
        """The highest revocation list of a key that was held: number and digest; 0 at first.

        It belongs to the key, whatever the service's address: another key begins anew.

        Raises:
            MalformedError: it is there and cannot be read; 0 in its place would take an old list.
            UnavailableError: the disk does not give it.
        """
        path = self._root / _LIST
        try:
            known = json_parse(path.read_bytes(), what=str(path), limit=_SMALL)
        except FileNotFoundError:
            return 0, None
        except OSError as error:
            raise _unavailable(path, "read", error) from error
        if not isinstance(known, dict) or set(known) != {"keyId", "number", "digest"}:
            raise MalformedError(f"{path}: expected keyId, number and digest; restore the file")
        if known["keyId"] != key_id:
            return 0, None
        if type(known["number"]) is not int or known["number"] < 1:
            raise MalformedError(f"{path}: number: expected 1 or more; restore the file")
        return known["number"], digest_parse(known["digest"], str(path))

    def list_mark_write(self, key_id: str, number: int, digest: Digest) -> None:
        """Keep the number of a revocation list, durably.

        Raises:
            UnavailableError: it cannot be written.
        """
        document = {"keyId": key_id, "number": number, "digest": digest}
        self._write(self._root / _LIST, canonical_json(document))

    def _revocable_path(self, key: Key) -> Path:
        folder = self.folder(key)
        return folder.with_name(f"{folder.name}.json")

    def _used(self, key: Key) -> int:
        try:
            return self.folder(key).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _write(self, target: Path, content: bytes) -> None:
        """Written beside, synced, renamed, the folder synced."""
        beside = target.with_name(f".{target.name}.new")
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.rename(target)
            folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise _unavailable(target, "written", error) from error

    def _revocable_read(self) -> dict[Key, tuple[Digest, ...]]:
        found: dict[Key, tuple[Digest, ...]] = {}
        for path in sorted(self._adapters.glob("*/*.json")):
            try:
                key = _key_of(path.with_suffix(""))
                document = json_parse(path.read_bytes(), what=str(path), limit=_SMALL)
                if key is not None and set(document) == {"weightsDigest", "contentDigest"}:
                    found[key] = (
                        digest_parse(document["weightsDigest"]),
                        digest_parse(document["contentDigest"]),
                    )
            except (OSError, MalformedError, TypeError) as error:
                _LOG.warning("%s: cannot be read: %s", path, error)
        return found

    def _leftovers_remove(self) -> None:
        """Remove what a load that was killed has left: it may be anything's bytes."""
        # A pull leaves its hidden staging folder, and a file is written beside.
        for path in self._adapters.glob("*/.*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for key in self.keys():
            if key not in self._revocable:
                shutil.rmtree(self.folder(key), ignore_errors=True)


def _unavailable(path: Path, what: str, error: OSError) -> UnavailableError:
    """A fault of the disk. Which path it was is logged: it may be another tenant's than is told."""
    _LOG.error("%s: cannot be %s: %s", path, what, error.strerror)
    return UnavailableError(f"a file of this node cannot be {what}; see the node's log")


def _key_of(folder: Path) -> Key | None:
    """The key whose files a folder of this name holds, if any."""
    digest = f"sha256:{folder.name}"
    try:
        tenant_id = UUID(folder.parent.name)
    except ValueError:
        return None
    return Key(tenant_id, Digest(digest)) if is_digest(digest) else None


def _bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.iterdir())
