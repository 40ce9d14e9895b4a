"""A few threads that work for keys: each key's turn comes once it is ready, and it holds up none.

However many keys wait, they take no more threads than there are to be, and none while nothing is
asked for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from gpu_worker.serving.residency import Key

_LOG = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 1.0


def _ready(_: Key) -> float | None:
    return 0.0


class KeyedExecutor:
    """Everything that looks at what waits goes by the lock of ``changed``."""

    def __init__(
        self,
        name: str,
        most: int,
        changed: threading.Condition,
        wait: Callable[[Key], float | None] = _ready,
    ) -> None:
        """``wait`` is asked under the lock how many seconds a key waits still: 0 is not at all, and
        None until ``changed`` is notified.
        """
        self._name = name
        self._most = most
        self._changed = changed
        self._wait = wait
        self._threads = 0
        self._waiting: dict[Key, Callable[[Key], object]] = {}
        self._busy: set[Key] = set()

    def submit(self, key: Key, work: Callable[[Key], object]) -> None:
        """Do this for a key once it is ready; what waits for the key already is replaced.

        Raises:
            Exception: no thread can be started and none runs. Nothing was asked then.
        """
        with self._changed:
            self._waiting[key] = work
            try:
                self._start()
            except Exception:
                # One that runs does this, too.
                if not self._threads:
                    del self._waiting[key]
                    raise
            self._changed.notify_all()

    def withdraw(self, key: Key, seconds: float) -> bool:
        """Drop what waits for a key, and wait for what is done; False when that takes longer."""
        with self._changed:
            self._waiting.pop(key, None)
            return self._changed.wait_for(lambda: key not in self._busy, seconds)

    def idle_wait(self, seconds: float) -> bool:
        """Wait until everything that was asked for is done; False when it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, seconds)

    def _start(self) -> None:
        if self._threads < self._most:
            threading.Thread(target=self._loop, name=self._name, daemon=True).start()
            self._threads += 1

    def _loop(self) -> None:
        try:
            while (found := self._next()) is not None:
                key, work = found
                try:
                    work(key)
                except Exception:  # noqa: BLE001 - one key's fault is not the others'
                    _LOG.exception("%s: %s failed", key.digest, self._name)
                with self._changed:
                    self._busy.discard(key)
                    self._changed.notify_all()
        except BaseException:
            # Raised again: only the number of threads is put right.
            with self._changed:
                self._threads -= 1
            raise

    def _next(self) -> tuple[Key, Callable[[Key], object]] | None:
        """The next key that is ready, and its work; None, and one thread less, when none waits."""
        with self._changed:
            while self._waiting:
                pauses = []
                for key in tuple(self._waiting):
                    pause = None if key in self._busy else self._pause(key)
                    if pause == 0:
                        self._busy.add(key)
                        return key, self._waiting.pop(key)
                    if pause is not None:
                        pauses.append(pause)
                self._changed.wait(min(pauses, default=None))
            self._threads -= 1
            return None

    def _pause(self, key: Key) -> float | None:
        try:
            return self._wait(key)
        except Exception:  # noqa: BLE001 - one key's fault is not the others'
            _LOG.exception("%s: %s cannot begin; looked at again", key.digest, self._name)
            return _AGAIN_SECONDS
