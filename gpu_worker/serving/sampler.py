"""The next token of one row. Each row is computed alone, so that others cannot change its choice.

Log probabilities are those of the model, before temperature and ``top_p``.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.serving.sequence import Sampling


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, and its log probabilities as far as they were asked for."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Chooses for one request, with a generator of its own."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator: torch.Generator | None = None
        if sampling.temperature > 0:
            seed = secrets.randbits(63) if sampling.seed is None else sampling.seed % 2**63
            self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits: Tensor) -> Choice:
        """The next token from a row of logits (vocabulary)."""
        scores = logits.float().cpu()
        token = int(scores.argmax()) if self._generator is None else self._draw(scores)
        count = self._sampling.logprobs
        if count is None:
            return Choice(token, None, ())
        logprobs = torch.log_softmax(scores, -1)
        best = torch.topk(logprobs, min(count, len(logprobs)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Choice(token, float(logprobs[token]), top)

    def _draw(self, scores: Tensor) -> int:
        # Shifted before it is divided: a tiny temperature must not make an infinity.
        scaled = (scores.double() - scores.max()) / self._sampling.temperature
        order = torch.sort(torch.softmax(scaled, -1), descending=True, stable=True)
        reached = torch.cumsum(order.values, -1)
        top_p = self._sampling.top_p
        # The first token always stays, and the one that reaches top_p is the last one.
        kept = int(torch.searchsorted(reached, top_p)) + 1 if top_p < 1 else len(reached)
        reached = reached[:kept]
        drawn = torch.rand((), generator=self._generator, dtype=torch.float64) * reached[-1]
        place = min(int(torch.searchsorted(reached, drawn, right=True)), len(reached) - 1)
        return int(order.indices[place])
