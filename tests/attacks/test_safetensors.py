"""What the safetensors library accepts and we must not, and what both refuse.

Each case asks the real library first, so that the reason for a reader of our own stays visible.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import sample_adapter as sample
from bounded import run_bounded
from safetensors import SafetensorError, deserialize, safe_open

from registry_service.backends.safetensors_library import library_disagreement
from registry_service.domain import limits
from registry_service.domain.safetensors_header import HEADER_PREFIX_BYTES, header_parse

X = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
Y = {"dtype": "F32", "shape": [1], "data_offsets": [16, 20]}
META = '"__metadata__":'


def text(**tensors: Any) -> str:
    return json.dumps(tensors, separators=(",", ":"))


def file(header: str | bytes, data: int = 16) -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return sample.raw(raw, bytes(data))


def entry(**changes: Any) -> str:
    return text(x={**X, **changes})


def library_names(content: bytes, folder: Path) -> set[str]:
    """The names that both doors of the library find; raises SafetensorError."""
    path = folder / "file.safetensors"
    path.write_bytes(content)
    with safe_open(path, framework="numpy") as opened:
        opened_names = set(opened.keys())
    assert {name for name, _ in deserialize(content)} == opened_names
    return opened_names


def our_codes(content: bytes) -> set[str]:
    _, findings = header_parse(content[:HEADER_PREFIX_BYTES], len(content))
    return sample.codes(findings)


ACCEPTED = {
    "an unknown field of a tensor": (file(entry(note=1)), "HEADER_MALFORMED"),
    "a key of the metadata twice": (
        file(f'{{{META}{{"a":"1","a":"2"}},{entry()[1:]}'),
        "HEADER_MALFORMED",
    ),
    "a key of the metadata twice, by an escape": (
        file(f'{{{META}{{"a":"1","\\u0061":"2"}},{entry()[1:]}'),
        "HEADER_MALFORMED",
    ),
    "a space before the brace": (file(" " + entry()), "HEADER_MALFORMED"),
    "tabs behind the header": (file(entry() + "\t" * 8), "HEADER_MALFORMED"),
    "newlines behind the header": (file(entry() + "\n" * 8), "HEADER_MALFORMED"),
    "newlines inside the header": (file(entry().replace(":", ":\n")), "HEADER_MALFORMED"),
    "half a megabyte of padding": (file(entry() + " " * (1 << 19)), "HEADER_MALFORMED"),
    "megabytes of padding": (file(entry() + " " * (4 << 20)), "HEADER_TOO_LARGE"),
    "tensor data that is not aligned": (
        len(entry()).to_bytes(8, "little") + entry().encode() + bytes(16),
        "HEADER_MALFORMED",
    ),
    "a tensor that is not aligned": (
        file(
            text(
                h={"dtype": "F16", "shape": [1], "data_offsets": [0, 2]},
                x={**X, "data_offsets": [2, 18]},
            ),
            18,
        ),
        "TENSOR_LAYOUT",
    ),
    "a truth value of 7": (
        file(entry(dtype="BOOL", shape=[8], data_offsets=[0, 8]), 0) + b"\7" * 8,
        "TENSOR_DTYPE",
    ),
    "no tensors at all": (file("{}", 0), "TENSOR_COUNT"),
    "metadata and no tensors": (file(f'{{{META}{{"a":"b"}}}}', 0), "TENSOR_COUNT"),
    "an empty name": (file(text(**{"": X})), "TENSOR_NAME"),
    "a path as a name": (file(text(**{"../../etc/passwd": X})), "TENSOR_NAME"),
    "NUL in a name": (file(text(**{"x\0y": X})), "TENSOR_NAME"),
    "a bidirectional name": (file(text(**{"x\u202ey": X})), "TENSOR_NAME"),
    "a name with a newline": (file(text(**{"x\ny": X})), "TENSOR_NAME"),
    "20 MB of metadata": (
        file(f'{{{META}{{"a":"{"m" * 20_000_000}"}},{entry()[1:]}'),
        "HEADER_TOO_LARGE",
    ),
    "metadata over its bound": (
        file(f'{{{META}{{"a":"{"m" * limits.METADATA_CHARS}"}},{entry()[1:]}'),
        "HEADER_MALFORMED",
    ),
    "200,000 empty tensors": (
        file(
            text(
                **{
                    f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                    for n in range(200_000)
                }
            ),
            0,
        ),
        "HEADER_TOO_LARGE",
    ),
    "an empty tensor": (
        file(text(x=X, y={**Y, "shape": [0, 4], "data_offsets": [16, 16]})),
        "TENSOR_LAYOUT",
    ),
    "a thousand dimensions": (file(entry(shape=[1] * 999 + [4])), "HEADER_MALFORMED"),
    "a size of 2^62 beside a zero": (
        file(entry(shape=[0, 2**62], data_offsets=[0, 0]), 0),
        "HEADER_MALFORMED",
    ),
    "64-bit floats": (
        file(entry(dtype="F64", shape=[2])),
        "TENSOR_DTYPE",
    ),
    "8-bit floats": (file(entry(dtype="F8_E4M3", shape=[16])), "TENSOR_DTYPE"),
    "4-bit floats": (file(entry(dtype="F4", shape=[32])), "HEADER_MALFORMED"),
}


@pytest.mark.parametrize(("content", "code"), ACCEPTED.values(), ids=ACCEPTED)
def test_the_library_accepts_it_and_we_refuse(content: bytes, code: str, tmp_path: Path) -> None:
    library_names(content, tmp_path)
    assert code in our_codes(content)


@pytest.mark.parametrize("second", ['"x"', '"\\u0078"'], ids=["plain", "escaped"])
def test_of_a_name_that_occurs_twice_the_library_keeps_the_last(
    second: str, tmp_path: Path
) -> None:
    last = json.dumps({**X, "shape": [2, 2]})
    content = file(f'{{"x":{json.dumps(X)},{second}:{last}}}'.replace(" ", ""))
    assert library_names(content, tmp_path) == {"x"}
    with safe_open(tmp_path / "file.safetensors", framework="numpy") as opened:
        assert opened.get_slice("x").get_shape() == [2, 2]
    assert our_codes(content) == {"TENSOR_DUPLICATE", "TENSOR_LAYOUT"}


REFUSED = {
    "a header over 100 MB": (101_000_000).to_bytes(8, "little") + b"{" + bytes(64),
    "a header past the end": (64).to_bytes(8, "little") + b"{}",
    "a length of 2^64 − 1": b"\xff" * 8 + b"{}",
    "an overlap": file(text(x=X, y={**Y, "data_offsets": [12, 16]})),
    "the same bytes twice": file(text(x=X, y=X)),
    "a hole": file(text(x=X, y={**Y, "data_offsets": [20, 24]}), 24),
    "a hole at the start": file(entry(data_offsets=[4, 20]), 20),
    "bytes behind the last tensor": file(entry(), 17),
    "a truncated file": file(entry(), 12),
    "a range that is not the shape's": file(entry(shape=[5])),
    "an end before the start": file(entry(shape=[4], data_offsets=[16, 0])),
    "a product that overflows": file(entry(shape=[2**62, 2**62])),
    "a size past 2^64": file(entry(shape=[2**64])),
    "a negative size": file(entry(shape=[-4])),
    "a size as text": file(entry(shape=["4"])),
    "a size with a fraction": file(entry(shape=[4.0])),
    "a dtype twice": file('{"x":{"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,16]}}'),
    "a dtype that does not exist": file(entry(dtype="F33")),
    "metadata that is no text": file(f'{{{META}{{"a":1}},{entry()[1:]}'),
    "bytes that are not UTF-8": file(entry().encode().replace(b"x", b"\xff")),
    "a byte-order mark": file(b"\xef\xbb\xbf" + entry().encode()),
    "NaN in the JSON": file('{"x":NaN}'),
    "a lone surrogate": file(entry().replace('"x"', '"\\ud800"')),
    "a trailing comma": file(entry()[:-1] + ",}"),
    "two documents": file(entry() + "{}"),
    "a comment": file(entry() + "//"),
    "a list": file("[]", 0),
    "no bytes": b"",
    "seven bytes": bytes(7),
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_what_the_library_refuses_we_refuse_too(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(SafetensorError):
        library_names(content, tmp_path)
    assert our_codes(content)


def numbered(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    """A file whose tensor bytes differ, so that equal bytes mean equal offsets."""
    empty = sample.weights(tensors)
    start = 8 + int.from_bytes(empty[:8], "little")
    count = len(empty) - start
    return empty[:start] + b"".join(n.to_bytes(4, "little") for n in range(count))[:count]


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": ("F32", [3, 5])},
        {"b": ("F32", [1]), "a.b": ("F16", [2, 2, 2]), "c": ("BF16", [7])},
        {f"m.{n}.weight": ("BF16", [n, 2]) for n in range(1, 40)},
        {"scalar": ("F32", [])},
        {"deep": ("F16", [1, 2, 1, 2, 1, 2, 1, 2])},
    ],
    ids=["one", "three dtypes", "many", "a scalar", "eight dimensions"],
)
def test_of_what_we_accept_the_library_reads_the_same_bytes(
    tensors: dict[str, tuple[str, list[int]]],
) -> None:
    content = numbered(tensors)
    header, findings = header_parse(content, len(content))
    assert findings == ()
    assert header is not None
    assert library_disagreement(content, len(content), header) is None
    ours = {
        t.name: (
            t.dtype,
            list(t.shape),
            content[header.data_start + t.start : header.data_start + t.end],
        )
        for t in header.tensors
    }
    theirs = {
        name: (part["dtype"], list(part["shape"]), bytes(part["data"]))
        for name, part in deserialize(content)
    }
    assert ours == theirs
    assert all(
        len(data) == math.prod(shape) * int(dtype[-2:]) // 8 for dtype, shape, data in ours.values()
    )


def test_a_library_that_orders_the_data_otherwise_disagrees() -> None:
    content = sample.weights({"a": ("F32", (4,)), "b": ("F32", (4,))})
    swapped = sample.weights({"b": ("F32", (4,)), "a": ("F32", (4,))})
    header, _ = header_parse(swapped, len(swapped))
    assert header is not None
    finding = library_disagreement(content, len(content), header)
    assert finding is not None
    assert (finding.code, finding.expected) == (
        "HEADER_DISAGREES",
        "the same offsets from the library",
    )


def test_an_empty_tensor_is_named_and_the_rest_of_the_header_is_still_read() -> None:
    content = file(text(x=X, y={**Y, "shape": [0, 4], "data_offsets": [16, 16]}))
    header, findings = header_parse(content, len(content))
    assert header is not None
    assert {t.name: t.shape for t in header.tensors} == {"x": (4,), "y": (0, 4)}
    assert [(f.code, f.where) for f in findings] == [("TENSOR_LAYOUT", "y")]


HOSTILE = {
    "brackets": 'b"[" * N',
    "pairs of brackets": 'b"[]," * (N // 3)',
    "objects in objects": "b'{\"a\":' * (N // 5)",
    "quotes": "b'\"' * N",
    "escaped quotes": "b'{\"' + b'\\\\\"' * (N // 2 - 2)",
    "one key again and again": "b'{' + b'\"a\":0,' * (N // 6 - 1) + b'\"a\":0}'",
    "keys with one value": "b'{' + b','.join(b'\"%d\":0' % n for n in range(N // 12)) + b'}'",
    "digits": "b'{\"x\":' + b'9' * (N - 7) + b'}'",
    "a long fraction": "b'{\"x\":0.' + b'9' * (N - 9) + b'}'",
    "a long shape": 'b\'{"x":{"dtype":"F32","shape":[1\' + b\',1\' * (N // 2 - 50)'
    " + b'],\"data_offsets\":[0,4]}}'",
    "a nested dtype": "b'{\"x\":{\"dtype\":' + b'[' * 990 + b']' * 990 + b',\"shape\":[],"
    '"data_offsets":[0,4]}}\'',
}


def test_no_header_costs_more_than_its_bound_of_time_and_memory() -> None:
    # All of them together: at the size limit, each alone would take minutes if it were quadratic.
    code = f"""
