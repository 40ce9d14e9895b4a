"""Waiting in tests for what other threads do: looking often, and giving up after a while."""

from __future__ import annotations

import time
from collections.abc import Callable

_SECONDS = 30


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)
