"""What operators see of each adapter on a node: loads, failures, uses, speed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from gpu_worker.serving.metrics import Metrics
from gpu_worker.serving.residency import Key

_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class AdapterNumbers:
    """Of one adapter since the start. Times in seconds; ``load_seconds`` is the last load's."""

    loads: int = 0
    load_failures: int = 0
    load_seconds: float = 0.0
    hits: int = 0
    tokens: int = 0
    token_seconds: float = 0.0


class AdapterStatistics:
    """Keeps them, and the node's sums of loads. Thread-safe."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._numbers: OrderedDict[Key, AdapterNumbers] = OrderedDict()

    def hit(self, key: Key) -> None:
        """A request found it resident."""
        with self._lock:
            numbers = self._of(key)
            self._numbers[key] = replace(numbers, hits=numbers.hits + 1)

    def loaded(self, key: Key, seconds: float) -> None:
        """It was loaded."""
        self._metrics.loaded(seconds)
        with self._lock:
            numbers = self._of(key)
            self._numbers[key] = replace(numbers, loads=numbers.loads + 1, load_seconds=seconds)

    def load_failed(self, key: Key) -> None:
        """A load failed."""
        self._metrics.load_failed()
        with self._lock:
            numbers = self._of(key)
            self._numbers[key] = replace(numbers, load_failures=numbers.load_failures + 1)

    def token(self, key: Key, seconds: float) -> None:
        """An answer on it went on."""
        with self._lock:
            numbers = self._of(key)
            self._numbers[key] = replace(
                numbers, tokens=numbers.tokens + 1, token_seconds=numbers.token_seconds + seconds
            )

    def of(self, key: Key) -> AdapterNumbers:
        """The numbers of one adapter."""
        with self._lock:
            return self._numbers.get(key, AdapterNumbers())

    def keys(self) -> tuple[Key, ...]:
        """Every adapter that is remembered, least recently used first."""
        with self._lock:
            return tuple(self._numbers)

    def _of(self, key: Key) -> AdapterNumbers:
        """The numbers of one; beyond a bound the one that was used longest ago is forgotten."""
        found = self._numbers.setdefault(key, AdapterNumbers())
        self._numbers.move_to_end(key)
        if len(self._numbers) > _REMEMBERED:
            self._numbers.popitem(last=False)
        return found
