"""Stop texts: found wherever they begin and end, and never shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.serving.pieces import Pieces as TokenPieces
from gpu_worker.serving.stopping import StopText


class Pieces:
    """A decoder that gives out prepared pieces; the last one is its rest."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, token: int) -> str:
        return self.pieces[token]

    def flush(self) -> str:
        return self.pieces[-1]


def run(pieces: list[str], *stops: str) -> tuple[list[str], bool]:
    """What is released piece by piece, and whether it stopped."""
    stop = StopText(stops, Pieces(pieces))
    shown = []
    for token in range(len(pieces) - 1):
        text, stopped = stop.push(token)
        shown.append(text)
        if stopped:
            return shown, True
    text, stopped = stop.finish()
    return [*shown, text], stopped


def test_a_stop_inside_a_piece_ends_there() -> None:
    assert run(["one END two", ""], "END") == (["one "], True)


def test_a_stop_across_pieces_is_never_shown() -> None:
    assert run(["one E", "N", "D two", ""], "END") == (["one ", "", ""], True)


def test_what_might_begin_a_stop_is_held_until_it_is_known() -> None:
    assert run(["one E", "N", "E", "x", ""], "END") == (["one ", "", "EN", "Ex", ""], False)
    assert run(["one E", ""], "END") == (["one ", "E"], False)


def test_the_first_of_several_stops_counts() -> None:
    assert run(["abcdef", ""], "ef", "cd", "zz") == (["ab"], True)


def test_a_stop_in_the_rest_of_the_decoder_counts() -> None:
    assert run(["one E", "ND"], "END") == (["one ", ""], True)


@given(
    pieces=st.lists(st.text("ab", max_size=3), min_size=1, max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_is_that_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    shown, stopped = run(pieces, *stops)
    text = "".join(pieces)
    assert stopped == any(stop in text for stop in stops)
    if not stopped:
        assert "".join(shown) == text
        return
    # It stops with the piece in which a stop was first complete.
    seen = next(
        "".join(pieces[:n])
        for n in range(len(pieces) + 1)
        if any(stop in "".join(pieces[:n]) for stop in stops)
    )
    assert "".join(shown) == seen[: min(seen.find(s) for s in stops if s in seen)]


class Bytes:
    """Token n is the byte n, and one has no text; it notes how much it was asked for at once."""

    def __init__(self, silent: int = -1) -> None:
        self.most = 0
        self.silent = silent

    def decode(self, tokens: list[int]) -> str:
        self.most = max(self.most, len(tokens))
        return bytes(t for t in tokens if t != self.silent).decode("utf-8", "replace")


def pieces_of(content: bytes, silent: int = -1) -> tuple[list[str], int]:
    """The text of each token, the rest, and the longest run that was decoded for it."""
    decoder = Bytes(silent)
    pieces = TokenPieces(decoder)
    shown = [pieces.push(token) for token in content]
    return [*shown, pieces.flush()], decoder.most


def test_what_never_becomes_a_character_costs_the_same_for_each_token() -> None:
    shown, most = pieces_of(b"\xc3" * 2000)
    assert "".join(shown) == "\ufffd" * 2000
    assert most <= 8


def test_tokens_without_text_cost_the_same_each() -> None:
    shown, most = pieces_of(b"a" + b"\x00" * 2000 + b"b", silent=0)
    assert "".join(shown) == "ab"
    assert most <= 8


@given(st.lists(st.one_of(st.text(max_size=4).map(str.encode), st.binary(max_size=5))))
def test_the_pieces_are_the_text(parts: list[bytes]) -> None:
    content = b"".join(parts)
    shown, _ = pieces_of(content)
    assert "".join(shown) == content.decode("utf-8", "replace")
