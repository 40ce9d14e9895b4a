"""What a request may say, in OpenAI's words. What runs it is in the routing context alone.

A field that is not listed is refused, whatever it means elsewhere: an ignored one would be a
promise that is not kept. ``model`` is read and chooses nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from registry_service.domain import limits
from registry_service.domain.canonical import json_parse
from registry_service.domain.errors import MalformedError
from registry_service.domain.text import bounded

COMPLETION_TOKENS: Final = 16
"""New tokens of a completion that names no number (OpenAI's default)."""

_Stop = Annotated[str, Field(min_length=1, max_length=limits.STOP_CHARS)]
_NewTokens = Annotated[int, Field(ge=1, le=limits.NEW_TOKENS)]


class BodyError(MalformedError):
    """A body that is not as it must be. ``param`` is the field, or None for the whole."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(BodyError):
    """Prompt and new tokens do not fit together."""

    code = "CONTEXT_LENGTH_EXCEEDED"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(_Strict):
    """Whether a stream's last chunk tells the usage."""

    include_usage: bool = False


class Body(_Strict):
    """What both routes take. Defaults are OpenAI's."""

    model: Annotated[str, Field(max_length=limits.MODEL_CHARS)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int | None = None
    stop: _Stop | Annotated[list[_Stop], Field(min_length=1, max_length=limits.STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _stream_check(self) -> Body:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: expected only with stream")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    @abstractmethod
    def new_tokens(self) -> int | None:
        """How many tokens at most; None is as many as fit."""

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens to tell beside each; None tells no probabilities."""


class CompletionBody(Body):
    """``POST /v1/completions``."""

    prompt: Annotated[str, Field(min_length=1)]
    max_tokens: _NewTokens = COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=limits.COMPLETION_LOGPROBS)] | None = None

    @property
    def new_tokens(self) -> int | None:
        """How many tokens at most."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens to tell beside each; None tells no probabilities."""
        return self.logprobs


class Message(_Strict):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatBody(Body):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=limits.MESSAGES)]
    max_tokens: _NewTokens | None = None
    max_completion_tokens: _NewTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=limits.CHAT_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> ChatBody:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("expected max_tokens or max_completion_tokens, got both")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: expected only with logprobs")
        return self

    @property
    def new_tokens(self) -> int | None:
        """How many tokens at most; None is as many as fit."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens to tell beside each; None tells no probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


_T = TypeVar("_T", bound=Body)


def completion_parse(content: bytes) -> CompletionBody:
    """Parse the body of a completion.

    Raises:
        BodyError: not JSON, an unknown field, or a value out of bounds.
    """
    return _parse(CompletionBody, content)


def chat_parse(content: bytes) -> ChatBody:
    """Parse the body of a chat.

    Raises:
        BodyError: not JSON, an unknown field, or a value out of bounds.
    """
    return _parse(ChatBody, content)


def _parse(kind: type[_T], content: bytes) -> _T:
    try:
        document: Any = json_parse(content, what="body", limit=limits.ASKED_BYTES)
    except MalformedError as error:
        raise BodyError(error.message) from error
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        # A union's branches are named in the place too; what the caller wrote is its first part.
        where = bounded(str(first["loc"][0])) if first["loc"] else None
        message = str(first["msg"]).removeprefix("Value error, ")
        raise BodyError(f"{where or 'body'}: {message}", where) from error
