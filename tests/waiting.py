"""Waiting in tests for what other threads do: looking often, and giving up after a while."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

_SECONDS = 30


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def deleted(folder: Path) -> None:
    """Delete a folder, in which others may write meanwhile."""

    def gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    until(gone)
