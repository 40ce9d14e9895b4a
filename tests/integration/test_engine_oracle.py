"""The engine against PEFT, architecture by architecture; and the checks that run on CUDA too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with ew.one_thread():
        yield


@pytest.mark.parametrize("kind", sorted(ew.CONFIGS))
def test_every_row_of_a_crowd_answers_as_peft_does(kind: str) -> None:
    oracle_check(kind, "cpu", 1e-4)


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
