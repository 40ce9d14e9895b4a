"""Reading one generation: its text as it is released, with the probabilities that were asked for.

What begins in text that is held back, because a stop text may begin there, is held back with it;
nothing of a stop text is told, neither as text nor as a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gpu_worker.serving.pieces import Decoder, Pieces
from gpu_worker.serving.sequence import Generation, Output


class TokenText(Decoder, Protocol):
    """Knows the text of single tokens too."""

    def token_text(self, token: int) -> str:
        """A token as it is shown beside its probability."""
        ...


@dataclass(frozen=True, slots=True)
class TokenProbability:
    """One token with its log probability, where its text begins, and the likeliest in its place."""

    text: str
    logprob: float
    offset: int
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """New text, and the tokens that begin in it."""

    text: str
    tokens: tuple[TokenProbability, ...] = ()


class Reading:
    """Iterates over the pieces of one generation, as they come."""

    def __init__(
        self,
        text: TokenText,
        generation: Generation,
        outputs: Iterable[Output],
        *,
        stops: bool,
        probabilities: bool,
    ) -> None:
        """``outputs`` are the generation's. ``stops`` says that the engine makes the text, since
        stop texts were asked for.
        """
        self._generation = generation
        self._outputs = outputs
        self._text = text
        self._stops = stops
        self._probabilities = probabilities
        self._pieces = Pieces(text)
        self._seen = 0
        self._released = 0
        self._held: list[TokenProbability] = []

    def __iter__(self) -> Iterator[Piece]:
        for output in self._outputs:
            if (piece := self._take(output)).text or piece.tokens:
                yield piece
        rest = self._generation.rest if self._stops else self._pieces.flush()
        self._released += len(rest)
        tokens = self._ready()
        if rest or tokens:
            yield Piece(rest, tokens)

    def _take(self, output: Output) -> Piece:
        text = output.text
        if self._probabilities or not self._stops:
            own = self._pieces.push(output.token)
            text = text if self._stops else own
            if self._probabilities:
                self._held.append(self._probability(output))
            self._seen += len(own)
        self._released += len(text)
        return Piece(text, self._ready())

    def _probability(self, output: Output) -> TokenProbability:
        top = tuple((self._text.token_text(token), value) for token, value in output.top)
        logprob = float("nan") if output.logprob is None else output.logprob
        return TokenProbability(self._text.token_text(output.token), logprob, self._seen, top)

    def _ready(self) -> tuple[TokenProbability, ...]:
        """The tokens that begin in released text; without stop texts, all of them."""
        count = len(self._held)
        if self._stops:
            count = sum(token.offset < self._released for token in self._held)
        ready, self._held = tuple(self._held[:count]), self._held[count:]
        return ready
