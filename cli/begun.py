"""Uploads that were begun, remembered on this machine so that a new ``publish`` continues them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Final

from cli.connection import private_write

_ENTRIES: Final = 200


class Begun(MutableMapping[str, str]):
    """A small mapping in a private file; a file that cannot be read counts as empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            found = {}
        self._entries: dict[str, str] = found if isinstance(found, dict) else {}

    def __getitem__(self, key: str) -> str:
        return self._entries[key]

    def __setitem__(self, key: str, value: str) -> None:
        self._entries.pop(key, None)
        self._entries[key] = value
        while len(self._entries) > _ENTRIES:
            del self._entries[next(iter(self._entries))]
        self._write()

    def __delitem__(self, key: str) -> None:
        del self._entries[key]
        self._write()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        private_write(self._path, json.dumps(self._entries))


def begun_default() -> Begun:
    """The mapping of this user (``$XDG_STATE_HOME/adapterctl``)."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Begun(Path(state) / "adapterctl" / "uploads.json")
