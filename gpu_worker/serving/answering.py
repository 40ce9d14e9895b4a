"""A running request's answer over HTTP: whole, or as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse
from opentelemetry.context import Context
from starlette.types import Receive, Scope, Send

from gpu_worker.serving.openai_answers import (
    Heading,
    Usage,
    answer,
    chunk,
    error_document,
    usage_chunk,
)
from gpu_worker.serving.openai_bodies import ChatBody
from gpu_worker.serving.reading import Piece, Reading, TokenText
from gpu_worker.serving.recorder import Recorder
from gpu_worker.serving.running import AnswerCancelledError, Running
from gpu_worker.serving.sequence import CANCELLED, EngineError
from registry_service.domain.errors import RegistryError, UnavailableError

_GONE: Final = "gone"
_FAILED: Final = "failed"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Answering:
    """What answers are made with."""

    text: TokenText
    model: str
    recorder: Recorder
    threads: anyio.CapacityLimiter

    async def respond(self, running: Running, caller: Context) -> Response:
        """The answer's beginning, or all of it. The request is over when it raises.

        Raises:
            RegistryError: it ended before there was an answer.
        """
        work = _Work(self, running, caller)
        try:
            if running.request.body.stream:
                return await work.stream()
            return await work.whole()
        except BaseException as error:
            # Also a cancelled task: the request leaves the engine on every way out.
            work.finish(error)
            raise


class _Work:
    """One request's answer. ``finish`` is called on every way out."""

    def __init__(self, parts: Answering, running: Running, caller: Context) -> None:
        self._parts = parts
        self._running = running
        self._caller = caller
        self._finished = False
        body = running.request.body
        self._probabilities = body.alternatives is not None
        self._heading = Heading(
            running.request.request_id,
            int(time.time()),
            parts.model,
            running.request.who.adapter_digest,
            chat=isinstance(body, ChatBody),
        )

    def finish(self, error: BaseException | None = None) -> None:
        """Let go of the request and record its end, once."""
        self._running.cancel()
        if self._finished:
            return
        self._finished = True
        if error is None:
            reasons = {generation.finish_reason for generation in self._running.generations}
            outcome = "+".join(sorted(reasons))
        elif isinstance(error, RegistryError):
            outcome = error.code.lower()
        else:
            outcome = _FAILED if isinstance(error, Exception) else _GONE
        self._parts.recorder.finished(self._running, self._caller, outcome, good=error is None)

    async def whole(self) -> Response:
        """Everything at once."""
        choices = await self._in_thread(self._choices)
        self.finish()
        document = answer(self._heading, choices, self._usage(), probabilities=self._probabilities)
        return JSONResponse(document)

    async def stream(self) -> Response:
        """Events. The first comes before the status, so that a refusal still has its own."""
        chunks = self._chunks()
        first = await self._in_thread(lambda: next(chunks, None))
        return _Events(self._events(chunks, first), self)

    async def _events(
        self, chunks: Iterator[dict[str, Any]], first: dict[str, Any] | None
    ) -> AsyncIterator[str]:
        found = first
        try:
            while found is not None:
                yield _event(found)
                found = await self._in_thread(lambda: next(chunks, None))
        except RegistryError as error:
            # The status is sent already: an event says that the answer is not whole.
            self.finish(error)
            yield _event(error_document(error))
            return
        self.finish()
        yield "data: [DONE]\n\n"

    def _chunks(self) -> Iterator[dict[str, Any]]:
        """The chunks of all choices, in turns."""
        body = self._running.request.body
        readings = {index: iter(self._reading(index)) for index in range(body.n)}
        begun: set[int] = set()
        while readings:
            for index, reading in tuple(readings.items()):
                with _engine_errors():
                    piece = next(reading, None)
                reason = None
                if piece is None:
                    del readings[index]
                    reason = self._reason(index)
                yield chunk(
                    self._heading,
                    index,
                    piece,
                    first=index not in begun,
                    reason=reason,
                    probabilities=self._probabilities,
                )
                begun.add(index)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield usage_chunk(self._heading, self._usage())

    def _choices(self) -> list[tuple[list[Piece], str]]:
        found = []
        for index in range(self._running.request.body.n):
            with _engine_errors():
                pieces = list(self._reading(index))
            found.append((pieces, self._reason(index)))
        return found

    def _reading(self, index: int) -> Reading:
        running, recorder = self._running, self._parts.recorder

        def on_token(seconds: float) -> None:
            # The others are read after or between the first: only its pace is the engine's.
            if index == 0:
                recorder.token(running, seconds)

        return Reading(
            self._parts.text,
            running.generations[index],
            running.outputs(index, on_token),
            stops=bool(running.request.body.stops),
            probabilities=self._probabilities,
        )

    def _reason(self, index: int) -> str:
        reason = self._running.generations[index].finish_reason
        if reason == CANCELLED:
            raise AnswerCancelledError
        return reason

    def _usage(self) -> Usage:
        amount = self._running.amount
        return Usage(amount.prompt, amount.completion, amount.reused)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await anyio.to_thread.run_sync(
            work, abandon_on_cancel=True, limiter=self._parts.threads
        )


class _Events(StreamingResponse):
    """A stream whose request is over when nobody reads it any more."""

    def __init__(self, events: AsyncIterator[str], work: _Work) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.finish(GeneratorExit())


@contextmanager
def _engine_errors() -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise UnavailableError("the answer failed on this node", retry_after=1) from error


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
