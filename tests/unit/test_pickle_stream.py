"""What an unpickler makes of bytes, found without one."""

from __future__ import annotations

import pickle
import pickletools

import pytest

from registry_service.domain.pickle_stream import Stream, pickle_stream


def whole(content: bytes) -> Stream:
    return pickle_stream(content, len(content))


@pytest.mark.parametrize("protocol", range(6))
def test_a_value_without_names_is_data(protocol: int) -> None:
    value = {"a": [1, 2.5, None, True, (b"x", "y")], "b": 10**30}
    # Before protocol 3 bytes are made by a call.
    wanted = Stream.DATA if protocol > 2 else Stream.CODE
    assert whole(pickle.dumps(value, protocol)) is wanted


@pytest.mark.parametrize("protocol", range(6))
def test_a_value_with_a_name_is_code(protocol: int) -> None:
    assert whole(pickle.dumps(Stream.DATA, protocol)) is Stream.CODE


def test_data_ends_with_the_file() -> None:
    assert whole(b"K\x01. \n") is Stream.DATA
    assert whole(b"K\x01.abc") is Stream.NONE


@pytest.mark.parametrize("cut", [1, 3, 10])
def test_a_pickle_that_goes_on_past_what_was_read_is_open(cut: int) -> None:
    content = pickle.dumps("x" * 100, 4)
    assert pickle_stream(content[:-cut], len(content)) is Stream.OPEN
    assert whole(content[:-cut]) is Stream.NONE


NOTHING = {
    "no bytes": b"",
    "no opcode": b"\x00\x00",
    "no value": b".",
    "a list without a mark": b"l.",
    "a call without arguments": b"cos\nsystem\nR",
    "a memo that is empty": b"h\x00.",
    "a number that is none": b"Iabc\n.",
    "a text without quotes": b"Sabc\n.",
    "a name with a space": b"cos x\nsystem\n.",
    "a text longer than the file": b"X\xff\xff\xff\xffabc.",
    "a frame longer than the file": b"\x95\xff\x00\x00\x00\x00\x00\x00\x00K\x01.",
    "a persistent id": b"Pabc\n.",
    "a mark in the way": b"K\x01(a.",
}


@pytest.mark.parametrize("content", NOTHING.values(), ids=NOTHING)
def test_what_an_unpickler_fails_on_is_none(content: bytes) -> None:
    assert whole(content) is Stream.NONE


def test_a_mark_may_be_thrown_away() -> None:
    assert whole(b"((0K\x01.") is Stream.DATA
    assert whole(b"K\x01(0.") is Stream.DATA
    assert whole(b"(K\x011K\x02.") is Stream.DATA


def test_every_opcode_is_followed_to_its_end() -> None:
    # None of them is unknown to the walk: it ends by itself on each, with any argument.
    for opcode in pickletools.opcodes:
        for argument in (b"", b"\x01", b"1\n", b"'a'\n", bytes(16), b"\xff" * 16):
            assert pickle_stream(opcode.code.encode("latin-1") + argument, 10**6) in Stream
