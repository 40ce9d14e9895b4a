"""LoRA on a base model, by wrapping modules: no hooks, and the base's weights stay untouched.

Each forward states its adapter in the ``Selection``; a wrapped module adds that adapter's part to
what the base gives, or nothing. The formulas are those of LoRA, rank-stabilised LoRA (both only
differ in ``scaling``) and DoRA, whose multiplier is computed once, when the adapter is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class LoraError(Exception):
    """An adapter that does not fit the base's modules."""


@dataclass(frozen=True, slots=True)
class Part:
    """An adapter's tensors on one module: A (r, in), B (out, r), DoRA's magnitude (out)."""

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A whole adapter: its parts by module name. One adapter is one object of identity."""

    parts: Mapping[str, Part]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(
            tensor.numel() * tensor.element_size()
            for part in self.parts.values()
            for tensor in (part.a, part.b, part.magnitude)
            if tensor is not None
        )


class Selection:
    """Which adapter the running forward uses. Only the thread that owns the model sets it."""

    def __init__(self) -> None:
        self.adapter: Adapter | None = None

    @contextmanager
    def of(self, adapter: Adapter | None) -> Iterator[None]:
        """Select an adapter (None: the base alone) for one forward, and nothing after it."""
        if self.adapter is not None:
            raise LoraError("a forward is running already")
        self.adapter = adapter
        try:
            yield
        finally:
            self.adapter = None


class _Wrapped(nn.Module, ABC):  # type: ignore[misc]  # the checker does not see torch
    """A module of the base, and its name, under which an adapter finds its part."""

    def __init__(self, base: nn.Module, name: str, selection: Selection) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self.selection = selection

    def forward(self, value: Tensor) -> Tensor:
        """The base's output plus the selected adapter's part, in the base's dtype."""
        result: Tensor = self.base(value)
        adapter = self.selection.adapter
        part = None if adapter is None else adapter.parts.get(self.name)
        if part is None:
            return result
        return self.adapted(value, result, part).to(result.dtype)

    @abstractmethod
    def adapted(self, value: Tensor, result: Tensor, part: Part) -> Tensor:
        """The output with the part applied."""

    @property
    def weight(self) -> Tensor:
        """The base's weight: models read it from here to tie heads and to learn dtypes."""
        weight: Tensor = self.base.weight
        return weight


class WrappedLinear(_Wrapped):
    """``nn.Linear`` and ``Conv1D``, which differ in how the base stores its weight only."""

    def adapted(self, value: Tensor, result: Tensor, part: Part) -> Tensor:
        """The output with the part applied."""
        delta = (value.to(part.a.dtype) @ part.a.T) @ part.b.T * part.scaling
        if part.magnitude is None:
            return result + delta
        # DoRA scales the whole product, and the bias not at all.
        bias = self.base.bias
        plain = result if bias is None else result - bias
        return result + (part.magnitude - 1) * plain + part.magnitude * delta


class WrappedEmbedding(_Wrapped):
    """``nn.Embedding``; scaled ones (Gemma) scale the adapter's part too."""

    def adapted(self, value: Tensor, result: Tensor, part: Part) -> Tensor:
        """The output with the part applied."""
        delta = nn.functional.embedding(value, part.a.T) @ part.b.T * part.scaling
        scale = getattr(self.base, "embed_scale", None)
        if isinstance(scale, Tensor):
            delta = delta * scale.to(delta.dtype)
        if part.magnitude is None:
            return result + delta
        return part.magnitude * (result + delta)


class LoraModel:
    """A base model whose targeted modules are wrapped when the first adapter needs them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.selection = Selection()
        self._names = dict(model.named_modules())
        self._wrapped: dict[str, _Wrapped] = {}

    def prepare(self, adapter: Adapter) -> Adapter:
        """The adapter as the forward needs it: on the device, checked, DoRA's multiplier computed.

        Reads the base only, so it may run beside a forward.

        Raises:
            LoraError: a module that is not there, of another kind or size.
        """
        with torch.inference_mode():
            return Adapter({name: self._prepare(name, p) for name, p in adapter.parts.items()})

    def wrap(self, adapter: Adapter) -> int:
        """Wrap every module that the adapter has a part for; the number of parts in place.

        Only the thread that owns the model calls it, between forwards.
        """
        wrappers = {
            name: _wrapper(self._names[name])(self._names[name], name, self.selection)
            for name in adapter.parts
            if name not in self._wrapped
        }
        for name, wrapper in wrappers.items():
            parent, _, child = name.rpartition(".")
            owner = self.model.get_submodule(parent)
            setattr(owner, child, wrapper)
            self._wrapped[name] = wrapper
        return sum(name in self._wrapped for name in adapter.parts)

    def _prepare(self, name: str, part: Part) -> Part:
        base = self._names.get(name)
        if base is None:
            raise LoraError(f"{name}: the base has no such module")
        _wrapper(base)
        weight: Tensor = base.weight
        # As (out, in): a Linear stores it so, the others store (in, out).
        stored = weight if isinstance(base, nn.Linear) else weight.T
        got = (part.b.shape[0], part.a.shape[1])
        if tuple(stored.shape) != got or part.a.shape[0] != part.b.shape[1]:
            raise LoraError(f"{name}: expected {tuple(stored.shape)}, got {got}")
        a, b = part.a.to(weight.device), part.b.to(weight.device)
        if part.magnitude is None:
            return Part(a, b, part.scaling)
        if part.magnitude.shape != (stored.shape[0],):
            raise LoraError(f"{name}: expected a magnitude of {stored.shape[0]} values")
        norm = torch.linalg.vector_norm(stored + part.scaling * (b @ a), dim=1)
        return Part(a, b, part.scaling, part.magnitude.to(weight.device) / norm)


def _wrapper(module: nn.Module) -> type[_Wrapped]:
    if isinstance(module, nn.Linear | Conv1D):
        return WrappedLinear
    if isinstance(module, nn.Embedding):
        return WrappedEmbedding
    raise LoraError(f"{type(module).__name__}: expected Linear, Conv1D or Embedding")
