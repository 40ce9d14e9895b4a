"""Lanes: the KV of running requests, one lane each, with room for a whole prompt and answer.

A lane is zeroed before it is used again. What is masked is still multiplied, and 0 · NaN is NaN:
a leftover would poison the next request.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.serving.sequence import EngineError, Holder
from gpu_worker.serving.workspace import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps of a token: heads, and the sizes of a key and a value."""

    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class LaneState:
    """KV of ``tokens``, outside of any lane: per layer keys and values (heads, tokens, size).

    The tensors are the holder's own, on the CPU. Which adapter, base and versions they were made
    with is for the holder to know and to check before it hands them in again.
    """

    tokens: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


@dataclass(frozen=True, slots=True)
class BlockKV:
    """KV of one block on the device: per layer keys and values (heads, tokens, size)."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class Lanes:
    """Keys and values per layer (lane, heads, tokens, size), and the free lanes."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        count: int,
        tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def slab(layer: LayerShape, size: int) -> Tensor:
            return torch.zeros(count, layer.heads, tokens, size, dtype=dtype, device=device)

        self.tokens = tokens
        self.keys = [slab(layer, layer.key_size) for layer in layers]
        self.values = [slab(layer, layer.value_size) for layer in layers]
        self._free = list(range(count - 1, -1, -1))
        self._written = [0] * count
        # Guards the holders alone: everything else is the model's thread's.
        self._lock = threading.Lock()
        self._holders: dict[int, Holder] = {}

    @property
    def size(self) -> int:
        """Bytes of all lanes."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    @property
    def free(self) -> int:
        """How many lanes are free."""
        return len(self._free)

    def held(self) -> Mapping[Holder | None, int]:
        """Bytes of each holder's lanes; None has those that are free or nobody's. On any thread."""
        lane_bytes = self.size // len(self._written)
        with self._lock:
            counts = Counter[Holder | None](self._holders.values())
        counts[None] = len(self._written) - counts.total()
        return {holder: count * lane_bytes for holder, count in counts.items()}

    def take(self, holder: Holder | None = None) -> int:
        """The lowest free lane: what is used lies together."""
        lane = self._free.pop()
        if holder is not None:
            with self._lock:
                self._holders[lane] = holder
        return lane

    def clear(self, lane: int) -> None:
        """Zero what was written to a lane."""
        end = self._written[lane]
        for slab in (*self.keys, *self.values):
            slab[lane, :, :end].zero_()
        # Not before: what could not be zeroed counts as written still.
        self._written[lane] = 0

    def release(self, lane: int) -> None:
        """Zero what was written to a lane, and free it."""
        self.clear(lane)
        with self._lock:
            self._holders.pop(lane, None)
        self._free.append(lane)
        self._free.sort(reverse=True)

    def extend(self, lane: int, end: int) -> None:
        """Note that a lane is about to be written up to a position."""
        self._written[lane] = max(self._written[lane], end)

    def block(self, lane: int, number: int) -> BlockKV:
        """A copy of one block of a lane."""
        start = number * BLOCK_TOKENS
        return BlockKV(*self._copy(lane, start, start + BLOCK_TOKENS))

    def block_restore(self, lane: int, number: int, block: BlockKV) -> None:
        """Copy a block into a lane."""
        self._fill(lane, number * BLOCK_TOKENS, block.keys, block.values, BLOCK_TOKENS)

    def state(self, lane: int, tokens: tuple[int, ...]) -> LaneState:
        """A copy of a lane's beginning, which holds ``tokens``."""
        keys, values = self._copy(lane, 0, len(tokens))
        return LaneState(tokens, tuple(k.cpu() for k in keys), tuple(v.cpu() for v in values))

    def state_check(self, state: LaneState) -> None:
        """Compare a state with this layout.

        Raises:
            EngineError: it was made for other layers, sizes or numbers, or does not fit.
        """
        count = len(state.tokens)
        for mine, theirs in ((self.keys, state.keys), (self.values, state.values)):
            expected = [(slab.dtype, (slab.shape[1], count, slab.shape[3])) for slab in mine]
            if expected != [(t.dtype, tuple(t.shape)) for t in theirs] or count > self.tokens:
                raise EngineError("lane state: of another layout than this engine's")

    def restore(self, lane: int, state: LaneState, count: int) -> None:
        """Copy the first ``count`` tokens of a checked state into a lane."""
        self._fill(lane, 0, state.keys, state.values, count)

    def _copy(
        self, lane: int, start: int, end: int
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        keys = tuple(slab[lane, :, start:end].clone() for slab in self.keys)
        return keys, tuple(slab[lane, :, start:end].clone() for slab in self.values)

    def _fill(
        self, lane: int, start: int, keys: Sequence[Tensor], values: Sequence[Tensor], count: int
    ) -> None:
        end = start + count
        self.extend(lane, end)
        for slabs, tensors in ((self.keys, keys), (self.values, values)):
            for slab, tensor in zip(slabs, tensors, strict=True):
                slab[lane, :, start:end] = tensor[:, :count]
