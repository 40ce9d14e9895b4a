"""A digest of a model's parameters and buffers, to show that the base never changes."""

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
