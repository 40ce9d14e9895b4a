"""Why this project exists: PEFT loads files that change what is not theirs, and says nothing.

Each case first with plain PEFT, then with the checks on the very same file. If PEFT comes to refuse
one of these, its first half fails: then say so here, and keep the check.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from cli.check import check_folder
from gpu_worker.validation.catalog_builder import catalog_build
from gpu_worker.validation.checking import adapter_check
from gpu_worker.validation.loading import base_load
from registry_service.domain.catalog import Catalog
from registry_service.domain.digests import Digest
from tests.integration.validation_inputs import (
    adapter_change,
    adapter_make,
    base_make,
    config_change,
    facts_of,
)

pytestmark = [
    pytest.mark.torch,
    # PEFT asks transformers by a name that it deprecates.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
TOKENS = torch.arange(8).unsqueeze(0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_make(tmp_path_factory.mktemp("why") / "base")


@pytest.fixture(scope="module")
def good(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = adapter_make(base, tmp_path_factory.mktemp("why") / "good", task_type="CAUSAL_LM")
    return config_change(folder, base_model_name_or_path=None)


def answers(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=TOKENS).logits.clone()
    return result


def static_codes(folder: Path, base: Path) -> set[str]:
    config = json.loads((base / "config.json").read_text())
    catalog: Catalog = catalog_build(config, Digest("sha256:" + "b" * 64))
    return {str(f["code"]) for f in check_folder(folder, catalog)["findings"]}


def dynamic_codes(folder: Path, base: Path) -> set[str]:
    files = {fact.path: fact.digest for fact in facts_of(base)}
    kept = {p: d for p, d in files.items() if p == "config.json" or p.endswith(".safetensors")}
    facts = [{"path": f.path, "digest": f.digest, "size": f.size} for f in facts_of(folder)]
    result = adapter_check(base_load(base, kept, "cpu"), {"dir": str(folder), "files": facts})
    return {str(f["code"]) for f in result["findings"] if f["severity"] == "refuse"}


def test_peft_lets_a_file_overwrite_the_base(base: Path, good: Path, tmp_path: Path) -> None:
    key = "base_model.model.model.layers.0.self_attn.o_proj.weight"
    folder = adapter_change(good, tmp_path / "bad", lambda t: t.update({key: torch.zeros(64, 64)}))

    model = AutoModelForCausalLM.from_pretrained(base)
    before = answers(model)
    peft_model = PeftModel.from_pretrained(model, good)
    result = peft_model.load_adapter(folder, "bad")  # a warning would be an error in this suite
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    with peft_model.disable_adapter():
        assert not torch.equal(answers(peft_model), before)  # changed for everyone, and for good

    assert "BASE_TENSOR" in static_codes(folder, base)
    assert dynamic_codes(folder, base) == {"BASE_CHANGED"}


def test_peft_lets_a_file_overwrite_another_adapter(base: Path, good: Path, tmp_path: Path) -> None:
    def named(adapter: str, folder: Path) -> Path:
        """A file that brings tensors of an adapter by its own name."""
        key = f"{Q0}.lora_A.{adapter}.weight"
        rank = 2 if adapter == "resident" else 4
        return adapter_change(good, folder, lambda t: t.update({key: torch.zeros(rank, 64)}))

    folder = named("first", tmp_path / "bad")
    model = AutoModelForCausalLM.from_pretrained(base)
    peft_model = PeftModel.from_pretrained(model, good, adapter_name="first")
    before = answers(peft_model)
    result = peft_model.load_adapter(folder, "second")
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    peft_model.set_adapter("first")
    assert not torch.equal(answers(peft_model), before)  # another adapter answers otherwise now

    assert static_codes(folder, base) & {"KEY_OTHER_ADAPTER", "ADAPTER_NAME_IN_KEY"}
    # The name of a neighbour has to be known to hit it: here it is the check's own neighbour.
    folder = named("resident", tmp_path / "neighbour")
    assert dynamic_codes(folder, base) == {"OTHER_ADAPTER_CHANGED"}
