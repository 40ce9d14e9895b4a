"""Answers in OpenAI's form: completions and chats, whole or in chunks, and errors.

``model`` is the base's name; ``system_fingerprint`` is the digest of the adapter that ran, or
``base``. Fields are those of OpenAI's API reference; nothing is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpu_worker.serving.reading import Piece, TokenProbability
from registry_service.domain.errors import RegistryError

_ERROR_TYPES: Final = {
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


@dataclass(frozen=True, slots=True)
class Heading:
    """What every part of one answer begins with. ``created`` is in seconds since the epoch."""

    request_id: str
    created: int
    model: str
    adapter_digest: str
    chat: bool

    def document(self, *, chunk: bool) -> dict[str, Any]:
        """The fields."""
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        else:
            kind = "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.adapter_digest,
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; ``reused`` ones of the prompt were not computed again."""

    prompt: int
    completion: int
    reused: int

    def document(self) -> dict[str, Any]:
        """The fields."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.reused},
        }


def answer(
    heading: Heading,
    choices: Sequence[tuple[Sequence[Piece], str]],
    usage: Usage,
    *,
    probabilities: bool,
) -> dict[str, Any]:
    """A whole answer from the pieces and finish reasons of its choices."""
    made = []
    for index, (pieces, reason) in enumerate(choices):
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        body: dict[str, Any] = {"text": text}
        if heading.chat:
            body = {"message": {"role": "assistant", "content": text, "refusal": None}}
        logprobs = _logprobs(heading, tokens) if probabilities else None
        made.append({"index": index, **body, "logprobs": logprobs, "finish_reason": reason})
    return {**heading.document(chunk=False), "choices": made, "usage": usage.document()}


def chunk(
    heading: Heading,
    index: int,
    piece: Piece | None,
    *,
    first: bool = False,
    reason: str | None = None,
    probabilities: bool = False,
) -> dict[str, Any]:
    """One chunk of a streamed answer: a piece of a choice, or with ``reason`` its end."""
    text = "" if piece is None else piece.text
    body: dict[str, Any] = {"text": text}
    if heading.chat:
        delta = {} if piece is None else {"content": text}
        body = {"delta": {"role": "assistant", **delta} if first else delta}
    logprobs = None
    if probabilities and piece is not None:
        logprobs = _logprobs(heading, piece.tokens)
    choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}
    return {**heading.document(chunk=True), "choices": [choice]}


def usage_chunk(heading: Heading, usage: Usage) -> dict[str, Any]:
    """The last chunk of a stream that was asked for its usage."""
    return {**heading.document(chunk=True), "choices": [], "usage": usage.document()}


def error_document(error: RegistryError) -> dict[str, Any]:
    """An error in OpenAI's form; equal errors give equal documents."""
    return {
        "error": {
            "message": error.message,
            "type": _ERROR_TYPES.get(error.http_status, "invalid_request_error"),
            "code": error.code.lower(),
            "param": getattr(error, "param", None),
        }
    }


def _logprobs(heading: Heading, tokens: Sequence[TokenProbability]) -> dict[str, Any]:
    if heading.chat:
        content = [
            {
                **_token(token.text, token.logprob),
                "top_logprobs": [_token(text, logprob) for text, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        # Two tokens may look alike: the likelier one is told.
        "top_logprobs": [dict(reversed(token.top)) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _token(text: str, logprob: float) -> dict[str, Any]:
    # Part of a character has no text of its own, so no bytes are told.
    known = "\ufffd" not in text
    return {
        "token": text,
        "logprob": logprob,
        "bytes": list(text.encode()) if known else None,
    }
