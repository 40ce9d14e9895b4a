"""How often something may be tried: a token bucket, and growing pauses after failures.

Times are in seconds of one clock, given by the caller.
"""

from __future__ import annotations

from collections.abc import Hashable


class TokenBucket:
    """At most ``burst`` at once, and ``per_second`` in the long run, for each name."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = float(burst)
        self._levels: dict[Hashable, tuple[float, float]] = {}

    def take(self, name: Hashable, now: float) -> float:
        """Take one: 0, or, when there is none, the seconds until there is."""
        level, since = self._levels.get(name, (self._burst, now))
        level = min(self._burst, level + (now - since) * self._per_second)
        if level < 1.0:
            self._levels[name] = (level, now)
            return (1.0 - level) / self._per_second
        self._levels[name] = (level - 1.0, now)
        return 0.0


class Backoff:
    """Pauses by name: none after the first failure, then doubling from ``first`` up to a most."""

    def __init__(self, first: float, names: int) -> None:
        self._first = first
        self._names = names
        self._failures: dict[Hashable, tuple[int, float, float]] = {}

    def failed(self, name: Hashable, now: float, most: float) -> None:
        """Count a failure whose pause is ``most`` at the longest.

        Beyond ``names`` the one that failed longest ago is forgotten.
        """
        count, _, _ = self._failures.pop(name, (0, 0.0, 0.0))
        if len(self._failures) >= self._names:
            del self._failures[next(iter(self._failures))]
        self._failures[name] = (count + 1, now, most)

    def succeeded(self, name: Hashable) -> None:
        """Forget the failures of a name."""
        self._failures.pop(name, None)

    def wait(self, name: Hashable, now: float) -> float:
        """Seconds until the next try is allowed; 0 when it is."""
        count, at, most = self._failures.get(name, (0, now, 0.0))
        if count < 2:
            return 0.0
        # The exponent is bounded too: a count has no end.
        pause = min(most, self._first * 2.0 ** min(count - 2, 32))
        return max(0.0, at + pause - now)
