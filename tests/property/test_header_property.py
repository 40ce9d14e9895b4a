"""The header reader on made-up and on spoiled files: an answer always, and never a pass alone.

Three sources: bytes, real files with spoiled bytes, and headers made field by field.
"""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import sample_adapter as sample
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from registry_service.backends.safetensors_library import library_disagreement
from registry_service.domain.findings import refused
from registry_service.domain.safetensors_header import Header, header_parse

# The same examples on every machine: a failure can be looked at again.
STEADY = settings(derandomize=True, deadline=None, max_examples=150)
MEMORY = settings(derandomize=True, deadline=None, max_examples=60)


def judged(content: bytes) -> Header | None:
    """Our header if the file passes; the library then has to read the very same."""
    header, findings = header_parse(content, len(content))
    assert (header is not None) or findings
    assert not findings or refused(findings)
    assert all(f.where.isascii() and f.got.isascii() and f.expected.isascii() for f in findings)
    assert all(len(f.where) <= 600 and len(f.got) <= 400 for f in findings)
    if findings or header is None:
        return None
    assert library_disagreement(content, len(content), header) is None
    theirs = {
        name: (part["dtype"], tuple(part["shape"]), bytes(part["data"]))
        for name, part in deserialize(content)
    }
    assert theirs == {
        t.name: (t.dtype, t.shape, content[header.data_start + t.start : header.data_start + t.end])
        for t in header.tensors
    }
    return header


NAMES = st.from_regex(r"\A[a-z0-9_]{1,8}(\.[a-z0-9_]{1,8}){0,3}\Z")
TENSORS = st.dictionaries(
    NAMES,
    st.tuples(st.sampled_from(["F32"]), st.lists(st.integers(1, 9), min_size=1, max_size=3)),
    min_size=1,
    max_size=8,
)


@STEADY
@given(TENSORS, st.dictionaries(NAMES, NAMES, max_size=3))
def test_a_good_file_passes(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    header = judged(sample.weights(tensors, metadata))
    assert header is not None
    assert {t.name: (t.dtype, list(t.shape)) for t in header.tensors} == tensors


@STEADY
@given(st.binary(max_size=300))
def test_any_bytes_get_an_answer(content: bytes) -> None:
    judged(content)


@STEADY
@given(st.binary(max_size=200), st.binary(max_size=64))
def test_any_header_gets_an_answer(header: bytes, data: bytes) -> None:
    judged(sample.raw(b"{" + header, data))


@STEADY
@given(TENSORS, st.data())
def test_a_file_with_flipped_bits_passes_only_where_the_library_reads_the_same(
    tensors: dict[str, Any], data: st.DataObject
) -> None:
    content = bytearray(sample.weights(tensors))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    judged(bytes(content))


@STEADY
@given(TENSORS, st.data())
def test_a_spliced_file_passes_only_where_the_library_reads_the_same(
    tensors: dict[str, Any], data: st.DataObject
) -> None:
    content = sample.weights(tensors)
    places = st.integers(0, len(content))
    start, end, to = data.draw(places), data.draw(places), data.draw(places)
    piece = content[min(start, end) : max(start, end)]
    cut = data.draw(st.integers(0, len(content) - to))
    judged(content[:to] + piece + content[to + cut :])


SPELLINGS = st.sampled_from(
    ['"x"', '"\\u0078"', '"y"', '"__metadata__"', '"\\u005f_metadata__"', '""', '"a.b"', '"é"']
)
DTYPES = st.sampled_from(['"F32"', '"F16"', '"BF16"', '"F64"', '"F4"', '"BOOL"', '"f32"', "4"])
NUMBERS = st.sampled_from(["0", "1", "2", "4", "8", "16", "-1", "4.0", "1e1", "01", '"4"', "true"])
LISTS = st.lists(NUMBERS, max_size=3).map(lambda items: "[" + ",".join(items) + "]")
GAPS = st.sampled_from(["", "", "", "", "", "", "", " ", "\n", "  "])
FIELDS = st.lists(
    st.one_of(
        st.tuples(st.just('"dtype"'), DTYPES),
        st.tuples(st.just('"shape"'), LISTS),
        st.tuples(st.just('"data_offsets"'), LISTS),
        st.tuples(SPELLINGS, NUMBERS),
    ),
    max_size=4,
)


def seldom(usual: Any, odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """``usual`` in most examples."""
    return st.integers(0, 9).flatmap(lambda n: odd if n == 9 else st.just(usual))


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A file whose header is made as text, so that what no JSON writer writes occurs too.

    Every part of it is as it should be in most examples, and odd in some.
    """
    entries, position = [], 0
    for name in draw(st.permutations(['"x"', '"y"', '"a.b"']))[: draw(st.integers(1, 3))]:
        width, dtype = draw(st.sampled_from([(4, '"F32"'), (2, '"BF16"'), (2, '"F16"')]))
        count = draw(st.integers(1, 2)) * 4 // width
        start = draw(seldom(position, st.integers(0, 16)))
        position = start + count * width
        fields = [
            ('"dtype"', draw(seldom(dtype, DTYPES))),
            ('"shape"', draw(seldom(f"[{count}]", LISTS))),
            ('"data_offsets"', draw(seldom(f"[{start},{position}]", LISTS))),
        ]
        fields = draw(seldom(fields, FIELDS))
        body = ",".join(f"{key}:{value}" for key, value in fields)
        entries.append(f"{draw(seldom(name, SPELLINGS))}:{draw(GAPS)}{{{body}}}")
    gap = draw(GAPS)
    header = "{" + ("," + gap).join(entries) + "}" + draw(GAPS)
    return sample.raw(header.encode(), bytes(draw(seldom(position, st.integers(0, 24)))))


@STEADY
@given(files())
def test_a_made_up_file_passes_only_where_the_library_reads_the_same(content: bytes) -> None:
    judged(content)


def test_the_made_up_files_are_no_strangers_to_either_verdict() -> None:
    # Were they all refused, the test above could not fail.
    seen = {"both": 0, "library only": 0, "neither": 0}

    @STEADY
    @given(files())
    def count(content: bytes) -> None:
        try:
            deserialize(content)
        except SafetensorError:
            seen["neither"] += 1
        else:
            passed = header_parse(content, len(content))[1] == ()
            seen["both" if passed else "library only"] += 1

    count()
    assert min(seen.values()) >= 10, seen


@MEMORY
@given(st.one_of(files(), st.binary(max_size=2_000).map(sample.raw)))
def test_memory_is_bounded_by_the_header(content: bytes) -> None:
    tracemalloc.start()
    try:
        header_parse(content, len(content))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (256 << 10) + 200 * len(content)


@MEMORY
@given(TENSORS, st.integers(0, 2**70))
def test_the_promised_length_alone_takes_no_memory(tensors: dict[str, Any], length: int) -> None:
    content = sample.weights(tensors)
    content = (length % 2**64).to_bytes(8, "little") + content[8:]
    tracemalloc.start()
    try:
        _, findings = header_parse(content, 1 << 40)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert findings
    assert peak < (256 << 10) + 200 * len(content)


def test_the_order_of_keys_is_the_files_own() -> None:
    content = sample.weights({"b": ("F32", (1,)), "a": ("F32", (1,))})
    fields = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header = judged(content)
    assert header is not None
    assert [t.name for t in header.tensors] == [name for name in fields if name != "__metadata__"]
