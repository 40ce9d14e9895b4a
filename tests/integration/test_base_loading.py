"""Loading bases of every architecture from the bytes that were proven, or saying why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.base_files import base_prove
from gpu_worker.model_class import model_class_of
from gpu_worker.serving import base_load as serving
from gpu_worker.validation.loading import BaseLoadError, base_load
from registry_service.domain.errors import RefusedError
from tests.architectures import ARCHITECTURES
from tests.integration import serving_world

pytestmark = pytest.mark.torch


def base_make(folder: Path, config: dict[str, Any]) -> Any:
    """A base with random weights, as transformers saves it."""
    config_class, model_class = model_class_of(config)
    torch.manual_seed(7)
    model = model_class(config_class.from_dict(config))
    model.save_pretrained(folder)
    return model


def files_of(folder: Path) -> dict[str, str]:
    return {entry.path: entry.digest for entry in base_prove(folder).files}


def config_change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_base_is_loaded_with_the_class_it_names(tmp_path: Path, name: str) -> None:
    saved = base_make(tmp_path, ARCHITECTURES[name])
    loaded = base_load(tmp_path, files_of(tmp_path), "cpu")
    assert type(loaded.model) is type(saved)
    assert loaded.quantization == "none"
    expected = saved.state_dict()
    got = loaded.model.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_a_quantized_base_that_cannot_be_loaded_is_a_fault_in_plain_words(tmp_path: Path) -> None:
    base_make(tmp_path, ARCHITECTURES["llama"])
    config_change(
        tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}
    )
    with pytest.raises(BaseLoadError, match="stored as gptq, which cannot be loaded here"):
        base_load(tmp_path, files_of(tmp_path), "cpu")
    served = serving_world.base_make(tmp_path / "served")
    config_change(served, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(RefusedError, match="stored as gptq, which cannot be loaded here"):
        serving.base_load(base_prove(served), "cpu")


def test_weights_of_another_class_are_no_base(tmp_path: Path) -> None:
    base_make(tmp_path, ARCHITECTURES["llama"])
    config_change(tmp_path, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(BaseLoadError, match=r"missing_keys.*score\.weight"):
        base_load(tmp_path, files_of(tmp_path), "cpu")
    config_change(tmp_path, architectures=["LlamaModel"])
    with pytest.raises(BaseLoadError, match="LlamaForCausalLM"):
        base_load(tmp_path, files_of(tmp_path), "cpu")


@pytest.mark.parametrize("name", ["bert_classifier", "llama_classifier", "t5"])
def test_a_node_serves_causal_language_models_only(tmp_path: Path, name: str) -> None:
    model = base_make(tmp_path, ARCHITECTURES[name])
    with pytest.raises(RefusedError, match=f"{type(model).__name__}: expected a causal"):
        serving.base_load(base_prove(tmp_path), "cpu")
