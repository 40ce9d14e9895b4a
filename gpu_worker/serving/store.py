"""The node's folder: pulled files by tenant and digest, how far it has read the feed, and the
highest number of a revocation list that it has held.

adapters/<tenant id>/<hex>/   the files of one adapter, read-only
feed.json                     {"url", "node", "index"}
node.key                      what slots are sealed with
slots/                        the KV of sessions
revocation-list.json          {"keyId", "number", "digest"}
lock                          held while a node uses the folder
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from gpu_worker.serving.residency import Key
from gpu_worker.serving.slot_key import NodeKey
from registry_service.domain.canonical import json_parse
from registry_service.domain.digests import Digest, digest_parse, is_digest
from registry_service.domain.errors import ConflictError, MalformedError, UnavailableError

_FEED: Final = "feed.json"
_LIST: Final = "revocation-list.json"
_SMALL: Final = 4096


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
            raise ConflictError(f"{root}: another node uses this store") from error
        except OSError as error:
            raise UnavailableError(f"{root}: cannot be used: {error.strerror}") from error
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
        found = []
        for folder in sorted(self._adapters.glob("*/*")):
            digest = f"sha256:{folder.name}"
            try:
                tenant_id = UUID(folder.parent.name)
            except ValueError:
                continue
            if is_digest(digest):
                found.append(Key(tenant_id, Digest(digest)))
        return tuple(found)

    def remove(self, key: Key) -> int:
        """Remove a key's files, if there are any; their bytes.

        Raises:
            UnavailableError: some could not be removed.
        """
        folder = self.folder(key)
        try:
            if not folder.exists():
                return 0
            size = sum(path.lstat().st_size for path in folder.iterdir())
            shutil.rmtree(folder)
        except OSError as error:
            raise UnavailableError(f"{folder}: cannot be removed: {error.strerror}") from error
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
        self._write(_FEED, {**self._identity, "index": index})

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
            raise UnavailableError(f"{path}: cannot be read: {error.strerror}") from error
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
        self._write(_LIST, {"keyId": key_id, "number": number, "digest": digest})

    def _write(self, name: str, document: dict[str, Any]) -> None:
        """Written beside, synced, renamed, the folder synced."""
        target = self._root / name
        beside = target.with_suffix(".new")
        try:
            with beside.open("w") as file:
                json.dump(document, file)
                file.flush()
                os.fsync(file.fileno())
            beside.rename(target)
            folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise UnavailableError(f"{target}: cannot be written: {error.strerror}") from error

    def _leftovers_remove(self) -> None:
        # A pull that was killed leaves its hidden staging folder.
        for folder in self._adapters.glob("*/.*"):
            shutil.rmtree(folder, ignore_errors=True)
