"""Logs as JSON, one object a line, for whatever collects them.

A record carries what it was given as ``extra`` under the names that are listed here, and nothing
else: the tuple, the request and the event. Prompts, tokens and contexts have no name here.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Final

from registry_service.domain.errors import RegistryError

FIELDS: Final = (
    "event",
    "requestId",
    "tenantId",
    "baseDigest",
    "adapterDigest",
    "tokenizerDigest",
    "route",
    "status",
    "code",
    "outcome",
    "promptTokens",
    "completionTokens",
    "reusedTokens",
    "seconds",
    "page",
    "tokens",
    "reason",
    "expected",
    "got",
)
_MESSAGE_CHARS: Final = 4096


class JsonFormatter(logging.Formatter):
    """One record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; what is over its length is cut."""
        document: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage()[:_MESSAGE_CHARS],
        }
        for name in FIELDS:
            if name in record.__dict__:
                document[name] = record.__dict__[name]
        if record.exc_info and record.exc_info[1] is not None:
            document["exception"] = _told(record.exc_info[1])[-_MESSAGE_CHARS:]
        return json.dumps(document)


def _told(error: BaseException) -> str:
    """An exception with where it was raised; in its own words only where those are ours.

    What a library says of a value may quote the value, which may be somebody's prompt.
    """
    lines = []
    seen: BaseException | None = error
    while seen is not None:
        words = f": {seen}" if isinstance(seen, RegistryError | OSError) else ""
        lines += [f"{type(seen).__name__}{words}\n", *traceback.format_tb(seen.__traceback__)]
        seen = seen.__cause__ or seen.__context__
    return "".join(lines)


def log_configure() -> None:
    """Log to stderr from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
