"""A lane's state as safetensors bytes, and back, exactly as an identity says it is."""

from __future__ import annotations

from typing import Final

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from gpu_worker.serving.identity import Identity, Layout
from gpu_worker.serving.lanes import LaneState
from registry_service.domain.errors import MalformedError

_TOKENS: Final = "tokens"
# Up to so many numbers torch computes on the thread that asks alone (at::internal::GRAIN_SIZE): the
# one here lives on, and helpers of its own would slow the model's down: see compute_briefly.
_AT_ONCE: Final = 32_767
_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def token_bytes(layout: Layout, dtype: str) -> int:
    """Bytes of one token's KV in a lane."""
    numbers = sum(heads * (key_size + value_size) for heads, key_size, value_size in layout.layers)
    size: int = _DTYPES[dtype].itemsize
    return numbers * size


def state_encode(identity: Identity, state: LaneState) -> bytes:
    """The state as safetensors bytes.

    Raises:
        MalformedError: it is not as the identity says, has no tokens, or holds a number that is
            not finite.
    """
    tensors = {_TOKENS: torch.tensor(state.tokens, dtype=torch.int64)}
    for kind, kept in (("k", state.keys), ("v", state.values)):
        tensors |= {f"{kind}.{layer}": tensor.contiguous() for layer, tensor in enumerate(kept)}
    _check(identity, tensors, len(state.tokens))
    for name, tensor in tensors.items():
        if not all(bool(part.isfinite().all()) for part in tensor.view(-1).split(_AT_ONCE)):
            raise MalformedError(f"slot state: {name}: expected finite numbers")
    content: bytes = safetensors.torch.save(tensors)
    return content


def state_decode(identity: Identity, count: int, content: bytes) -> LaneState:
    """A state of ``count`` tokens.

    Raises:
        MalformedError: not safetensors, or not as the identity says.
    """
    try:
        tensors = safetensors.torch.load(content)
    except SafetensorError as error:
        raise MalformedError("slot state: expected safetensors") from error
    _check(identity, tensors, count)
    layers = range(len(identity.layout.layers))
    return LaneState(
        tokens=tuple(tensors[_TOKENS].tolist()),
        keys=tuple(tensors[f"k.{layer}"] for layer in layers),
        values=tuple(tensors[f"v.{layer}"] for layer in layers),
    )


def _check(identity: Identity, tensors: dict[str, Tensor], count: int) -> None:
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {_TOKENS: (torch.int64, (count,))}
    dtype = _DTYPES[identity.dtype]
    for layer, (heads, key_size, value_size) in enumerate(identity.layout.layers):
        expected[f"k.{layer}"] = (dtype, (heads, count, key_size))
        expected[f"v.{layer}"] = (dtype, (heads, count, value_size))
    got = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    if count < 1 or got != expected:
        wrong = next(
            (name for name in sorted({*expected, *got}) if expected.get(name) != got.get(name)),
            _TOKENS,
        )
        raise MalformedError(
            f"slot state: {wrong}: expected {expected.get(wrong)}, got {got.get(wrong)}"
        )
