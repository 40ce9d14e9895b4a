"""Answers in OpenAI's form, made from pieces of text as a generation releases them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gpu_worker.serving.openai_answers import Heading, Usage, answer, chunk, error_document
from gpu_worker.serving.openai_bodies import BodyError, PromptTooLongError
from gpu_worker.serving.pieces import Pieces
from gpu_worker.serving.reading import Piece, Reading
from gpu_worker.serving.sequence import STOP, Generation, Output
from gpu_worker.serving.stopping import StopText
from registry_service.domain.errors import (
    ForbiddenError,
    TooLargeError,
    TooManyRequestsError,
    UnavailableError,
)

COMPLETION = Heading("1", 7, "tiny", "base", chat=False)
CHAT = Heading("1", 7, "tiny", "sha256:" + "a" * 64, chat=True)


class Letters:
    """Token n is the n-th letter, and 26 and 27 are two halves of one character."""

    def decode(self, tokens: list[int]) -> str:
        raw = b"".join(
            {26: b"\xc3", 27: b"\xa9"}.get(token, bytes([97 + token % 26])) for token in tokens
        )
        return raw.decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        return self.decode([token])


def read(tokens: Sequence[int], stops: tuple[str, ...] = ()) -> list[Piece]:
    """What is read of an answer, as the engine ends it."""
    generation = Generation()
    stop = StopText(stops, Pieces(Letters())) if stops else None
    for token in tokens:
        text, stopped = stop.push(token) if stop else ("", False)
        generation.emit(Output(token, text, -0.5, ((token, -0.5), (25, -3.0))))
        if stopped:
            stop = None
            break
    if stop:
        generation.rest, _ = stop.finish()
    generation.end(STOP, None)
    outputs = generation.outputs()
    reading = Reading(Letters(), generation, outputs, stops=bool(stops), probabilities=True)
    return list(reading)


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def tokens_of(pieces: Sequence[Piece]) -> list[tuple[str, int]]:
    return [(token.text, token.offset) for piece in pieces for token in piece.tokens]


def test_half_a_character_is_never_shown() -> None:
    pieces = read([0, 26, 27, 1])
    assert text_of(pieces) == "aéb"
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert [offset for _, offset in tokens_of(pieces)] == [0, 1, 1, 2]


def test_a_character_that_stays_half_is_shown_at_the_end() -> None:
    assert text_of(read([0, 26])) == "a\ufffd"


@pytest.mark.parametrize("stop", ["d", "cd", "bcd"])
def test_nothing_of_a_stop_text_is_told(stop: str) -> None:
    pieces = read([0, 1, 2, 3, 4], (stop,))
    kept = "abcd".removesuffix(stop)
    assert text_of(pieces) == kept
    assert tokens_of(pieces) == [(letter, place) for place, letter in enumerate(kept)]


def test_what_only_begins_like_a_stop_text_is_told_in_the_end() -> None:
    pieces = read([0, 1, 2], ("bcx",))
    assert text_of(pieces) == "abc"
    assert tokens_of(pieces) == [("a", 0), ("b", 1), ("c", 2)]


def test_a_completion_in_openais_form() -> None:
    document = answer(COMPLETION, [(read([0, 1]), "length")], Usage(5, 2, 3), probabilities=True)
    assert document == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 7,
        "model": "tiny",
        "system_fingerprint": "base",
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "finish_reason": "length",
                "logprobs": {
                    "tokens": ["a", "b"],
                    "token_logprobs": [-0.5, -0.5],
                    "top_logprobs": [{"a": -0.5, "z": -3.0}, {"b": -0.5, "z": -3.0}],
                    "text_offset": [0, 1],
                },
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


def test_a_chat_in_openais_form() -> None:
    document = answer(CHAT, [(read([0, 26]), "stop")], Usage(5, 2, 0), probabilities=True)
    choice = document["choices"][0]
    assert document["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "a\ufffd", "refusal": None}
    first, half = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"], half["bytes"]) == ("a", [97], None)
    assert [each["token"] for each in first["top_logprobs"]] == ["a", "z"]


def test_chunks_begin_with_the_role_and_end_with_the_reason() -> None:
    first = chunk(CHAT, 0, Piece("a"), first=True)["choices"][0]
    last = chunk(CHAT, 0, None, reason="stop")["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": "a"}
    assert (first["finish_reason"], last["finish_reason"], last["delta"]) == (None, "stop", {})
    assert chunk(COMPLETION, 1, Piece("a"))["choices"][0]["text"] == "a"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BodyError("m", "n"), ("invalid_request_error", "malformed", "n")),
        (
            PromptTooLongError("m", "prompt"),
            ("invalid_request_error", "context_length_exceeded", "prompt"),
        ),
        (TooLargeError("m"), ("invalid_request_error", "too_large", None)),
        (ForbiddenError("m"), ("permission_error", "forbidden", None)),
        (TooManyRequestsError("m"), ("rate_limit_error", "too_many_requests", None)),
        (UnavailableError("m"), ("server_error", "unavailable", None)),
    ],
)
def test_errors_in_openais_form(error: Any, expected: tuple[str, str, str | None]) -> None:
    found = error_document(error)["error"]
    assert (found["type"], found["code"], found["param"]) == expected
    assert found["message"] == "m"
