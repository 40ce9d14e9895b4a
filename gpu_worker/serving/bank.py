"""The bank: the adapters' tensors, stacked per module, one row for each adapter.

Row 0 is the base: A and B are zeros and the multiplier is ones, so that it adds nothing. The
factor of B·A is folded into B. DoRA's formula is ``bias + m * (x·W + x·A·B)`` with
``m = magnitude / norm(W + B·A)``: ``m`` is computed once, when the adapter is prepared.

Rows change between steps only, on the thread that owns the model. A row with references is never
rewritten; a row that is given up is zeroed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gpu_worker.serving.adapter import Adapter, LoraError, Part

# Of a weight at once, when its norms with an adapter are taken: a whole one may be of gigabytes.
_NORM_ROWS: Final = 1024


@dataclass(frozen=True, slots=True)
class Rows:
    """An adapter's tensors on one module as they go into a row.

    A (in, r) and B (r, out) in the bank's dtype and on its device; m (out) in fp32.
    """

    a: Tensor
    b: Tensor
    m: Tensor | None


class Stack:
    """One module's part of the bank: A (rows, in, R), B (rows, R, out), m (rows, out)."""

    def __init__(self, module: nn.Module, rows: int, rank: int) -> None:
        weight: Tensor = module.weight
        size_out, size_in = _as_out_in(module).shape
        options = {"dtype": weight.dtype, "device": weight.device}
        self.a = torch.zeros(rows, size_in, rank, **options)
        self.b = torch.zeros(rows, rank, size_out, **options)
        # In fp32: a multiplier near one loses its meaning in 8 bits of mantissa.
        self.m = torch.ones(rows, size_out, dtype=torch.float32, device=weight.device)
        self.used: set[int] = set()
        self.dora: set[int] = set()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(t[0].numel() * t.element_size() for t in (self.a, self.b, self.m))

    @property
    def norm_bytes(self) -> int:
        """Bytes that the norms of one adapter take while they are computed, all in fp32."""
        size_in, rank, size_out = self.a.shape[1], self.a.shape[2], self.b.shape[2]
        tensors, part = rank * (size_in + size_out), min(size_out, _NORM_ROWS) * size_in
        return 4 * int(tensors + part + 2 * size_out)

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return self.row_bytes * len(self.a)

    def write(self, row: int, rows: Rows) -> None:
        """Fill a free row."""
        rank = rows.a.shape[1]
        self.used.add(row)
        self.a[row, :, :rank] = rows.a
        self.b[row, :rank] = rows.b
        if rows.m is not None:
            self.dora.add(row)
            self.m[row] = rows.m

    def clear(self, row: int) -> None:
        """Make a row add nothing again."""
        self.a[row].zero_()
        self.b[row].zero_()
        self.m[row].fill_(1.0)
        self.dora.discard(row)
        self.used.discard(row)


