"""Documents that are read whole are bounded while they arrive, whatever length they declare.

The framework's own limit answers in plain text; ours is refused in the form of its plane. Blobs
are not read whole: an upload keeps its limit itself.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from registry_service.domain import limits


class BodyLimit:
    """ASGI middleware: a document over its limit is refused with 413."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the body of a request as the application reads it."""
        limit = _limit(scope["path"]) if scope["type"] == "http" else None
        if limit is None:
            await self._app(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > limit:
                raise HTTPException(413, f"expected a body of at most {limit} bytes")
            return message

        await self._app(scope, counted, send)


def _limit(path: str) -> int | None:
    if path.startswith("/v1/"):
        return limits.REQUEST_BODY_BYTES
    return limits.MANIFEST_BYTES if "/manifests/" in path else None
