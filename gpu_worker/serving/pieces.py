"""Text of tokens as they come: piece by piece, never half a character."""

from __future__ import annotations

from typing import Final, Protocol

_INCOMPLETE: Final = "\ufffd"
# A character has at most four bytes and a token at least one: only these may still be waited for.
_INCOMPLETE_TOKENS: Final = 3


class Decoder(Protocol):
    """Turns tokens into text."""

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        ...


class Pieces:
    """One answer's text. Each token is decoded with the few before it, for their spacing.

    A ``TextDecoder`` of the engine.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._before: list[int] = []
        self._fresh: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completed; empty while a character is incomplete."""
        self._fresh.append(token)
        return self._take(final=False)

    def flush(self) -> str:
        """What is left at the end."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._decoder.decode(self._before)
        text = self._decoder.decode(self._before + self._fresh)
        done = len(self._fresh)
        if not final and (text.endswith(_INCOMPLETE) or len(text) <= len(before)):
            done -= _INCOMPLETE_TOKENS
            if done <= 0:
                return ""
            # No character any more, or none to begin with: nothing that follows changes that.
            text = self._decoder.decode(self._before + self._fresh[:done])
        if len(text) > len(before):
            self._before = self._fresh[:done]
        self._fresh = self._fresh[done:]
        return text[len(before) :]
