"""An adapter as the engine takes it: for each module two matrices, a factor, and DoRA's magnitude.

What the engine has no place for is refused here by name: a tensor that nothing reads would be an
adapter that answers differently from what was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

_PREFIX: Final = "base_model.model."
_A: Final = ("lora_A.weight", "lora_embedding_A")
_B: Final = ("lora_B.weight", "lora_embedding_B")
_MAGNITUDE: Final = "lora_magnitude_vector"
# What PEFT can save beside plain LoRA, by a part of the tensor's name.
_KINDS: Final = {
    "lora_B.bias": "a bias of lora_B (lora_bias)",
    "trainable_tokens_delta": "trained token rows (trainable_token_indices)",
    "base_layer": "a tensor of the base itself",
    "lora_": "a LoRA tensor of a kind that is not served",
}


class LoraError(Exception):
    """An adapter that does not fit the engine or its base."""


@dataclass(frozen=True, slots=True)
class Part:
    """An adapter's tensors on one module: A (r, in), B (out, r), DoRA's magnitude (out)."""

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A whole adapter: its parts by module name."""

    parts: Mapping[str, Part]


def adapter_of(tensors: Mapping[str, Tensor], scaling: Mapping[str, float]) -> Adapter:
    """The adapter in a file's tensors, with the factor of B·A for each module.

    Raises:
        LoraError: a tensor that the engine has no place for, or one that is missing.
    """
    left = dict(tensors)
    parts = {}
    for module, factor in scaling.items():
        a, b = (_take(left, module, suffixes) for suffixes in (_A, _B))
        parts[module] = Part(a, b, factor, left.pop(f"{_PREFIX}{module}.{_MAGNITUDE}", None))
    if left:
        name = min(left)
        kind = next((text for mark, text in _KINDS.items() if mark in name), "a whole module")
        raise LoraError(f"{name}: the engine has no place for {kind}")
    return Adapter(parts)


def _take(tensors: dict[str, Tensor], module: str, suffixes: tuple[str, ...]) -> Tensor:
    names = [f"{_PREFIX}{module}.{suffix}" for suffix in suffixes]
    for name in names:
        if name in tensors:
            return tensors.pop(name)
    raise LoraError(f"{names[0]}: missing")
