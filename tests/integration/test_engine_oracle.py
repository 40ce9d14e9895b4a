"""The engine against PEFT, architecture by architecture; and the checks that run on CUDA too."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker.serving import linear
from gpu_worker.serving.sequence import Job
from tests.integration import engine_world as ew
from tests.integration.engine_checks import (
    oracle_check,
    poison_check,
    prefix_check,
    unload_check,
)

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]


@pytest.mark.parametrize("kind", sorted(ew.CONFIGS))
def test_every_row_of_a_crowd_answers_as_peft_does(kind: str) -> None:
    oracle_check(kind, "cpu", 1e-4)


class Products(TorchDispatchMode):
    """Counts matrix products, plain and batched."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in ("matmul", "embedding_bag"):
            self.counts[name] += 1
        return function(*arguments, **(named or {}))


def test_decode_takes_two_batched_products_a_module_and_prefill_a_pair_for_each_segment() -> None:
    driven = ew.Driven(ew.base_build("llama"))
    model = ew.base_build("llama")
    for seed in range(5):
        options = {"target_modules": ["q_proj", "up_proj"]}
        driven.attach(seed, ew.adapter_from(ew.peft_build(model, seed, **options)))
    found = []
    for names in ([None] * 7, [*range(5), None, 0]):
        for name in names:
            driven.add(Job(ew.prompt_of(9), 3, name))
        for _ in ("prefill", "decode"):
            with Products() as products:
                driven.requests.step()
            found.append(products.counts)
        driven.finish()
    plain_prefill, plain_decode, prefill, decode = found
    modules, segments = 4, 6
    assert prefill - plain_prefill == {"matmul": 2 * modules * segments}
    # However many adapters run.
    assert decode - plain_decode == {"embedding_bag": 2 * modules}


def test_a_step_without_an_adapter_on_a_module_adds_nothing_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driven = ew.Driven(ew.base_build("llama"))
    model = ew.base_build("llama")
    for name, target in (("a", "q_proj"), ("b", "up_proj")):
        adapter = ew.adapter_from(ew.peft_build(model, 1, target_modules=[target]))
        driven.attach(name, adapter)
    touched: list[int] = []
    add = linear.StackedLinear.add

    def counted(module: linear.StackedLinear, *rest: Any) -> None:
        touched.append(module.base.weight.shape[0])
        add(module, *rest)

    monkeypatch.setattr(linear.StackedLinear, "add", counted)
    driven.answer(Job(ew.prompt_of(9), 3))
    assert touched == []
    driven.answer(Job(ew.prompt_of(9), 2, "b"))
    # up_proj, in two layers and two steps.
    assert touched == [96] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_warm_prefix_changes_no_bit(dtype: torch.dtype) -> None:
    assert prefix_check(dtype, "cpu") == 0.0


def test_nan_reaches_nobody() -> None:
    assert poison_check("cpu") == 0.0


def test_an_adapter_that_went_left_nothing() -> None:
    unload_check("cpu", _resident)


def _resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
