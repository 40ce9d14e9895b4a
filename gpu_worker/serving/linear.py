"""The base's modules with the bank's rows on top: no hooks, and no loop over adapters in decode.

A decode step is two batched products: each row's vector times its own bank row's matrix. They are
weighted sums of the matrix's lines, read where they lie: to gather the matrices first would move
each of them three times, and that is what decode waits for. A row's sum depends on nothing but the
row. A prefill segment is one pair of products. A step in which no row has an adapter on a module
adds nothing there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu_worker.serving.bank import Stack
from gpu_worker.serving.batch import BankRows, Batch, aligned
from gpu_worker.serving.sequence import EngineError


class Current:
    """The batch of the running forward. Only the thread that owns the model sets it."""

    def __init__(self) -> None:
        self.batch: Batch | None = None

    @contextmanager
    def of(self, batch: Batch) -> Iterator[None]:
        """State the batch for one forward, and nothing after it."""
        if self.batch is not None:
            raise EngineError("a forward is running already")
        self.batch = batch
        try:
            yield
        finally:
            self.batch = None


class Stacked(nn.Module, ABC):  # type: ignore[misc]  # the checker does not see torch
    """A module of the base, and its stack in the bank if it has a place there.

    ``most_rows`` bounds the rows of one product, where larger ones would round differently.
    """

    def __init__(self, base: nn.Module, current: Current, stack: Stack | None) -> None:
        super().__init__()
        self.base = base
        self.stack = stack
        self.current = current
        self.most_rows: int | None = None

    def forward(self, value: Tensor) -> Tensor:
        """The base's output plus what each row's adapter adds."""
        result = self._base(value)
        batch, stack = self.current.batch, self.stack
        if batch is None or stack is None or batch.bank_rows.isdisjoint(stack.used):
            return result
        self.add(result.view(-1, result.shape[-1]), value, batch, stack)
        return result

    @abstractmethod
    def add(self, result: Tensor, value: Tensor, batch: Batch, stack: Stack) -> None:
        """Add the adapters' parts to the flat result, in place."""

    @property
    def weight(self) -> Tensor:
        """The base's weight: models read it from here to tie heads and to learn dtypes."""
        weight: Tensor = self.base.weight
        return weight

    def _base(self, value: Tensor) -> Tensor:
        if self.most_rows is None or value.shape[-2] <= self.most_rows:
            result: Tensor = self.base(value)
            return result
        return torch.cat([self.base(piece) for piece in value.split(self.most_rows, -2)], -2)

    def _merge(self, result: Tensor, delta: Tensor, m: Tensor | None) -> None:
        """``result + delta``, or DoRA's formula where there are multipliers."""
        if m is None:
            result += delta
            return
        # DoRA scales the whole product, and the bias not at all. A row without it has multipliers
        # of one and gets the very sum that it gets beside no DoRA.
        whole, part = result.float(), delta.float()
        bias = getattr(self.base, "bias", None)
        plain = whole if bias is None else whole - bias.float()
        scaled = whole + (m - 1) * plain + m * part
        result.copy_(torch.where(m == 1, whole + part, scaled))


class StackedLinear(Stacked):
    """``nn.Linear`` and ``Conv1D``, which differ in how the base stores its weight only."""

    def add(self, result: Tensor, value: Tensor, batch: Batch, stack: Stack) -> None:
        """Add the adapters' parts to the flat result, in place."""
        flat = value.view(-1, value.shape[-1])
        d = batch.decode
        if d:
            rows = batch.decode_rows
            inner = _by_row(flat[:d], rows, stack.a)
            delta = _by_row(inner, rows, stack.b)
            self._merge(result[:d], delta, _multipliers(batch, rows, stack))
        for segment in batch.segments:
            row = segment.sequence.bank_row
            if row in stack.used:
                span = slice(segment.start, segment.start + segment.count)
                delta = (aligned(flat[span]) @ stack.a[row]) @ stack.b[row]
                self._merge(result[span], delta, stack.m[row] if row in stack.dora else None)


class StackedHead(Stacked):
    """The output head, which sees the rows that need logits and no others."""

    def add(self, result: Tensor, value: Tensor, batch: Batch, stack: Stack) -> None:
        """Add the adapters' parts to the flat result, in place."""
        rows = batch.keep_rows
        inner = _by_row(value.view(-1, value.shape[-1]), rows, stack.a)
        self._merge(result, _by_row(inner, rows, stack.b), _multipliers(batch, rows, stack))


class StackedEmbedding(Stacked):
    """``nn.Embedding``; scaled ones (Gemma) scale the adapter's part too."""

    def add(self, result: Tensor, value: Tensor, batch: Batch, stack: Stack) -> None:
        """Add the adapters' parts to the flat result, in place."""
        inner = stack.a[batch.token_rows, value.view(-1)]
        d = batch.decode
        if d:
            delta = _by_row(inner[:d], batch.decode_rows, stack.b)
            m = _multipliers(batch, batch.decode_rows, stack)
            self._merge(result[:d], self._scaled(delta), m)
        for segment in batch.segments:
            row = segment.sequence.bank_row
            if row in stack.used:
                span = slice(segment.start, segment.start + segment.count)
                delta = self._scaled(aligned(inner[span]) @ stack.b[row])
                self._merge(result[span], delta, stack.m[row] if row in stack.dora else None)

    def _scaled(self, delta: Tensor) -> Tensor:
        scale = getattr(self.base, "embed_scale", None)
        return delta if scale is None else delta * torch.as_tensor(scale).to(delta.dtype)


def _by_row(vectors: Tensor, rows: BankRows, matrices: Tensor) -> Tensor:
    """Each vector (n, in) times its own row of ``matrices`` (rows, in, out): (n, out)."""
    _, size_in, size_out = matrices.shape
    lines = matrices.view(-1, size_out)
    return functional.embedding_bag(
        rows.places(size_in), lines, per_sample_weights=vectors, mode="sum"
    )


def _multipliers(batch: Batch, rows: BankRows, stack: Stack) -> Tensor | None:
    """The rows' multipliers (n, out), where any row of the batch has some."""
    return None if batch.bank_rows.isdisjoint(stack.dora) else stack.m[rows.rows]
