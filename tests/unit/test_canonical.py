"""Strict JSON in, canonical JSON out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bounded import run_bounded
from hypothesis import given, settings
from hypothesis import strategies as st

from registry_service.domain.canonical import canonical_json, json_parse
from registry_service.domain.errors import MalformedError

REFUSED = {
    "empty": b"",
    "byte-order mark": b"\xef\xbb\xbf{}",
    "not UTF-8": b'"\xff"',
    "duplicate key": b'{"a":1,"a":2}',
    "duplicate key by escape": b'{"a":1,"\\u0061":2}',
    "duplicate key inside": b'[{"a":{"b":1,"b":1}}]',
    "NaN": b"NaN",
    "Infinity": b"[-Infinity]",
    "float overflow": b"1e999",
    "integer past 2^53": b"9007199254740992",
    "very long integer": b"1" * 5000,
    "lone surrogate": b'"\\ud800"',
    "too deep": b"[" * 33 + b"]" * 33,
    "far too deep": b"[" * 900,
    "trailing data": b"{} {}",
    "unclosed string": b'{"a',
    "control character": b'"\n"',
    "single quotes": b"{'a':1}",
    "comment": b"{}//",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_the_standard_parser_lets_through_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        json_parse(data, what="x", limit=10_000)


def test_the_limit_is_on_the_bytes() -> None:
    assert json_parse(b"[1]", what="x", limit=3) == [1]
    with pytest.raises(MalformedError, match="at most 2 bytes, got 3"):
        json_parse(b"[1]", what="x", limit=2)


def test_brackets_in_strings_are_no_nesting() -> None:
    assert json_parse(b'["' + b"[" * 99 + b'\\"]"]', what="x", limit=1000)


@pytest.mark.parametrize(
    "data",
    [
        "b'{\"' + b'\\\\\"' * 500_000",
        "b'\"' * 500_000",
        "b'{\"a\":1' + b',\"b\":1' * 200_000 + b'}'",
    ],
)
def test_hostile_input_is_refused_in_linear_time(data: str) -> None:
    code = f"""
from registry_service.domain.canonical import json_parse
from registry_service.domain.errors import MalformedError
try:
    json_parse({data}, what="x", limit=2_000_000)
except MalformedError:
    print("refused")
"""
    assert run_bounded(code, cpu_seconds=3, memory_mib=512) == "refused\n"


def test_larger_integers_are_read_only_where_a_reader_says_so() -> None:
    data = b"1000000000000000019884624838656"
    with pytest.raises(MalformedError, match="outside"):
        json_parse(data, what="x", limit=100)
    assert json_parse(data, what="x", limit=100, max_integer=10**31) == int(float("1e30"))
    with pytest.raises(MalformedError, match="outside"):
        json_parse(data + b"0", what="x", limit=100, max_integer=10**31)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**53, "\ud800", {"a": 2**60}])
def test_what_json_cannot_hold_exactly_is_not_written(value: Any) -> None:
    with pytest.raises(MalformedError):
        canonical_json(value)


def test_the_form_is_that_of_rfc_8785() -> None:
    value = {"b": [1.0, 1e21, True, None], "a": "é\n", "": {}}
    assert canonical_json(value) == '{"":{},"a":"é\\n","b":[1,1e+21,true,null]}'.encode()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_written_values_are_read_back_and_their_form_is_stable(value: Any) -> None:
    data = canonical_json(value)
    assert json_parse(data, what="x", limit=10**6) == value
    spaced = json.dumps(value, indent=1).encode()
    assert canonical_json(json_parse(spaced, what="x", limit=10**6)) == data
