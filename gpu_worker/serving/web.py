"""HTTP: completions and chats, health, readiness, metrics, residency."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gpu_worker.serving.answering import Answering
from gpu_worker.serving.completions import Completions
from gpu_worker.serving.gate import DeniedError
from gpu_worker.serving.meter import who_fields
from gpu_worker.serving.metrics import MEDIA_TYPE
from gpu_worker.serving.openai_answers import error_document
from gpu_worker.serving.openai_bodies import Body, BodyError, chat_parse, completion_parse
from gpu_worker.serving.recorder import Asked
from gpu_worker.serving.running import AnswerCancelledError, Caller, Running
from gpu_worker.serving.tracing import caller_context
from registry_service.domain import limits
from registry_service.domain.errors import (
    MalformedError,
    NotFoundError,
    RegistryError,
    TooLargeError,
    UnavailableError,
)
from registry_service.domain.text import shown

_LOG = logging.getLogger(__name__)
_HEADER: Final = "routing-context"
# Elsewhere headers with such words choose an adapter; here nothing but the context does.
_CHOOSING: Final = frozenset({"adapter", "adapters", "lora", "loras"})
# A denial leaves a multiple of this after its request came, whatever was looked up for it.
_DENIAL_SECONDS: Final = 0.1
_WATCH_SECONDS: Final = 0.1
# When the node ends: for the engine to end what runs, which then has its own last words.
_LAST_SECONDS: Final = 1.0

Residency = Callable[[], list[dict[str, Any]]]


class MethodError(MalformedError):
    """A path that is known, with a method that it does not have."""

    http_status = 405


class SlowBodyError(MalformedError):
    """The body did not come in its time."""

    code = "BODY_TIMEOUT"
    http_status = 408


def app_build(completions: Completions, residency: Residency) -> FastAPI:
    """The node's HTTP application; ``residency`` reports what operators see."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(RegistryError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)
    asks = _Asks(completions)

    @app.get("/healthz")
    async def healthz() -> Response:
        if completions.engine_alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "dead", "reason": "the engine is stopped"}, status_code=503)

    @app.get("/readyz")
    async def readyz() -> Response:
        reason = completions.unready_reason
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "unready", "reason": reason}, status_code=503)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(completions.recorder.metrics.text(), media_type=MEDIA_TYPE)

    @app.get("/v1/residency")
    def residency_list(request: Request) -> dict[str, Any]:
        if not _on_loopback(request):
            raise NotFoundError("not found")
        return {"items": residency()}

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await asks.answer(request, "completions", completion_parse)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await asks.answer(request, "chat", chat_parse)

    return app


@dataclass(slots=True)
class _Turn:
    """One request, who waits for it, and how far it came."""

    asked: Asked
    caller: Caller
    came: float
    # Its body is here; the engine was asked for it.
    read: bool = False
    begun: bool = False


