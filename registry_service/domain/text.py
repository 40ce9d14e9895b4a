"""Untrusted text is bounded and escaped before it is shown anywhere."""

from __future__ import annotations

from registry_service.domain import limits


def shown(value: object, limit: int = limits.SHOWN_CHARS) -> str:
    """A one-line, printable-ASCII form of ``value`` of at most ``limit`` characters, quoted.

    Control, bidirectional and non-ASCII characters come out as escapes, so that a name in a
    report or on a terminal cannot pass for another.
    """
    text = value if isinstance(value, str) else repr(value)
    head = text[: limit + 1]
    escaped = ascii(head)[1:-1]
    if len(escaped) > limit or len(text) > limit:
        return f"'{escaped[:limit]}…' ({len(text)} characters)"
    return f"'{escaped}'"


def bounded(value: str, limit: int = limits.SHOWN_CHARS) -> str:
    """``value`` with everything but printable ASCII escaped, cut to ``limit`` characters.

    For identifiers whose plain spelling matters (tensor and module names in findings): the same
    as ``shown`` without the quotes.
    """
    escaped = ascii(value[: limit + 1])[1:-1]
    return escaped if len(escaped) <= limit else escaped[: limit - 1] + "…"
