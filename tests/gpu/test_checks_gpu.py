"""The checks on CUDA. Needs torch, transformers, peft, safetensors and pytest, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.validation.checking import adapter_check
from gpu_worker.validation.loading import base_load, device_choose
from gpu_worker.validation.versions import versions
from tests.integration.validation_inputs import (
    WEIGHTS,
    Tensors,
    adapter_change,
    adapter_make,
    base_make,
    facts_of,
)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def check(base: Path, folder: Path) -> dict[str, Any]:
    """What a started child does: load the base on CUDA, run every check."""
    files = {fact.path: fact.digest for fact in facts_of(base)}
    kept = {p: d for p, d in files.items() if p == "config.json" or p.endswith(".safetensors")}
    loaded = base_load(base, kept, device_choose("auto"))
    assert next(loaded.model.parameters()).is_cuda
    facts = [{"path": f.path, "digest": f.digest, "size": f.size} for f in facts_of(folder)]
    return adapter_check(loaded, {"dir": str(folder), "files": facts})


def refusals(result: dict[str, Any]) -> set[str]:
    return {str(f["code"]) for f in result["findings"] if f["severity"] == "refuse"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_make(tmp_path_factory.mktemp("gpu") / "base")


@pytest.fixture(scope="module")
def good(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_make(base, tmp_path_factory.mktemp("gpu") / "good")


def test_good_adapter(base: Path, good: Path) -> None:
    result = check(base, good)
    assert refusals(result) == set(), result["findings"]
    measured = result["measurements"]["residentBytes"]
    assert measured["measured"] == measured["predicted"]
    assert versions("cuda")["cuda"] != "none"


def test_overwritten_base(base: Path, good: Path, tmp_path: Path) -> None:
    key = "base_model.model.model.layers.0.self_attn.o_proj.weight"
    folder = adapter_change(good, tmp_path / "bad", lambda t: t.update({key: torch.zeros(64, 64)}))
    assert "BASE_CHANGED" in refusals(check(base, folder))


def test_zero_adapter(base: Path, good: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if "lora_B" in name:
                tensor.zero_()

    folder = adapter_change(good, tmp_path / "zero", change)
    assert (folder / WEIGHTS).exists()
    assert refusals(check(base, folder)) == {"NO_EFFECT"}
