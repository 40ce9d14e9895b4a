"""JSON in and out: RFC 8785 bytes out, strictly parsed values in.

The standard parser accepts what we must not: duplicate keys (last wins), NaN and Infinity, a BOM,
unbounded nesting and unbounded integers. Here each of them is an error.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import rfc8785

from registry_service.domain import limits
from registry_service.domain.errors import MalformedError
from registry_service.domain.text import shown

_MAX_SAFE_INTEGER = 2**53 - 1
# An unclosed string matches to the end: failing there would start again at every quote (quadratic).
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+\\?(?:"|\Z)', re.DOTALL)


def canonical_json(value: Any) -> bytes:
    """``value`` as RFC 8785 (JCS) bytes.

    Raises:
        MalformedError: a value that JSON cannot hold exactly (NaN, integers past 2^53).
    """
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise MalformedError(f"cannot be written as canonical JSON: {error}") from error


def json_parse(data: bytes, *, what: str, limit: int, depth: int = limits.JSON_DEPTH) -> Any:
    """Parse ``data`` strictly.

    Refused: more than ``limit`` bytes, a byte-order mark, bytes that are not UTF-8, lone
    surrogates, duplicate keys, NaN or Infinity, numbers that a double cannot hold exactly as
    integers, and nesting over ``depth``.

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
    _depth_check(data, what, depth)
    try:
        value = json.loads(
            text,
            object_pairs_hook=lambda pairs: _unique(pairs, what),
            parse_constant=lambda name: _constant(name, what),
            parse_int=lambda digits: _integer(digits, what),
            parse_float=lambda digits: _float(digits, what),
        )
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{what}: not JSON: {shown(str(error))}") from error
    if "\\u" in text:
        _surrogate_check(value, what)
    return value


def _depth_check(data: bytes, what: str, depth: int) -> None:
    level = 0
    for byte in re.sub(rb"[^\[\]{}]", b"", _STRINGS.sub(b"", data)):
        if byte in b"[{":
            level += 1
            if level > depth:
                raise MalformedError(f"{what}: nested deeper than {depth} levels")
        else:
            level -= 1


def _unique(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise MalformedError(f"{what}: key {shown(twice)} occurs twice")
    return result


def _constant(name: str, what: str) -> Any:
    raise MalformedError(f"{what}: {name} is not JSON")


def _integer(digits: str, what: str) -> int:
    if len(digits) > 17 or abs(int(digits)) > _MAX_SAFE_INTEGER:
        raise MalformedError(f"{what}: integer {shown(digits)} is outside ±(2^53 − 1)")
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