class _Asks:
    """Answers requests, each under an id of its own."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._recorder = completions.recorder
        # One for each request that starts, and one for each that the engine takes.
        self._threads = anyio.CapacityLimiter(math.inf)
        self._starting = 0
        self._answering = Answering(
            completions.text, completions.base.name, self._recorder, self._threads
        )

    async def answer(
        self, request: Request, route: str, parse: Callable[[bytes], Body]
    ) -> Response:
        """The answer, or the error in OpenAI's form; counted and told of once either way."""
        asked = Asked(uuid.uuid4().hex, route, time.time_ns(), caller_context(request.headers))
        turn = _Turn(asked, Caller(), anyio.current_time())
        try:
            response = await self._respond(request, parse, turn)
        except Exception as error:  # noqa: BLE001 - what is no refusal is told as a fault of ours
            response = error_response(await self._refusal(error, turn))
        if not turn.read:
            # What is still to come of the body is not waited for.
            response.headers["Connection"] = "close"
        self._recorder.metrics.answered(route, response.status_code)
        response.headers["X-Request-Id"] = asked.request_id
        return response

    async def _refusal(self, error: Exception, turn: _Turn) -> RegistryError:
        """What the caller is told instead of an answer, when it may be told."""
        asked, who = turn.asked, turn.caller.who
        if not isinstance(error, RegistryError):
            fields = {"requestId": asked.request_id, "route": asked.route, **who_fields(who)}
            _LOG.error("a request failed", exc_info=error, extra=fields)
            error = RegistryError("the node failed; see its log")
        if isinstance(error, DeniedError):
            steps = math.ceil((anyio.current_time() - turn.came) / _DENIAL_SECONDS)
            await anyio.sleep_until(turn.came + steps * _DENIAL_SECONDS)
        if not turn.begun:
            self._recorder.refused(asked, error, who)
        return error

    async def _respond(
        self, request: Request, parse: Callable[[bytes], Body], turn: _Turn
    ) -> Response:
        token = _token(request)
        content = await _body(request)
        turn.read = True
        start = partial(
            self._completions.start,
            token,
            content,
            parse,
            request_id=turn.asked.request_id,
            caller=turn.caller,
        )
        with anyio.CancelScope() as scope:
            watch = asyncio.create_task(self._watch(request, turn.caller, scope))
            try:
                running = await self._start(start)
                turn.begun = True
                return await self._answering.respond(running, turn.asked.trace)
            except BaseException:
                # Raised again: whatever it was, nobody waits for an answer any more.
                turn.caller.leave()
                raise
            finally:
                watch.cancel()
        raise AnswerCancelledError

    async def _start(self, start: Callable[[], Running]) -> Running:
        """Start a request on a thread of its own, at once or not at all.

        Whoever is cancelled here does not wait for it: something in it may hang.
        """
        if self._starting >= limits.STARTING_REQUESTS:
            raise UnavailableError("as many requests start as this node takes", retry_after=1)
        self._starting += 1
        try:
            return await anyio.to_thread.run_sync(
                start, abandon_on_cancel=True, limiter=self._threads
            )
        finally:
            self._starting -= 1

    async def _watch(self, request: Request, caller: Caller, scope: anyio.CancelScope) -> None:
        """Until the answer begins: end it when its caller leaves, or when the node does."""
        while not await request.is_disconnected():
            if self._completions.requests.over:
                await anyio.sleep(_LAST_SECONDS)
                scope.cancel()
                return
            await anyio.sleep(_WATCH_SECONDS)
        caller.leave()


def error_response(error: RegistryError) -> Response:
    """An error in OpenAI's form; equal errors give equal bytes."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(error_document(error), error.http_status, headers=headers)


async def _answer_error(_: Request, error: Exception) -> Response:
    if isinstance(error, RegistryError):
        return error_response(error)
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == MethodError.http_status:
        return error_response(MethodError("expected another method"))
    return error_response(NotFoundError("not found"))


def _token(request: Request) -> str:
    """The routing context of a request that nothing else seems to choose an adapter for.

    Raises:
        BodyError: a query, or a header that may choose one. DeniedError: not exactly one context.
    """
    if request.url.query:
        raise BodyError("expected no query parameters")
    for name in request.headers:
        if not _CHOOSING.isdisjoint(re.split("[-_.]", name)):
            raise BodyError(f"expected no header {shown(name)}: the routing context says what runs")
    tokens = request.headers.getlist(_HEADER)
    if len(tokens) != 1:
        raise DeniedError
    return tokens[0]


async def _body(request: Request) -> bytes:
    """The body, which is bounded in size and time: its caller is not known before it is here.

    Raises:
        TooLargeError: over its limit. SlowBodyError: it did not come in its time.
        AnswerCancelledError: whoever sent it has left.
    """
    length = request.headers.get("content-length", "")
    content = bytearray()
    if length.isdecimal() and int(length[:20]) > limits.ASKED_BYTES:
        raise _too_large()
    try:
        with anyio.fail_after(limits.ASKED_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > limits.ASKED_BYTES:
                    raise _too_large()
    except ClientDisconnect as error:
        raise AnswerCancelledError from error
    except TimeoutError as error:
        raise SlowBodyError(
            f"body: expected all of it within {limits.ASKED_SECONDS} s, got {len(content)} bytes"
        ) from error
    return bytes(content)


def _too_large() -> TooLargeError:
    return TooLargeError(f"body: expected at most {limits.ASKED_BYTES} bytes")


def _on_loopback(request: Request) -> bool:
    try:
        return ipaddress.ip_address(request.client.host if request.client else "").is_loopback
    except ValueError:
        return False