class Bank:
    """All stacks, and which rows are free, taken and in use."""

    def __init__(self, modules: Mapping[str, nn.Module], adapters: int, rank: int) -> None:
        """Allocate ``adapters`` rows of ``rank`` beside the base's for every module by name."""
        self.rank = rank
        self.stacks = {name: Stack(m, adapters + 1, rank) for name, m in modules.items()}
        self._modules = dict(modules)
        self._free = list(range(adapters, 0, -1))
        self._references: dict[int, int] = {}

    @property
    def size(self) -> int:
        """Bytes of the whole workspace."""
        return sum(stack.size for stack in self.stacks.values())

    @property
    def row_size(self) -> int:
        """Bytes of a row on all modules: the most that an adapter can take."""
        return sum(stack.row_bytes for stack in self.stacks.values())

    @property
    def preparing_size(self) -> int:
        """The most bytes that ``prepare`` takes at once: converted tensors, and a norm's parts."""
        return self.row_size + max((s.norm_bytes for s in self.stacks.values()), default=0)

    @property
    def references(self) -> int:
        """References to all rows."""
        return sum(self._references.values())

    def prepare(self, adapter: Adapter) -> dict[str, Rows]:
        """An adapter's tensors, checked and copied to the device; reads the base only.

        Raises:
            LoraError: a module without a place, another size, or a rank above the bank's.
        """
        with torch.inference_mode():
            return {name: self._prepare(name, part) for name, part in adapter.parts.items()}

    def attach(self, prepared: Mapping[str, Rows]) -> int:
        """Put a prepared adapter into a free row; on any failure the row is as before.

        Raises:
            LoraError: every row is taken.
        """
        if not self._free:
            raise LoraError(f"the bank's {len(self._references)} rows are all taken")
        row = self._free[-1]
        try:
            for name, rows in prepared.items():
                self.stacks[name].write(row, rows)
        except BaseException:
            # Whatever stopped it, the row is not left half written.
            self._clear(row, prepared)
            raise
        self._free.pop()
        self._references[row] = 0
        return row

    def detach(self, row: int) -> None:
        """Zero a row and free it.

        Raises:
            LoraError: it is not taken, or has references.
        """
        if self._references.get(row) != 0:
            raise LoraError(f"row {row}: expected one without references")
        self._clear(row, (name for name, stack in self.stacks.items() if row in stack.used))
        del self._references[row]
        self._free.append(row)
        self._free.sort(reverse=True)

    def applied(self, row: int) -> int:
        """Modules that carry a row."""
        return sum(row in stack.used for stack in self.stacks.values())

    def row_bytes(self, row: int) -> int:
        """Bytes of a row on the modules that carry it."""
        return sum(stack.row_bytes for stack in self.stacks.values() if row in stack.used)

    def acquire(self, row: int) -> None:
        """Take a reference to a row; row 0, which never changes, counts none."""
        if row:
            self._references[row] += 1

    def release(self, row: int) -> None:
        """Give a reference back."""
        if row:
            self._references[row] -= 1

    def _clear(self, row: int, names: Iterable[str]) -> None:
        for name in names:
            self.stacks[name].clear(row)

    def _prepare(self, name: str, part: Part) -> Rows:
        stack = self.stacks.get(name)
        if stack is None:
            raise LoraError(f"{name}: the bank has no place for a module of this name")
        stored = _as_out_in(self._modules[name])
        self._sizes_check(name, part, tuple(stored.shape))
        device, dtype = stack.a.device, stack.a.dtype
        a, b = part.a.to(device), part.b.to(device) * part.scaling
        m = None
        if part.magnitude is not None:
            m = part.magnitude.to(device, torch.float32) / _norms(stored, a.float(), b.float())
        return Rows(a.T.to(dtype), b.T.to(dtype), m)

    def _sizes_check(self, name: str, part: Part, stored: tuple[int, ...]) -> None:
        if part.a.ndim != 2 or part.b.ndim != 2 or part.a.shape[0] != part.b.shape[1]:
            raise LoraError(
                f"{name}: expected A (r, in) and B (out, r), "
                f"got {tuple(part.a.shape)} and {tuple(part.b.shape)}"
            )
        got = (part.b.shape[0], part.a.shape[1])
        if stored != got:
            raise LoraError(f"{name}: expected {stored}, got {got}")
        if part.a.shape[0] > self.rank:
            raise LoraError(f"{name}: rank {part.a.shape[0]} is above the bank's {self.rank}")
        if part.magnitude is not None and tuple(part.magnitude.shape) != stored[:1]:
            raise LoraError(f"{name}: expected a magnitude of {stored[0]} values")


def product(module: nn.Module) -> bool:
    """True for modules that multiply each row with a weight, or look it up there."""
    return isinstance(module, nn.Linear | Conv1D | nn.Embedding)


def placeable(module: nn.Module) -> bool:
    """True for modules that the bank's formulas hold for; a subclass may compute what it likes."""
    scaled = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    return scaled or type(module) in (nn.Linear, Conv1D, nn.Embedding)


def _norms(stored: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The norm (out) of each row of W + B·A in fp32, for W (out, in), A (r, in) and B (out, r)."""
    norms = []
    for weight, rows in zip(stored.split(_NORM_ROWS), b.split(_NORM_ROWS), strict=True):
        norms.append(torch.linalg.vector_norm((rows @ a).add_(weight), dim=1))
    return torch.cat(norms)


def _as_out_in(module: nn.Module) -> Tensor:
    """A module's weight as (out, in): a Linear stores it so, the others store (in, out)."""
    weight: Tensor = module.weight
    return weight if isinstance(module, nn.Linear) else weight.T
