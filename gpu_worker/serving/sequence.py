"""One request inside the engine: what was asked, the caller's handle, and its running state."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from gpu_worker.serving.lanes import LaneState
    from gpu_worker.serving.sampler import Sampler
    from gpu_worker.serving.stopping import StopText

STOP: Final = "stop"
LENGTH: Final = "length"
CANCELLED: Final = "cancelled"


class EngineError(Exception):
    """The engine cannot do what was asked; the message is for the log."""


class EngineBusyError(EngineError):
    """As many requests as the engine takes at once are there already."""


class TooLongError(EngineError):
    """Prompt and answer do not fit a lane."""


def _nothing() -> None:
    return None


def _yes(tokens: int) -> bool:
    """Every state is wanted."""
    return True


class TextDecoder(Protocol):
    """Turns one request's tokens into text, one at a time."""

    def push(self, token: int) -> str:
        """The text that this token completed; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    ``temperature`` 0 takes the likeliest token. ``top_p`` keeps the likeliest tokens that together
    reach it. The same ``seed`` gives the same choices; None draws one. ``logprobs`` asks for each
    token's log probability under the model and that many of the likeliest. ``stop`` ends the
    answer before any of these texts, which ``decoder`` makes from the tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    decoder: TextDecoder | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1:
            raise EngineError("expected a finite temperature of at least 0 and top_p in (0, 1]")
        if self.logprobs is not None and self.logprobs < 0:
            raise EngineError("logprobs: expected at least 0")
        if self.stop and (self.decoder is None or not all(self.stop)):
            raise EngineError("stop: expected texts that are not empty, and a decoder")


class Holder(NamedTuple):
    """Whose KV is: whoever asks for a job, under the adapter that it runs on."""

    tenant: Hashable
    adapter: Hashable | None


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate. ``adapter`` names an attached adapter; None is the base alone.

    ``admit`` is called when the job leaves the queue and raises to end it there; ``on_end`` is
    called exactly once, on the model's thread, on every way out.

    ``root_key`` states everything that prefix KV depends on except the tokens; without one nothing
    is shared. ``tenant`` is whose budget the blocks count against. ``lane_state`` is KV of an
    earlier turn under the same identity; what the prompt has in common with it is not computed
    again. When it cannot be put into a lane, ``on_restore_failed`` hears why, on the model's
    thread, and the whole prompt is computed; ``on_lane_filled`` hears when the engine has no more
    of it. ``on_lane_state`` gets this turn's KV on the model's thread when it ended by itself, if
    ``wants_lane_state``, asked with its number of tokens before it is copied, says so.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    adapter: Hashable | None = None
    admit: Callable[[], None] = _nothing
    on_end: Callable[[], None] = _nothing
    sampling: Sampling = Sampling()
    root_key: bytes | None = None
    tenant: Hashable = None
    lane_state: LaneState | None = None
    on_restore_failed: Callable[[Exception], None] | None = None
    on_lane_filled: Callable[[], None] = _nothing
    wants_lane_state: Callable[[int], bool] = _yes
    on_lane_state: Callable[[LaneState], None] | None = None

    @property
    def holder(self) -> Holder:
        """Whose its KV is."""
        return Holder(self.tenant, self.adapter)


@dataclass(frozen=True, slots=True)
class Output:
    """One token of an answer.

    ``text`` is what a decoder released with it: text that may begin a stop text is held back.
    ``logprob`` and ``top`` (pairs of token and log probability) are there when they were asked for.
    ``at`` is when it was made, in nanoseconds since the epoch.
    """

    token: int
    text: str = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    at: int = field(default_factory=time.time_ns, compare=False)


class Generation:
    """The caller's handle on a job: its tokens as they come, its end, and a way to cancel."""

    def __init__(self) -> None:
        self._outputs: queue.SimpleQueue[Output | None] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self.finish_reason: str = ""
        self.produced = 0
        self.reused_tokens = 0
        """Tokens of the prompt that were not computed again."""
        self.rest = ""
        """Text that was held back until the end and is part of the answer."""

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

    def outputs(self) -> Iterator[Output]:
        """Each token when it is there, once. Raises what ended the job, if anything did."""
        while (output := self._outputs.get()) is not None:
            yield output
        self._outputs.put(None)
        if self._error is not None:
            raise self._error

    def tokens(self) -> Iterator[int]:
        """The token ids of ``outputs``."""
        return (output.token for output in self.outputs())

    def emit(self, output: Output) -> None:
        """Hand a token over (engine only)."""
        self.produced += 1
        self._outputs.put(output)

    def end(self, reason: str, error: Exception | None) -> None:
        """Say that nothing follows (engine only)."""
        self.finish_reason, self._error = reason, error
        self._ended.set()
        self._outputs.put(None)


@dataclass(slots=True, eq=False)
class Sequence:
    """A job in the engine.

    While it runs it holds a lane and a reference to its bank row. ``cached`` tokens of prompt and
    ``produced`` have their KV in the lane, and ``lane_state`` is there until it joined; ``job`` has
    none. ``shares`` says whether its blocks may be published, and ``blocks`` are the keys of those
    that it used or published.
    """

    job: Job
    generation: Generation
    sampler: Sampler
    lane_state: LaneState | None = None
    stop_text: StopText | None = None
    lane: int = -1
    bank_row: int = 0
    cached: int = 0
    produced: list[int] = field(default_factory=list)
    shares: bool = False
    blocks: list[bytes] = field(default_factory=list)
