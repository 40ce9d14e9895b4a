"""Open requests: what each holds, when it went where, who waits for it, and all together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from gpu_worker.serving.meter import Amount, RequestTuple
from gpu_worker.serving.openai_bodies import Body
from gpu_worker.serving.places import Places
from gpu_worker.serving.sequence import Generation, Output
from registry_service.domain import limits
from registry_service.domain.errors import UnavailableError


class AnswerCancelledError(UnavailableError):
    """The node let go of the request before its answer was whole."""

    code = "CANCELLED"

    def __init__(self) -> None:
        super().__init__(
            "the answer was cancelled before its end: the node stops, or what it ran on was "
            "withdrawn",
            retry_after=1,
        )


@dataclass(slots=True)
class Marks:
    """When a request went where, in nanoseconds since the epoch; 0 is never.

    It arrived, was allowed, had its adapter, was queued, left the queue, gave its first token, and
    its last one so far. Tokens have the engine's times, however late they are read.
    """

    arrived: int = field(default_factory=time.time_ns)
    allowed: int = 0
    loaded: int = 0
    queued: int = 0
    joined: int = 0
    first: int = 0
    last: int = 0

    def token(self, at: int) -> None:
        """The engine gave a token."""
        self.first = min(self.first or at, at)
        self.last = max(self.last, at)


@dataclass(frozen=True, slots=True)
class Request:
    """One request that was allowed."""

    request_id: str
    who: RequestTuple
    body: Body
    marks: Marks


class Running:
    """One open request: from its places on, up to the end of the last of its ``n`` sequences.

    What it holds is in ``held``, and let go of when starter and sequences are done, whichever way
    each went.
    """

    def __init__(self, request: Request, on_ended: Callable[[Running], None]) -> None:
        self.request = request
        self.generations: list[Generation] = []
        self.held = ExitStack()
        self.prompt_tokens = 0
        self.cancelled = False
        self._on_ended = on_ended
        self._lock = threading.Lock()
        # The sequences, and whoever starts them.
        self._left = request.body.n + 1

    @property
    def amount(self) -> Amount:
        """What it used so far. The prompt counts once, however many answers it has."""
        generations = self.generations
        return Amount(
            requests=1,
            prompt=self.prompt_tokens if self.request.marks.joined else 0,
            completion=sum(generation.produced for generation in generations),
            reused=generations[0].reused_tokens if generations else 0,
        )

    def go_check(self) -> None:
        """Look whether it is still wanted, before more is done for it.

        Raises:
            AnswerCancelledError: it was cancelled.
        """
        if self.cancelled:
            raise AnswerCancelledError

    def add(self, generation: Generation) -> None:
        """One of its sequences is in the engine."""
        self.generations.append(generation)
        # Looked at after it was added, and set before all are cancelled: none is forgotten.
        if self.cancelled:
            generation.cancel()

    def cancel(self) -> None:
        """Ask for its end: nothing more is begun, and the engine lets go within one step."""
        self.cancelled = True
        for generation in tuple(self.generations):
            generation.cancel()

    def joined(self) -> None:
        """A sequence left the queue."""
        self.request.marks.joined = self.request.marks.joined or time.time_ns()

    def less(self, count: int = 1) -> None:
        """So many sequences ended or never began, or the starter is done."""
        with self._lock:
            self._left -= count
            last = self._left == 0
        if last:
            self.held.close()
            self._on_ended(self)

    def outputs(
        self, index: int, on_token: Callable[[float], None] = lambda _: None
    ) -> Iterator[Output]:
        """The tokens of one choice.

        ``on_token`` hears the seconds that the engine took from the one before to each.
        """
        before = 0
        for output in self.generations[index].outputs():
            self.request.marks.token(output.at)
            if before:
                on_token((output.at - before) / 1e9)
            before = output.at
            yield output


class Caller:
    """Whoever waits for an answer, from the request's arrival on. It may leave at any time.

    ``who`` is None until its routing context is known to hold.
    """

    def __init__(self) -> None:
        self.who: RequestTuple | None = None
        self._left = False
        self._running: Running | None = None

    def follow(self, running: Running) -> None:
        """Its request is open."""
        self._running = running
        # Set and looked at in the other order than in ``leave``: one of the two sees the other.
        if self._left:
            running.cancel()

    def leave(self) -> None:
        """Nobody waits any more."""
        self._left = True
        if self._running is not None:
            self._running.cancel()


class OpenRequests:
    """All requests of a node that start, wait or run. Thread-safe."""

    def __init__(self, tenant_most: int = limits.TENANT_SEQUENCES) -> None:
        self._answers = Places("answers", tenant_most=tenant_most, most=limits.SEQUENCES)
        self._changed = threading.Condition()
        self._open: set[Running] = set()
        self._over = False

    @property
    def over(self) -> bool:
        """True once everything was cancelled: the node ends."""
        return self._over

    @contextmanager
    def held(self, running: Running) -> Iterator[None]:
        """Hold a request among the open ones, with a place for each of its answers.

        Raises:
            TooManyRequestsError: its tenant has as many as it may. UnavailableError: all are taken.
            AnswerCancelledError: the node ends.
        """
        with self._answers.held(running.request.who.tenant_id, running.request.body.n):
            with self._changed:
                if self._over:
                    raise AnswerCancelledError
                self._open.add(running)
            try:
                yield
            finally:
                with self._changed:
                    self._open.discard(running)
                    self._changed.notify_all()

    def counts(self) -> dict[str, int]:
        """How many start, wait in the engine's queue, and run."""
        with self._changed:
            marks = [running.request.marks for running in self._open]
        running = sum(bool(mark.joined) for mark in marks)
        queued = sum(bool(mark.queued) for mark in marks)
        return {"starting": len(marks) - queued, "waiting": queued - running, "running": running}

    def idle_wait(self, seconds: float) -> bool:
        """Wait until there is none; False when there still is one after ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, seconds)

    def cancel_all(self) -> int:
        """Cancel every request, and whichever comes still; how many."""
        with self._changed:
            self._over = True
            running = tuple(self._open)
        for each in running:
            each.cancel()
        return len(running)
