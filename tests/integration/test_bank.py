"""What the bank takes while it prepares an adapter, and the multiplier that it makes for DoRA."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from gpu_worker.serving.adapter import Adapter, Part
from gpu_worker.serving.bank import Bank

pytestmark = pytest.mark.torch

RANK = 4
WIDE, NARROW = 2500, 40


class Peak(TorchDispatchMode):
    """The most bytes at once of the storages that operations made."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.peak = self.now = 0
        self._views = Counter(self._storage(tensor) for tensor in known)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        found = function(*arguments, **(named or {}))
        for tensor in found if isinstance(found, list | tuple) else [found]:
            if isinstance(tensor, Tensor):
                self._made(tensor)
        return found

    def _made(self, tensor: Tensor) -> None:
        place, size = self._storage(tensor), tensor.untyped_storage().nbytes()
        self._views[place] += 1
        if self._views[place] == 1:
            self.now += size
            self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self._views[place] -= 1
        self.now -= size if self._views[place] == 0 else 0

    @staticmethod
    def _storage(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()


def linear(size_in: int, size_out: int, dtype: torch.dtype) -> nn.Module:
    return nn.Linear(size_in, size_out, dtype=dtype)


def conv1d(size_in: int, size_out: int, dtype: torch.dtype) -> nn.Module:
    return Conv1D(size_out, size_in).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("build", [linear, conv1d])
@pytest.mark.parametrize("sizes", [(NARROW, WIDE), (WIDE, NARROW)], ids=["tall", "wide"])
def test_preparing_takes_no_more_than_it_says_and_dora_is_its_formula(
    build: Any, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    size_in, size_out = sizes
    torch.manual_seed(3)
    module = build(size_in, size_out, dtype)
    bank = Bank({"module": module}, adapters=1, rank=RANK)
    a, b = torch.randn(RANK, size_in), torch.randn(size_out, RANK)
    magnitude = torch.rand(size_out)
    adapter = Adapter({"module": Part(a, b, 0.5, magnitude)})
    with Peak(module.weight, a, b, magnitude) as taken:
        rows = bank.prepare(adapter)["module"]
    assert bank.row_size < taken.peak <= bank.preparing_size
    stored = module.weight if isinstance(module, nn.Linear) else module.weight.T
    norm = torch.linalg.vector_norm(stored.detach().double() + 0.5 * b.double() @ a.double(), dim=1)
    assert rows.m is not None
    torch.testing.assert_close(rows.m, (magnitude / norm).float(), rtol=1e-5, atol=0)
