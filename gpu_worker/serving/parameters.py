"""A model's parameters and buffers, to show that the base never changes.

The digest says what they are: it is made when the base is loaded, and again beside everything else
after adapters were loaded. A load does not wait for that, since SHA-256 over a base takes longer
than the load: it asks what torch counts of its own writes, and sums over all bytes, at the speed of
the memory that the base lies in.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

_LOG = logging.getLogger(__name__)
Named: TypeAlias = tuple[tuple[str, Tensor], ...]


def parameters_named(model: nn.Module) -> Named:
    """Parameters and persistent buffers by name. Taken before any module is wrapped."""
    return tuple(sorted(model.state_dict(keep_vars=True).items()))


def parameters_digest(named: Sequence[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes."""
    state = hashlib.sha256()
    for name, tensor in named:
        parameter_add(state, name, tensor)
    return "sha256:" + state.hexdigest()


def parameter_add(state: hashlib._Hash, name: str, tensor: Tensor) -> None:
    """Add one to a digest; the digest of all is over each in the order of names."""
    state.update(f"{len(name)}:{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    state.update(memoryview(plain.numpy()))


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


@dataclass(frozen=True, slots=True)
class BaseWatch:
    """Asks whether the base is unchanged, and ends whatever runs on it when it is not.

    Nothing says since when it is another one, so that no answer of it may go out any more.
    ``lost`` ends it for good; it is called on the thread that asks, never on the model's.
    """

    unchanged: Callable[[], bool]
    lost: Callable[[], None]

    def __call__(self) -> bool:
        """True when the base is unchanged."""
        if self.unchanged():
            return True
        _LOG.error(
            "the base's parameters changed: nothing runs here until the node is started again",
            extra={"event": "base.changed"},
        )
        self.lost()
        return False


def _sum(tensor: Tensor) -> int:
    """The sum of the bytes as 64-bit words, and of those that are left over."""
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = plain.numel() // 8 * 8
    return int(plain[:words].view(torch.int64).sum()) + int(plain[words:].sum())
