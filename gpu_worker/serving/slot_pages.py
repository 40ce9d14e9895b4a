"""Pages on disk: state, sidecar and the index that says which of them count.

    <number>.page      the state, sealed with the node's key
    <number>.sidecar   its identity, the seal's associated data
    index              which page is a slot's current one, sealed

A page is written whole before the index names it, and its number is never given twice: whatever a
crash leaves behind is not named, and removed at the next start.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from gpu_worker.serving.slot_files import SlotFiles
from gpu_worker.serving.slot_index import INDEX_FORMAT, SlotIndex
from gpu_worker.serving.slot_key import NodeKey
from gpu_worker.serving.slot_sidecar import Refusal, SlotRefusedError
from registry_service.domain import limits

_LOG = logging.getLogger(__name__)
_INDEX: Final = "index"
_INDEX_SEAL: Final = f"slot-index/{INDEX_FORMAT}".encode()


class SlotPages:
    """The folder of one node's pages. The caller serializes removals and the index."""

    def __init__(self, folder: Path, key: NodeKey) -> None:
        """Open the folder.

        Raises:
            UnavailableError: it cannot be used.
        """
        self._files = SlotFiles(folder)
        self._key = key
        self._left: set[str] = set()

    def close(self) -> None:
        """Let the folder go."""
        self._files.close()

    def write(self, page: int, sidecar: bytes, sealed: bytearray) -> None:
        """Write a page and its sidecar, durably. Raises OSError."""
        self._files.write(_state_name(page), sealed)
        self._files.write(_sidecar_name(page), sidecar)

    def sidecar(self, page: int) -> bytes:
        """A page's sidecar as it lies there.

        Raises:
            SlotRefusedError: MISSING or UNREADABLE.
        """
        return self._read(_sidecar_name(page), limits.SLOT_SIDECAR_BYTES)

    def state(self, page: int, limit: int = limits.SLOT_STATE_BYTES) -> bytes:
        """A page's sealed state as it lies there, of at most ``limit`` bytes.

        Raises:
            SlotRefusedError: MISSING or UNREADABLE.
        """
        return self._read(_state_name(page), limit)

    def remove(self, page: int) -> None:
        """Remove a page and its sidecar; what cannot be is kept in mind for ``left_remove``."""
        # The sidecar first: a page without one is nothing.
        self._left |= {_sidecar_name(page), _state_name(page)}
        self.left_remove()

    def left_remove(self) -> int:
        """Try again what could not be removed; how many files are left."""
        self._left = {name for name in sorted(self._left, reverse=True) if not self._gone(name)}
        return len(self._left)

    def sweep(self, index: SlotIndex) -> None:
        """Remove what the index does not name: saves that were cut off, or files put there."""
        pages = [entry.page for entry in index.entries()]
        named = {_INDEX, *map(_state_name, pages), *map(_sidecar_name, pages)}
        self._left |= self._files.names() - named
        self.left_remove()

    def index_read(self) -> SlotIndex:
        """The index; a new one where there is none.

        Raises:
            UntrustedError: another node's, or changed. MalformedError: another form.
            OSError: it cannot be read.
        """
        try:
            sealed = self._files.read(_INDEX, limits.SLOT_INDEX_BYTES)
        except FileNotFoundError:
            return SlotIndex()
        return SlotIndex.from_bytes(self._key.open(sealed, _INDEX_SEAL))

    def index_write(self, index: SlotIndex) -> None:
        """Write the index, durably. Raises OSError."""
        self._files.write(_INDEX, self._key.seal(index.to_bytes(), _INDEX_SEAL))

    def _gone(self, name: str) -> bool:
        try:
            self._files.remove(name)
        except OSError as error:
            _LOG.warning("slots: %s cannot be removed: %s", name, error.strerror)
            return False
        return True

    def _read(self, name: str, limit: int) -> bytes:
        try:
            return self._files.read(name, limit)
        except FileNotFoundError as error:
            raise SlotRefusedError(Refusal.MISSING, name, "no file") from error
        except OSError as error:
            raise SlotRefusedError(Refusal.UNREADABLE, name, error.strerror or error) from error


def _state_name(page: int) -> str:
    return f"{page}.page"


def _sidecar_name(page: int) -> str:
    return f"{page}.sidecar"
