"""A step as tensors on the model's device, and the attention over it.

Plain products and softmax: a row's arithmetic has to depend on the row alone. Sizes that others
decide are made harmless: the length is rounded up to whole blocks, keys are summed block by block
(MKL splits a sum by its length, from 448 on), and few rows are run as several, by repeating the
last one (small batches take other paths).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gpu_worker.serving.attention import Scores
from gpu_worker.serving.lanes import Lanes
from gpu_worker.serving.step import Segment, Step
from gpu_worker.serving.workspace import BLOCK_TOKENS, rows_padded

_ALIGNED_BYTES: Final = 64
# Torch multiplies batches of half precision of up to this many multiplications by a loop of its
# own, and larger ones with oneDNN, which adds in another order.
_LOOP_PRODUCTS: Final = 16**3


class BankRows:
    """The bank rows of some tokens (n), and where these lie in a stack."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._places: dict[int, Tensor] = {}

    def places(self, size: int) -> Tensor:
        """(n, size): of each token's part of a stack (rows, size, …), where its lines are."""
        if size not in self._places:
            lines = torch.arange(size, device=self.rows.device)
            self._places[size] = self.rows[:, None] * size + lines
        return self._places[size]


class Batch:
    """One step's inputs, masks and rows.

    ``tokens`` and ``positions`` are (1, N), N a multiple of ``ROW_STEP``; ``keep`` are the indices
    that need logits, padded likewise, and ``keep_rows`` their bank rows. The first ``decode``
    tokens are one of a row each.
    """

    def __init__(self, step: Step, lanes: Lanes, device: torch.device, least_rows: int) -> None:
        """``least_rows`` is what ``least_rows`` gives for the model's attention."""
        self.lanes = lanes
        self._least_rows = least_rows
        self.segments = step.prefill
        self.decode = len(step.decode)
        self.bank_rows = frozenset(s.sequence.bank_row for s in step.segments)
        tokens, positions, rows = _flat(step)
        self.tokens = torch.tensor([tokens], device=device)
        self.positions = torch.tensor([positions], device=device)
        self.token_rows = torch.tensor(rows, device=device)
        keep = [s.start + s.count - 1 for s in step.emitting]
        padding = [0] * (rows_padded(len(keep)) - len(keep))
        self.keep = torch.tensor(keep + padding, dtype=torch.long, device=device)
        self.keep_rows = BankRows(self.token_rows[self.keep])
        self.decode_rows = BankRows(self.token_rows[: self.decode])
        self._hidden: dict[int | None, Tensor] = {}
        if self.decode:
            self._decode_prepare(step.decode, device)

    def _decode_prepare(self, decode: tuple[Segment, ...], device: torch.device) -> None:
        self._lane = torch.tensor([s.sequence.lane for s in decode], device=device)
        self._position = self.positions[0, : self.decode]
        longest = max(s.end for s in decode)
        self._length = min(-(-longest // BLOCK_TOKENS) * BLOCK_TOKENS, self.lanes.tokens)
        first, last = decode[0].sequence.lane, decode[-1].sequence.lane
        # Lanes that follow each other are read where they are.
        in_place = self.decode >= self._least_rows and last - first == self.decode - 1
        self._read: slice | Tensor = slice(first, last + 1) if in_place else self.padded(self._lane)

    def padded(self, rows: Tensor) -> Tensor:
        """The decode rows, and the last one again as often as small batches need it."""
        missing = self._least_rows - self.decode
        if missing <= 0:
            return rows
        return torch.cat((rows, rows[-1:].expand(missing, *rows.shape[1:])))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        """Attention of the flat tokens over their lanes, whose keys and values are written first.

        Query, key and value are (1, heads, N, size); the result is (1, N, heads, size).
        """
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        keys, values = self.lanes.keys[layer], self.lanes.values[layer]
        d = self.decode
        if d:
            keys[self._lane, :, self._position] = k[:d]
            values[self._lane, :, self._position] = v[:d]
            read = (keys[self._read, :, : self._length], values[self._read, :, : self._length])
            hidden = self._decode_hidden(scores.window)
            out[:d] = _attention(self.padded(q[:d])[:, None], *read, scores, hidden)[:d, 0]
        for segment in self.segments:
            lane, span = segment.sequence.lane, slice(segment.start, segment.start + segment.count)
            keys[lane, :, segment.position : segment.end] = k[span].transpose(0, 1)
            values[lane, :, segment.position : segment.end] = v[span].transpose(0, 1)
            read = (keys[lane, None, :, : segment.end], values[lane, None, :, : segment.end])
            hidden = _segment_hidden(segment, scores.window, q.device)
            out[span] = _attention(q[None, span], *read, scores, hidden)[0]
        return out[None]

    def _decode_hidden(self, window: int | None) -> Tensor:
        """(d, 1, 1, length): keys that a decode row does not see."""
        if window not in self._hidden:
            position = self.padded(self._position)[:, None]
            hidden = _hidden(position, self._length, window)
            self._hidden[window] = hidden[:, None, None]
        return self._hidden[window]


def least_rows(smallest: int, device: torch.device, dtype: torch.dtype) -> int:
    """How many rows a batched product needs to be computed as any larger one is.

    ``smallest`` is the number of multiplications that a row takes in the smallest of them.
    """
    if device.type != "cpu" or dtype == torch.float32:
        return 2
    return max(2, _LOOP_PRODUCTS // smallest + 1)


def aligned(rows: Tensor) -> Tensor:
    """The same numbers where kernels do not depend on where they begin."""
    return rows if rows.data_ptr() % _ALIGNED_BYTES == 0 else rows.clone()


def _flat(step: Step) -> tuple[list[int], list[int], list[int]]:
    """Token ids, positions and bank rows of every token, padded to a multiple of ``ROW_STEP``."""
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    for segment in step.segments:
        tokens += segment.tokens()
        positions += range(segment.position, segment.end)
        rows += [segment.sequence.bank_row] * segment.count
    padding = [0] * (rows_padded(len(tokens)) - len(tokens))
    return tokens + padding, positions + padding, rows + padding


def _attention(q: Tensor, k: Tensor, v: Tensor, how: Scores, hidden: Tensor) -> Tensor:
    """q (rows, n, heads, size) over k, v (rows, kv_heads, length, size): (rows, n, heads, size)."""
    rows, n, heads, size = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(rows, n, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
    flat = (grouped * how.scaling).reshape(rows, kv_heads, heads // kv_heads * n, size)
    scores = torch.matmul(flat, k.transpose(2, 3))
    if how.cap is not None:
        scores = torch.tanh(scores / how.cap) * how.cap
    scores = scores.view(rows, kv_heads, heads // kv_heads, n, -1)
    scores = scores.masked_fill(hidden.view(rows, 1, 1, n, -1), float("-inf"))
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
    weights = weights.view(rows, kv_heads, heads // kv_heads * n, -1)
    out = torch.matmul(weights[..., :BLOCK_TOKENS], v[:, :, :BLOCK_TOKENS])
    for start in range(BLOCK_TOKENS, v.shape[2], BLOCK_TOKENS):
        block = slice(start, start + BLOCK_TOKENS)
        out = out + torch.matmul(weights[..., block], v[:, :, block])
    out = out.view(rows, kv_heads, heads // kv_heads, n, -1)
    return out.permute(0, 3, 1, 2, 4).reshape(rows, n, heads, -1)


def _hidden(position: Tensor, length: int, window: int | None) -> Tensor:
    """(n, length): keys after a query's position (n, 1), or out of its window."""
    key = torch.arange(length, device=position.device)
    hidden = key > position
    return hidden if window is None else hidden | (key <= position - window)


def _segment_hidden(segment: Segment, window: int | None, device: torch.device) -> Tensor:
    position = torch.arange(segment.position, segment.end, device=device)[:, None]
    return _hidden(position, segment.end, window)[None]
