"""A model's parameters and buffers, to show that the base never changes.

The digest says what they are: it is made when the base is loaded. Whether they are still the same
is asked after every load of an adapter, and SHA-256 over a base takes longer than the load: so that
is answered from what torch counts of its own writes, and from sums over all bytes, at the speed of
the memory that the base lies in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

Named: TypeAlias = tuple[tuple[str, Tensor], ...]


def parameters_named(model: nn.Module) -> Named:
    """Parameters and persistent buffers by name. Taken before any module is wrapped."""
    return tuple(sorted(model.state_dict(keep_vars=True).items()))


def parameters_digest(named: Sequence[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes."""
    state = hashlib.sha256()
    for name, tensor in named:
        state.update(f"{len(name)}:{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        state.update(memoryview(plain.numpy()))
    return "sha256:" + state.hexdigest()


class Unchanged:
    """Whether tensors are as they were when this was made."""

    def __init__(self, named: Named) -> None:
        self._tensors = tuple(tensor for _, tensor in named)
        self._seen = self._look()

    def __call__(self) -> bool:
        """True when torch wrote to none of them, and the sum of each one's bytes is the same."""
        return self._look() == self._seen

    def _look(self) -> list[tuple[int, int, int]]:
        with torch.inference_mode():
            return [(t.data_ptr(), t._version, _sum(t)) for t in self._tensors]


def _sum(tensor: Tensor) -> int:
    """The sum of the bytes as 64-bit words, and of those that are left over."""
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = plain.numel() // 8 * 8
    return int(plain[:words].view(torch.int64).sum()) + int(plain[words:].sum())
