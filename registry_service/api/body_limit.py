"""Request bodies of the control plane are bounded while they arrive, whatever they declare."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: more than ``limit`` bytes of body under ``prefix`` are refused with 413."""

    def __init__(self, app: ASGIApp, *, prefix: str, limit: int) -> None:
        self._app = app
        self._prefix = prefix
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the body of a request as the application reads it."""
        if scope["type"] != "http" or not scope["path"].startswith(self._prefix):
            await self._app(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._limit:
                raise HTTPException(413, f"expected a body of at most {self._limit} bytes")
            return message

        await self._app(scope, counted, send)
