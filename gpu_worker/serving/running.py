"""Requests in the engine: what each holds, when it went where, and all of them together."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from uuid import UUID

from gpu_worker.serving.meter import Amount, RequestTuple
from gpu_worker.serving.openai_bodies import Body
from gpu_worker.serving.sequence import Generation, Output
from registry_service.domain import limits
from registry_service.domain.errors import TooManyRequestsError


@dataclass(slots=True)
class Marks:
    """When a request went where, in nanoseconds since the epoch; 0 is never.

    It arrived, was allowed, had its adapter, was queued, left the queue, gave its first token, and
    its last one so far.
    """

    arrived: int = field(default_factory=time.time_ns)
    allowed: int = 0
    loaded: int = 0
    queued: int = 0
    joined: int = 0
    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One request that was allowed."""

    request_id: str
    who: RequestTuple
    body: Body
    prompt_tokens: int
    marks: Marks


class Running:
    """One request in the engine: ``n`` sequences under one lease and one routing context.

    What it holds is let go of when the last sequence has ended, whichever way each went.
    """

    def __init__(self, request: Request, let_go: Callable[[Running], None]) -> None:
        self.request = request
        self.generations: list[Generation] = []
        self._let_go = let_go
        self._lock = threading.Lock()
        # The sequences, and whoever starts them.
        self._left = request.body.n + 1

    @property
    def amount(self) -> Amount:
        """What it used so far. The prompt counts once, however many answers it has."""
        generations = self.generations
        return Amount(
            requests=1,
            prompt=self.request.prompt_tokens if self.request.marks.joined else 0,
            completion=sum(generation.produced for generation in generations),
            reused=generations[0].reused_tokens if generations else 0,
        )

    @property
    def ended(self) -> bool:
        """True when the engine holds nothing of it any more."""
        return all(generation.ended for generation in self.generations)

    def cancel(self) -> None:
        """Ask the engine to let go; it does within one step."""
        for generation in self.generations:
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
            self._let_go(self)

    def outputs(
        self, index: int, on_token: Callable[[float], None] = lambda _: None
    ) -> Iterator[Output]:
        """The tokens of one choice; ``on_token`` hears the seconds since the one before."""
        marks = self.request.marks
        before = 0
        for output in self.generations[index].outputs():
            now = time.time_ns()
            marks.first, marks.last = marks.first or now, now
            if before:
                on_token((now - before) / 1e9)
            before = now
            yield output


class OpenRequests:
    """All requests of a node that are waiting or running. Thread-safe."""

    def __init__(self, tenant_most: int = limits.TENANT_SEQUENCES) -> None:
        self._tenant_most = tenant_most
        self._changed = threading.Condition()
        self._places: Counter[UUID] = Counter()
        self._running: set[Running] = set()

    def place_take(self, tenant_id: UUID, count: int) -> None:
        """Take places for a tenant's sequences.

        Raises:
            TooManyRequestsError: it has as many as it may.
        """
        with self._changed:
            if self._places[tenant_id] + count > self._tenant_most:
                raise TooManyRequestsError(
                    f"expected at most {self._tenant_most} answers at once for this tenant",
                    retry_after=1,
                )
            self._places[tenant_id] += count

    def place_release(self, tenant_id: UUID, count: int) -> None:
        """Give places back."""
        with self._changed:
            self._places[tenant_id] -= count
            if not self._places[tenant_id]:
                del self._places[tenant_id]
            self._changed.notify_all()

    def add(self, running: Running) -> None:
        """A request goes to the engine."""
        with self._changed:
            self._running.add(running)

    def remove(self, running: Running) -> None:
        """A request came to its end."""
        with self._changed:
            self._running.discard(running)
            self._changed.notify_all()

    def counts(self) -> dict[str, int]:
        """How many wait in the queue, and how many run."""
        with self._changed:
            waiting = sum(not running.request.marks.joined for running in self._running)
            return {"waiting": waiting, "running": len(self._running) - waiting}

    def idle_wait(self, seconds: float) -> bool:
        """Wait until there is none; False when there still is one after ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, seconds)

    def cancel_all(self) -> int:
        """Cancel every request; how many."""
        with self._changed:
            running = tuple(self._running)
        for each in running:
            each.cancel()
        return len(running)
