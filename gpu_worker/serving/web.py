"""HTTP: completions, health, readiness, residency."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Final

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from gpu_worker.serving.completions import BODY_BYTES, Completions, Started
from gpu_worker.serving.pieces import Pieces
from gpu_worker.serving.sequence import EngineError
from registry_service.domain.errors import (
    MalformedError,
    NotFoundError,
    RegistryError,
    TooLargeError,
    UnavailableError,
)

_HEADER: Final = "routing-context"
_WATCH_SECONDS: Final = 0.1
_THREADS: Final = 256


def app_build(completions: Completions) -> FastAPI:
    """The node's HTTP application."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    threads = anyio.CapacityLimiter(_THREADS)

    @app.exception_handler(RegistryError)
    async def refused(_: Request, error: RegistryError) -> Response:
        return problem(error)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> Response:
        ready = completions.ready
        status = {"status": "ready" if ready else "unready"}
        return JSONResponse(status, status_code=200 if ready else 503)

    @app.get("/v1/residency")
    def residency(request: Request) -> dict[str, Any]:
        if not _on_loopback(request):
            raise NotFoundError("not found")
        return {"items": _residency(completions)}

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        if request.url.query:
            raise MalformedError("expected no query parameters")
        content = await _body(request)
        tokens = request.headers.getlist(_HEADER)
        token = tokens[0] if len(tokens) == 1 else None
        started = await anyio.to_thread.run_sync(completions.start, token, content, limiter=threads)
        return await _answer(request, completions, started, threads)

    return app


def problem(error: RegistryError) -> Response:
    """An error as RFC 9457 problem+json; equal errors give equal bytes."""
    body = {
        "type": "about:blank",
        "title": error.code.replace("_", " ").capitalize(),
        "status": error.http_status,
        "code": error.code,
        "detail": error.message,
    }
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(
        body, error.http_status, headers=headers, media_type="application/problem+json"
    )


async def _answer(
    request: Request, completions: Completions, started: Started, threads: anyio.CapacityLimiter
) -> Response:
    if started.body.stream:
        pieces = iter(Pieces(completions.text, started.generation))
        # The first piece comes before the status, so that a refusal still has its own.
        first = await _next(pieces, started, threads)
        events = _events(completions, started, pieces, first, threads)
        return StreamingResponse(events, media_type="text/event-stream")
    outcome: list[int] | RegistryError = []
    async with anyio.create_task_group() as group:
        group.start_soon(_watch, request, started)
        try:
            outcome = await anyio.to_thread.run_sync(
                _all_tokens, started, abandon_on_cancel=True, limiter=threads
            )
        except RegistryError as error:
            outcome = error
        finally:
            started.generation.cancel()
            group.cancel_scope.cancel()
    if isinstance(outcome, RegistryError):
        raise outcome
    text = completions.text.decode(outcome)
    return JSONResponse({"text": text, **_facts(completions, started, len(outcome))})


async def _events(
    completions: Completions,
    started: Started,
    pieces: Iterator[str],
    first: str | None,
    threads: anyio.CapacityLimiter,
) -> AsyncIterator[str]:
    """Server-sent events: pieces of text, then the facts, or an error at any place."""
    try:
        piece = first
        while piece is not None:
            yield _event({"text": piece})
            piece = await _next(pieces, started, threads)
        yield _event(_facts(completions, started, started.generation.produced))
    except RegistryError as error:
        yield _event({"error": {"code": error.code, "detail": error.message}})
    finally:
        # Also when the client is gone: the engine lets go within one step.
        started.generation.cancel()
    yield "data: [DONE]\n\n"


async def _next(
    pieces: Iterator[str], started: Started, threads: anyio.CapacityLimiter
) -> str | None:
    def take() -> str | None:
        with _engine_errors():
            return next(pieces, None)

    try:
        return await anyio.to_thread.run_sync(take, abandon_on_cancel=True, limiter=threads)
    except BaseException:
        started.generation.cancel()
        raise


async def _watch(request: Request, started: Started) -> None:
    while not started.generation.ended:
        if await request.is_disconnected():
            started.generation.cancel()
            return
        await anyio.sleep(_WATCH_SECONDS)


def _all_tokens(started: Started) -> list[int]:
    with _engine_errors():
        return list(started.generation.tokens())


@contextmanager
def _engine_errors() -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise UnavailableError("the generation failed on this node", retry_after=1) from error


async def _body(request: Request) -> bytes:
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > BODY_BYTES:
            raise TooLargeError(f"body: expected at most {BODY_BYTES} bytes")
    return content


def _facts(completions: Completions, started: Started, produced: int) -> dict[str, Any]:
    return {
        "adapterDigest": started.context.adapter_digest,
        "baseModelDigest": completions.base.digest,
        "tenant": started.context.tenant,
        "promptTokens": started.prompt_tokens,
        "completionTokens": produced,
        "finishReason": started.generation.finish_reason,
    }


def _residency(completions: Completions) -> list[dict[str, Any]]:
    return [
        {
            "adapterDigest": item.key.digest,
            "tenantId": str(item.key.tenant_id),
            "state": item.state,
            "references": item.references,
            "residentBytes": item.size,
        }
        for item in completions.residents.residents()
    ]


def _on_loopback(request: Request) -> bool:
    try:
        return ipaddress.ip_address(request.client.host if request.client else "").is_loopback
    except ValueError:
        return False


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
