"""Listening, and an end that whatever runs comes to its end before, or is told that it does not.

On SIGTERM or SIGINT the node accepts nothing new and closes its port, and what waits for an adapter
is handed back. What runs may finish until the deadline; what is left then is cancelled, and its
caller is told so, instead of cut off. A node whose model's thread died ends in the same way.

HTTP runs beside the main thread, and its threads are daemons: none that hangs keeps the process.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
from types import FrameType
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from gpu_worker.serving.completions import Completions
from registry_service.domain import limits

_LOG = logging.getLogger(__name__)
# After the deadline: for the last words of what was cancelled.
_WORDS_SECONDS: Final = 5
# Between two looks at whether there is anything that still serves.
_LOOK_SECONDS: Final = 1.0


class Listener(uvicorn.Server):
    """Serves until a signal, then drains."""

    def __init__(
        self, app: FastAPI, completions: Completions, *, host: str, port: int, drain_seconds: float
    ) -> None:
        config: dict[str, Any] = {
            "host": host,
            "port": port,
            "log_config": None,
            "access_log": False,
            "server_header": False,
            # Whoever asks is at the other end of the connection, whatever a header says.
            "proxy_headers": False,
            # Beyond it requests are 503 unread: what a node holds for its callers has a bound.
            "limit_concurrency": limits.NODE_CONNECTIONS,
            "timeout_graceful_shutdown": int(drain_seconds) + _WORDS_SECONDS,
        }
        super().__init__(uvicorn.Config(app, **config))
        self._completions = completions
        self._drain_seconds = drain_seconds
        # Its ``put`` may interrupt itself, and an Event's ``set``, which takes a lock, may not.
        self._told: queue.SimpleQueue[int] = queue.SimpleQueue()

    def serve_until_told(self) -> bool:
        """Listen, on the main thread; False when that was not possible, or the engine died."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        http = threading.Thread(target=self.run, name="http", daemon=True)
        http.start()
        told = self._told_wait(http)
        self._completions.stop()
        self.should_exit = True
        requests = self._completions.requests
        if not requests.idle_wait(self._drain_seconds):
            _LOG.warning("%d requests cancelled: the time to finish is over", requests.cancel_all())
        http.join(_WORDS_SECONDS)
        return told and self.started

    def _told_wait(self, http: threading.Thread) -> bool:
        while http.is_alive():
            if not self._completions.engine_alive:
                _LOG.error("the engine is stopped: this process ends, start another")
                return False
            try:
                self._told.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            return True
        return False

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        """A signal. It runs between two instructions, maybe its own, so it takes no lock."""
        self._told.put(number)
