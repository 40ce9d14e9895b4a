"""The attention that transformers calls instead of its own, through its AttentionInterface.

Whoever runs the model hands in who attends with the keyword ``attending``, which models pass
through to their attention. No mask function is registered, so models make no mask of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from gpu_worker.serving.sequence import EngineError

NAME: Final = "lanes"
# What models hand to their attention for other implementations, and does not change the result.
_WITHOUT_EFFECT: Final = frozenset(
    {"dropout", "is_causal", "position_ids", "use_cache", "cache_position", "position_embeddings"}
)


@dataclass(frozen=True, slots=True)
class Scores:
    """How queries and keys become scores: their product times ``scaling``, squashed to ±``cap``.

    A query sees the last ``window`` keys up to itself, or all.
    """

    scaling: float
    window: int | None
    cap: float | None


class Attending(Protocol):
    """Computes attention for a forward."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        """The attended values of one layer.

        Query, key and value are (1, heads, N, size); the result is (1, N, heads, size).
        """
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for every layer.

    Raises:
        EngineError: something that would change the result and is not implemented.
    """
    attending: Attending | None = options.pop("attending", None)
    scaling, window, cap = (options.pop(n, None) for n in ("scaling", "sliding_window", "softcap"))
    given = {name for name, value in options.items() if value is not None and value is not False}
    unknown = sorted(given - _WITHOUT_EFFECT)
    if unknown or attention_mask is not None:
        raise EngineError(f"attention with {', '.join(unknown) or 'a mask'} is not implemented")
    if attending is None:
        raise EngineError("the model does not pass keyword arguments on to its attention")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    scores = Scores(float(scaling), window, cap)
    return attending.attend(int(module.layer_idx), query, key, value, scores), None


AttentionInterface.register(NAME, attention)
