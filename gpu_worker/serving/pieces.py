"""The text of a generation as it grows: piece by piece, never half a character."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from gpu_worker.serving.sequence import Generation

_INCOMPLETE: Final = "\ufffd"


class Decoder(Protocol):
    """Turns tokens into text."""

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        ...


class Pieces:
    """Iterates over new text. Each token is decoded with the few before it, for their spacing."""

    def __init__(self, decoder: Decoder, generation: Generation) -> None:
        self._decoder = decoder
        self._generation = generation
        self._context: list[int] = []
        self._fresh: list[int] = []

    def __iter__(self) -> Iterator[str]:
        for token in self._generation.tokens():
            self._fresh.append(token)
            if piece := self._take(final=False):
                yield piece
        if piece := self._take(final=True):
            yield piece

    def _take(self, *, final: bool) -> str:
        before = self._decoder.decode(self._context)
        text = self._decoder.decode(self._context + self._fresh)
        if not final and (text.endswith(_INCOMPLETE) or len(text) <= len(before)):
            return ""
        self._context, self._fresh = self._fresh, []
        return text[len(before) :]
