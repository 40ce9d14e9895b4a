"""The strict header reader, alone and beside the library's."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import sample_adapter as sample

from registry_service.backends.safetensors_library import library_disagreement
from registry_service.domain import limits
from registry_service.domain.safetensors_header import (
    HEADER_PREFIX_BYTES,
    header_end,
    header_parse,
)

X = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
Y = {"dtype": "F32", "shape": [1], "data_offsets": [16, 20]}


def entry(**changes: Any) -> bytes:
    return json.dumps({"x": {**X, **changes}}, separators=(",", ":")).encode()


def parse(file: bytes) -> tuple[Any, set[str]]:
    header, findings = header_parse(file, len(file))
    return header, sample.codes(findings)


def test_a_plain_header_is_read() -> None:
    file = sample.weights({"b": ("BF16", (2, 3)), "a.weight": ("F32", (4,))}, {"format": "pt"})
    header, findings = header_parse(file, len(file))
    assert findings == ()
    assert header is not None
    assert [(t.name, t.dtype, t.shape, t.start, t.end) for t in header.tensors] == [
        ("b", "BF16", (2, 3), 0, 12),
        ("a.weight", "F32", (4,), 12, 28),
    ]
    assert header.metadata == (("format", "pt"),)
    assert header.data_start + 28 == header.file_size == len(file)


MALFORMED = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "no header": struct.pack("<Q", 0) + b"",
    "header past the end": struct.pack("<Q", 64) + b"{}",
    "starts with a space": sample.raw(b" " + entry(), bytes(16)),
    "starts with a newline": sample.raw(b"\n" + entry(), bytes(16)),
    "a list": sample.raw(b"[]", b""),
    "not JSON": sample.raw(b"{x}", b""),
    "trailing comma": sample.raw(entry()[:-1] + b",}", bytes(16)),
    "two documents": sample.raw(entry() + b"{}", bytes(16)),
    "not UTF-8": sample.raw(b'{"\xff":1}', b""),
    "padding at the end": sample.raw(entry() + b" " * 64, bytes(16)),
    "tabs at the end": sample.raw(entry() + b"\t" * 7, bytes(16)),
    "padding inside": sample.raw(entry().replace(b":[0", b":" + b" " * 99 + b"[0"), bytes(16)),
    "newlines inside": sample.raw(entry().replace(b":[0", b":\n[0"), bytes(16)),
    "data not aligned": struct.pack("<Q", len(entry())) + entry() + bytes(16),
    "unknown dtype": sample.raw(entry(dtype="F4"), bytes(16)),
    "dtype no text": sample.raw(entry(dtype=4), bytes(16)),
    "extra field": sample.raw(entry(note=1), bytes(16)),
    "missing field": sample.raw(b'{"x":{"dtype":"F32","shape":[4]}}', bytes(16)),
    "field twice": sample.raw(
        b'{"x":{"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,16]}}', bytes(16)
    ),
    "shape no list": sample.raw(entry(shape=4), bytes(16)),
    "shape of booleans": sample.raw(entry(shape=[True, 4]), bytes(16)),
    "shape of floats": sample.raw(entry(shape=[2.0, 2]), bytes(16)),
    "negative size": sample.raw(entry(shape=[-2, -2]), bytes(16)),
    "nine dimensions": sample.raw(entry(shape=[1] * 7 + [2, 2]), bytes(16)),
    "three offsets": sample.raw(entry(data_offsets=[0, 16, 16]), bytes(16)),
    "huge integer": sample.raw(entry(shape=[2**64]), bytes(16)),
    "NaN": sample.raw(b'{"x":NaN}', b""),
    "metadata of numbers": sample.raw(entry()[:-1] + b',"__metadata__":{"a":1}}', bytes(16)),
    "metadata twice": sample.raw(
        entry()[:-1] + b',"__metadata__":{},"__metadata__":{}}', bytes(16)
    ),
    "metadata key twice": sample.raw(
        entry()[:-1] + b',"__metadata__":{"a":"1","\\u0061":"2"}}', bytes(16)
    ),
    "metadata too long": sample.raw(
        entry()[:-1] + b',"__metadata__":{"a":"' + b"x" * limits.METADATA_CHARS + b'"}}', bytes(16)
    ),
    "metadata unprintable": sample.raw(
        entry()[:-1] + b',"__metadata__":{"a":"\\u202e"}}', bytes(16)
    ),
    "deep nesting": sample.raw(b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}", b""),
}


@pytest.mark.parametrize("file", MALFORMED.values(), ids=MALFORMED)
def test_malformed_headers_are_refused(file: bytes) -> None:
    header, codes = parse(file)
    assert header is None
    assert codes == {"HEADER_MALFORMED"}


@pytest.mark.parametrize(
    ("second", "name"), [(b'"x"', "plain"), (b'"\\u0078"', "escaped")], ids=["plain", "escaped"]
)
def test_a_tensor_name_that_occurs_twice_is_found(second: bytes, name: str) -> None:
    header, codes = parse(
        sample.raw(entry()[:-1] + b"," + second + b":" + json.dumps(Y).encode() + b"}", bytes(20))
    )
    assert header is None
    assert "TENSOR_DUPLICATE" in codes


@pytest.mark.parametrize(
    "name",
    ["", "../x", "a/b", "a\\b", "x\0", "\u202ex", "é", " x", "x ", ".x", "x.", "a..b", "x" * 513],
)
def test_hostile_names_are_refused(name: str) -> None:
    _, codes = parse(sample.raw(json.dumps({name: X}).encode(), bytes(16)))
    assert codes == {"TENSOR_NAME"}


LAYOUT = {
    "hole at the start": ({"x": {**X, "data_offsets": [4, 20]}}, 20),
    "hole between": ({"x": X, "y": {**Y, "data_offsets": [20, 24]}}, 24),
    "overlap": ({"x": X, "y": {**Y, "data_offsets": [12, 16]}}, 16),
    "same bytes twice": ({"x": X, "y": X}, 16),
    "trailing bytes": ({"x": X}, 17),
    "truncated": ({"x": X}, 12),
    "size of another shape": ({"x": {**X, "shape": [2, 3]}}, 16),
    "end before start": ({"x": {**X, "data_offsets": [16, 0]}}, 16),
    "empty tensor": ({"x": X, "y": {**Y, "shape": [0], "data_offsets": [16, 16]}}, 16),
    "empty by 2^52": ({"x": {**X, "shape": [0, 2**52], "data_offsets": [0, 0]}}, 0),
    "unaligned": (
        {
            "h": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]},
            "x": {**X, "data_offsets": [2, 18]},
        },
        18,
    ),
}


@pytest.mark.parametrize(("fields", "size"), LAYOUT.values(), ids=LAYOUT)
def test_data_is_exactly_one_tensor_after_the_other(fields: dict[str, Any], size: int) -> None:
    file = sample.raw(json.dumps(fields, separators=(",", ":")).encode(), bytes(size))
    assert "TENSOR_LAYOUT" in parse(file)[1]


@pytest.mark.parametrize("dtype", ["F64", "I8", "I64", "BOOL"])
def test_other_dtypes_are_named_and_the_rest_is_still_read(dtype: str) -> None:
    header, codes = parse(sample.weights({"x": (dtype, (8,))}))
    assert codes == {"TENSOR_DTYPE"}
    assert header is not None


def test_the_length_alone_refuses_a_header_of_101_mb() -> None:
    prefix = struct.pack("<Q", 101_000_000)
    header, findings = header_parse(prefix, 200_000_000)
    assert header is None
    assert [finding.code for finding in findings] == ["HEADER_TOO_LARGE"]
    assert "101000000" in findings[0].got


def test_no_tensors_and_too_many_are_refused() -> None:
    assert parse(sample.weights({}))[1] == {"TENSOR_COUNT"}
    many = ",".join(f'"{n}":0' for n in range(limits.TENSORS + 1))
    assert parse(sample.raw(b"{" + many.encode() + b"}"))[1] == {"TENSOR_COUNT"}


def test_a_header_of_quotes_is_refused_in_linear_time() -> None:
    assert parse(sample.raw(b'{"' + b'\\"' * 500_000))[1] == {"HEADER_MALFORMED"}


def test_nesting_is_refused_before_it_is_read() -> None:
    # So deep that the parser just manages, and whoever prints the value does not.
    nested = b"[" * 900 + b"]" * 900
    file = sample.raw(entry().replace(b'"F32"', nested), bytes(16))
    header, findings = header_parse(file, len(file))
    assert header is None
    assert [finding.got for finding in findings] == ["more"]


def test_a_disagreement_is_a_finding() -> None:
    file = sample.weights({"x": ("F32", (4,))})
    other = sample.weights({"x": ("F32", (2, 2))})
    header, _ = header_parse(other, len(other))
    assert header is not None
    padded = file[: header.data_start]
    finding = library_disagreement(padded, len(file), header)
    assert finding is not None
    assert finding.code == "HEADER_DISAGREES"


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ((100).to_bytes(8, "little"), 108),
        ((0).to_bytes(8, "little"), 8),
        (limits.SAFETENSORS_HEADER_BYTES.to_bytes(8, "little"), HEADER_PREFIX_BYTES),
        ((limits.SAFETENSORS_HEADER_BYTES + 1).to_bytes(8, "little"), 8),
        (b"\xff" * 8, 8),
        (b"", 8),
    ],
)
def test_nothing_behind_the_header_has_to_be_read(start: bytes, end: int) -> None:
    assert header_end(start) == end


def test_the_header_alone_gives_the_same_findings_as_more_of_the_file() -> None:
    file = sample.weights({**sample.tensors(), "x": ("I8", (3,))})
    whole = header_parse(file, len(file))
    assert header_parse(file[: header_end(file)], len(file)) == whole
    assert whole[1] != ()