import sample_adapter as sample
from registry_service.domain.limits import SAFETENSORS_HEADER_BYTES
from registry_service.domain.safetensors_header import header_parse
N = SAFETENSORS_HEADER_BYTES - 8
for header in [{", ".join(HOSTILE.values())}]:
    content = sample.raw(header, bytes(4))
    assert header_parse(content, len(content))[1], header[:40]
print("refused")
"""
    assert run_bounded(code, cpu_seconds=10, memory_mib=512) == "refused\n"


def test_the_largest_header_that_passes_stays_in_its_bounds() -> None:
    code = """
import sample_adapter as sample
from registry_service.domain.safetensors_header import header_parse
content = sample.weights({f"layers.{n}": ("F32", (1,)) for n in range(13_000)})
header, findings = header_parse(content, len(content))
assert not findings, findings[:1]
print(len(header.tensors))
"""
    assert run_bounded(code, cpu_seconds=10, memory_mib=512) == "13000\n"


def test_nan_in_tensor_data_is_not_seen_in_a_header(tmp_path: Path) -> None:
    # The library accepts it too. Check 10 reads the values on a worker and refuses them.
    content = file(entry(), 0) + b"\x00\x00\xc0\x7f" * 4
    assert library_names(content, tmp_path) == {"x"}
    assert our_codes(content) == set()


def test_tensor_data_is_never_needed() -> None:
    content = sample.weights(sample.tensors())
    start = 8 + int.from_bytes(content[:8], "little")
    assert header_parse(content[:start], len(content)) == header_parse(content, len(content))
