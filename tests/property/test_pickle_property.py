"""Whatever an unpickler would call, the content check has seen before it."""

from __future__ import annotations

import io
import pickle
from typing import Any

import sample_adapter as sample
from hypothesis import given, settings
from hypothesis import strategies as st
from payloads import GLOBAL, PICKLES

from registry_service.domain.file_set import file_set_check

STEADY = settings(derandomize=True, deadline=None, max_examples=300)


class CalledError(Exception):
    """A name from the pickle was called."""


class Trap:
    """Stands for every name that a pickle imports."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Trap:
        raise CalledError


# The one written in Python: the one in C takes memory for a memo of any size it is told.
class Unpickler(pickle._Unpickler):  # type: ignore[misc,name-defined]  # not in typeshed
    """Runs everything but the names that a pickle imports."""

    def find_class(self, module: str, name: str) -> type[Trap]:
        """A trap instead of a name that could be imported."""
        parts = [*module.replace("-", "_").split("."), *name.split(".")]
        if not all(part.isidentifier() for part in parts):
            raise ModuleNotFoundError(module)
        return Trap


def calls(content: bytes) -> bool:
    try:
        Unpickler(io.BytesIO(content)).load()
    except CalledError:
        return True
    except Exception:  # noqa: BLE001 - an unpickler raises anything on such bytes
        return False
    return False


def refused(content: bytes) -> bool:
    codes = sample.codes(file_set_check([sample.fact("README.md", content)], frozenset()))
    return bool(codes & {"CONTENT_PICKLE", "CONTENT_UNKNOWN"})


SHORT = [content for content in PICKLES.values() if len(content) < 500]
OPCODES = st.sampled_from(
    [b"(", b"0", b"1", b"2", b"N", b")", b"]", b"}", b"t", b"\x85", b"\x86", b"K\1", b"I1\n"]
    + [b"S'a'\n", b"Va\n", b"X\1\0\0\0a", b"U\1a", b"q\0", b"h\0", b"\x94", b"p0\n", b"g0\n"]
    + [b"cos\nx\n", b"(ios\nx\n", b"\x93", b"o", b"R", b"b", b"\x81", b"\x92", b"a", b"s", b"."]
    + [b"\x8c\1a", b"\x80\4", b"\x95\2\0\0\0\0\0\0\0", b"G" + bytes(8), b"\x82\1", b"l", b"e"]
)


@STEADY
@given(st.lists(OPCODES, max_size=14), st.sampled_from([b"", GLOBAL]))
def test_a_made_up_pickle_that_calls_is_refused(parts: list[bytes], end: bytes) -> None:
    content = b"".join(parts) + end
    assert not calls(content) or refused(content)


@STEADY
@given(st.sampled_from(SHORT), st.data())
def test_a_spoiled_pickle_that_calls_is_refused(pickled: bytes, data: st.DataObject) -> None:
    content = bytearray(pickled)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    assert not calls(bytes(content)) or refused(bytes(content))


def test_the_made_up_pickles_do_call() -> None:
    seen = 0

    @STEADY
    @given(st.lists(OPCODES, max_size=14), st.sampled_from([b"", GLOBAL]))
    def count(parts: list[bytes], end: bytes) -> None:
        nonlocal seen
        seen += calls(b"".join(parts) + end)

    count()
    assert seen >= 10, seen
