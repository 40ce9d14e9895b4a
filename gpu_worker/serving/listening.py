"""Listening, and ending well: what runs comes to its end, or is told that it does not.

On SIGTERM or SIGINT the node accepts nothing new and closes its port. What runs may finish until
the deadline; what is left then is cancelled, and its caller is told so, instead of cut off.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from gpu_worker.serving.completions import Completions

_LOG = logging.getLogger(__name__)
# After the deadline: for the last words of what was cancelled.
_WORDS_SECONDS: Final = 5


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
            "timeout_graceful_shutdown": int(drain_seconds) + _WORDS_SECONDS,
        }
        super().__init__(uvicorn.Config(app, **config))
        self._completions = completions
        self._drain_seconds = drain_seconds
        self._told = threading.Event()

    def serve_until_told(self) -> bool:
        """Listen; False when that was not possible."""
        # uvicorn raises the signal again once it has stopped; what is left to do comes after that.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)
        threading.Thread(target=self._drain, name="drain requests", daemon=True).start()
        self.run()
        return bool(self.started)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: accept nothing new. It runs between two instructions, so it takes no lock."""
        self._completions.stop()
        self._told.set()
        super().handle_exit(sig, frame)

    def _drain(self) -> None:
        self._told.wait()
        if not self._completions.requests.idle_wait(self._drain_seconds):
            count = self._completions.requests.cancel_all()
            _LOG.warning("%d requests cancelled: the time to finish is over", count)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    return None
