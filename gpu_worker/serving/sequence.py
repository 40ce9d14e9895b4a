"""One request inside the engine: what was asked, the caller's handle, and its running state."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final

from transformers import DynamicCache

from gpu_worker.serving.lora import Adapter

STOP: Final = "stop"
LENGTH: Final = "length"
CANCELLED: Final = "cancelled"


class EngineError(Exception):
    """The engine cannot do what was asked; the message is for the log."""


class EngineBusyError(EngineError):
    """As many requests as the engine takes at once are there already."""


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate. ``adapter`` names an attached adapter; None is the base alone.

    ``admit`` is called when the job leaves the queue and raises to end it there; ``on_end`` is
    called exactly once, on the model's thread, on every way out.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    adapter: Hashable | None = None
    admit: Callable[[], None] = _nothing
    on_end: Callable[[], None] = _nothing


class Generation:
    """The caller's handle on a job: its tokens as they come, its end, and a way to cancel."""

    def __init__(self) -> None:
        self._tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self.finish_reason: str = ""
        self.produced = 0

    def cancel(self) -> None:
        """Ask the engine to let go; it does within one step."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """True once it was asked to stop."""
        return self._cancelled.is_set()

    @property
    def ended(self) -> bool:
        """True once the engine holds nothing of it any more."""
        return self._ended.is_set()

    def tokens(self) -> Iterator[int]:
        """Each token when it is there, once. Raises what ended the job, if anything did."""
        while (token := self._tokens.get()) is not None:
            yield token
        self._tokens.put(None)
        if self._error is not None:
            raise self._error

    def emit(self, token: int) -> None:
        """Hand a token over (engine only)."""
        self.produced += 1
        self._tokens.put(token)

    def end(self, reason: str, error: Exception | None) -> None:
        """Say that nothing follows (engine only)."""
        self.finish_reason, self._error = reason, error
        self._ended.set()
        self._tokens.put(None)


@dataclass(slots=True)
class Sequence:
    """A running job: its own KV, and the tokens that the model has not seen yet."""

    job: Job
    generation: Generation
    adapter: Adapter | None
    cache: DynamicCache
    pending: list[int] = field(default_factory=list)
