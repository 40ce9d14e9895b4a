"""The checks on CUDA. Needs torch, transformers, peft, safetensors and pytest, nothing else."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.validation.loading import device_choose
from gpu_worker.validation.versions import versions
from tests.gpu.check_cases import ChecksOnDevice

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


class TestChecksOnCuda(ChecksOnDevice):
    device = "cuda"


def test_the_device_is_found_and_named() -> None:
    assert device_choose("auto") == "cuda"
    assert versions("cuda")["cuda"] != "none"
