"""JSON in and out: RFC 8785 bytes out, strictly parsed values in.

The standard parser accepts what we must not: duplicate keys (last wins), NaN and Infinity, a BOM,
unbounded nesting and unbounded integers. Here each of them is an error.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, Final

from registry_service.domain import limits
from registry_service.domain.errors import MalformedError
from registry_service.domain.text import shown

_MAX_SAFE_INTEGER: Final = 2**53 - 1
# An unclosed string matches to the end: failing there would start again at every quote (quadratic).
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+\\?(?:"|\Z)', re.DOTALL)


def canonical_json(value: Any) -> bytes:
    """``value`` as RFC 8785 (JCS) bytes.

    Raises:
        MalformedError: a value that JSON cannot hold exactly (NaN, integers past 2^53).
    """
    # Here and not above: who only reads, as the checks on a worker do, gets by without it.
    import rfc8785

    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise MalformedError(f"cannot be written as canonical JSON: {error}") from error


def without_strings(data: bytes) -> bytes:
    """JSON bytes without their strings: what is left is brackets, numbers, words and space."""
    return _STRINGS.sub(b"", data)


def too_deep(data: bytes, depth: int) -> bool:
    """True when JSON bytes nest deeper than ``depth``; looked at before a parser recurses."""
    level = 0
    for byte in re.sub(rb"[^\[\]{}]", b"", without_strings(data)):
        level += 1 if byte in b"[{" else -1
        if level > depth:
            return True
    return False


def json_parse(
    data: bytes,
    *,
    what: str,
    limit: int,
    depth: int = limits.JSON_DEPTH,
    max_integer: int = _MAX_SAFE_INTEGER,
) -> Any:
    """Parse ``data`` strictly.

    Refused: more than ``limit`` bytes, a byte-order mark, bytes that are not UTF-8, lone
    surrogates, duplicate keys, NaN or Infinity, integers over ``max_integer`` in size (2^53 − 1
    unless another program writes larger ones), and nesting over ``depth``.

    Raises:
        MalformedError: with the reason and ``what``.
    """
    if len(data) > limit:
        raise MalformedError(f"{what}: expected at most {limit} bytes, got {len(data)}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError(f"{what}: not UTF-8 at byte {error.start}") from error
    if text.startswith("\ufeff"):
        raise MalformedError(f"{what}: starts with a byte-order mark; write plain UTF-8")
    if too_deep(data, depth):
        raise MalformedError(f"{what}: nested deeper than {depth} levels")
    try:
        value = json.loads(
            text,
            object_pairs_hook=lambda pairs: _unique(pairs, what),
            parse_constant=lambda name: _constant(name, what),
            parse_int=lambda digits: _integer(digits, what, max_integer),
            parse_float=lambda digits: _float(digits, what),
        )
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{what}: not JSON: {shown(str(error))}") from error
    if "\\u" in text:
        _surrogate_check(value, what)
    return value


def integer_check(value: Any) -> Any:
    """``value`` when it is an integer; raises ValueError. To Python, true and 1.0 equal 1."""
    if type(value) is not int:
        raise ValueError("expected an integer")
    return value


def _unique(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise MalformedError(f"{what}: key {shown(twice)} occurs twice")
    return result


def _constant(name: str, what: str) -> Any:
    raise MalformedError(f"{what}: {name} is not JSON")


def _integer(digits: str, what: str, largest: int) -> int:
    # The length first: turning digits into a number takes quadratic time.
    if len(digits) > len(str(largest)) + 1 or abs(int(digits)) > largest:
        raise MalformedError(f"{what}: integer {shown(digits)} is outside ±{largest}")
    return int(digits)


def _float(digits: str, what: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise MalformedError(f"{what}: number {shown(digits)} is outside the range of a double")
    return value


def _surrogate_check(value: Any, what: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise MalformedError(f"{what}: holds a lone surrogate") from error
