"""The node's folder: pulled files by tenant and digest, and how far it has read the feed.

adapters/<tenant id>/<hex>/   the files of one adapter, read-only
feed.json                     {"url", "node", "index"}
lock                          held while a node uses the folder
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Final
from uuid import UUID

from gpu_worker.serving.residency import Key
from registry_service.domain.canonical import json_parse
from registry_service.domain.digests import Digest, is_digest
from registry_service.domain.errors import ConflictError, MalformedError, UnavailableError

_FEED: Final = "feed.json"


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
            known = json_parse((self._root / _FEED).read_bytes(), what=_FEED, limit=4096)
        except (FileNotFoundError, MalformedError):
            return 0
        index = known.pop("index", 0) if isinstance(known, dict) else 0
        return index if known == self._identity and isinstance(index, int) else 0

    def feed_index_write(self, index: int) -> None:
        """Keep the index, durably: written beside, synced, renamed."""
        target = self._root / _FEED
        beside = target.with_suffix(".new")
        with beside.open("w") as file:
            json.dump({**self._identity, "index": index}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(target)

    def _leftovers_remove(self) -> None:
        # A pull that was killed leaves its hidden staging folder.
        for folder in self._adapters.glob("*/.*"):
            shutil.rmtree(folder, ignore_errors=True)
