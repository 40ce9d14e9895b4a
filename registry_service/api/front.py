"""What stands before every route: who is asking, and how much may be sent.

A caller is known before any of its body is read. Documents that are read whole are bounded while
they arrive, whatever length they declare (the framework's own limit answers in plain text; ours is
refused in the form of its plane). Blobs are not read whole: an upload keeps its limit itself.
"""

from __future__ import annotations

from typing import Final

import anyio.to_thread
from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from registry_service.api.auth import token_of
from registry_service.api.problems import answer
from registry_service.domain import limits
from registry_service.domain.errors import RegistryError
from registry_service.usecases.context import Context
from registry_service.usecases.tenants import authenticate

OPEN: Final = frozenset({"/v1/health", "/v1/ready", "/v1/openapi.json"})
_BASES: Final = "/v1/bases"


class Front:
    """ASGI middleware: the principal goes into the request's state, or the request is refused."""

    def __init__(self, app: ASGIApp, *, context: Context) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate, then count the body as the application reads it."""
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            principal = await anyio.to_thread.run_sync(
                authenticate, self._context, token_of(request)
            )
        except RegistryError as error:
            await answer(request, error)(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = principal
        limit = _limit(scope["path"])
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if limit is not None and taken > limit:
                raise HTTPException(413, f"expected a body of at most {limit} bytes")
            return message

        await self._app(scope, counted, send)


def _limit(path: str) -> int | None:
    if path.startswith(_BASES) or path.endswith("/result"):
        return limits.REQUEST_BODY_BYTES
    if path.startswith("/v1/"):
        return limits.DOCUMENT_BODY_BYTES
    return limits.MANIFEST_BYTES if "/manifests/" in path else None
