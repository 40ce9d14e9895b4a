"""Cursors: opaque to the caller, the last row's sort key inside."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from registry_service.domain import limits
from registry_service.domain.errors import MalformedError

Row = TypeVar("Row")


def cursor_encode(*parts: str) -> str:
    """A cursor that holds ``parts``."""
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def cursor_decode(cursor: str | None, count: int) -> tuple[str, ...] | None:
    """The parts of a cursor that this service gave out, or None for the first page.

    Raises:
        MalformedError: it is none.
    """
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        parts = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise MalformedError("cursor: expected one that a list answered with") from error
    if (
        not isinstance(parts, list)
        or len(parts) != count
        or not all(isinstance(part, str) and len(part) < 300 for part in parts)
    ):
        raise MalformedError("cursor: expected one that this list answered with")
    return tuple(parts)


def number_decode(cursor: str | None) -> int | None:
    """The number in a cursor, or None for the first page.

    Raises:
        MalformedError: it holds none.
    """
    parts = cursor_decode(cursor, 1)
    if parts is None:
        return None
    if not (parts[0].isascii() and parts[0].isdigit() and len(parts[0]) <= 18):
        raise MalformedError("cursor: expected one that this list answered with")
    return int(parts[0])


def limit_check(limit: int) -> int:
    """A page size.

    Raises:
        MalformedError: not between 1 and ``limits.PAGE_ROWS``.
    """
    if not 1 <= limit <= limits.PAGE_ROWS:
        raise MalformedError(f"limit: expected 1 to {limits.PAGE_ROWS}, got {limit}")
    return limit


def page(
    rows: Sequence[Row],
    limit: int,
    *,
    wire: Callable[[Row], dict[str, Any]],
    key: Callable[[Row], tuple[str, ...]],
) -> dict[str, Any]:
    """The wire form of a page; ``rows`` holds one more than ``limit`` when there is a next one."""
    shown = rows[:limit]
    more = len(rows) > limit
    return {
        "items": [wire(row) for row in shown],
        "nextCursor": cursor_encode(*key(shown[-1])) if more else None,
    }
