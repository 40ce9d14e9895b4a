"""Hash the base again after adapters were loaded, beside everything else.

One pass at a time, however many loads asked for it meanwhile. It reads what the model reads and
writes nothing, so requests go on; hashing does not hold the interpreter's lock.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
from collections.abc import Callable

from gpu_worker.serving.parameters import Named, parameter_add
from gpu_worker.serving.residency import Key

_LOG = logging.getLogger(__name__)


class BaseAudit:
    """Watches residents; after each load it compares the base with what it was at the start."""

    def __init__(self, named: Named, digest: str, lost: Callable[[], None]) -> None:
        """``digest`` is ``parameters_digest`` of ``named``; ``lost`` is called when it is not."""
        self._named, self._digest, self._lost = named, digest, lost
        self._asked = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="base audit", daemon=True)

    def start(self) -> None:
        """Hash whenever a load asks for it."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, between two tensors at the latest."""
        self._stopping.set()
        self._asked.set()
        if self._thread.is_alive():
            self._thread.join()

    def hit(self, key: Key) -> None:
        """A use changes nothing."""

    def loaded(self, key: Key, seconds: float) -> None:
        """The base is hashed again."""
        self._asked.set()

    def load_failed(self, key: Key) -> None:
        """What failed half way may have written, too: the base is hashed again."""
        self._asked.set()

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self._asked.wait()
            self._asked.clear()
            found = self._hashed()
            if found is not None and not hmac.compare_digest(found, self._digest):
                _LOG.error(
                    "base: expected parameters %s, got %s",
                    self._digest,
                    found,
                    extra={"event": "base.changed"},
                )
                self._lost()
                return

    def _hashed(self) -> str | None:
        """The digest now, or None when the node stops meanwhile."""
        state = hashlib.sha256()
        for name, tensor in self._named:
            if self._stopping.is_set():
                return None
            parameter_add(state, name, tensor)
        return "sha256:" + state.hexdigest()
