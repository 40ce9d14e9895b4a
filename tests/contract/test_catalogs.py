"""Catalogs of real architectures against transformers' own models and PEFT's own view of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft.utils.other import _get_module_names_tied_with_embedding
from torch import nn

from gpu_worker.model_class import model_class_of
from gpu_worker.validation import catalog_builder
from gpu_worker.validation.catalog_builder import aliases, catalog_build
from registry_service.domain.catalog import Catalog, Kind, Module, catalog_parse
from registry_service.domain.digests import Digest
from registry_service.domain.errors import MalformedError, RefusedError
from tests.architectures import ARCHITECTURES, meta_model

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
BASE = Digest("sha256:" + "b" * 64)
LLAMA = ARCHITECTURES["llama"]
LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "vocab_size": 64,
}
# In a process of its own: the catalogs of all configs in a file, by name, as text.
MAKE_ALL = """
import json, sys
from gpu_worker.validation.catalog_builder import catalog_build
configs = json.load(open(sys.argv[1]))
made = {name: catalog_build(c, sys.argv[2]).to_bytes().decode() for name, c in configs.items()}
print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def catalogs() -> dict[str, Catalog]:
    return {name: catalog_build(config, BASE) for name, config in ARCHITECTURES.items()}


def module_of(catalog: Catalog, name: str) -> Module:
    return next(module for module in catalog.modules if module.name == name)


def run(arguments: list[str], folder: Path, seed: str) -> bytes:
    """What a Python process writes that works in ``folder`` with a hash seed of its own."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE
    ).stdout


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_catalog_lists_every_tensor_of_the_model(catalogs: dict[str, Catalog], name: str) -> None:
    model = meta_model(ARCHITECTURES[name])
    catalog = catalogs[name]
    assert catalog.model_class == type(model).__name__
    listed = {
        f"{module.name}.{key}": shape
        for module in catalog.modules
        for key, shape in module.tensors.items()
    }
    assert listed == {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    parameters = {f"{module.name}.{key}" for module in catalog.modules for key in module.parameters}
    assert parameters == {key for key, _ in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_kinds_and_names_are_those_of_the_model(catalogs: dict[str, Catalog], name: str) -> None:
    model = meta_model(ARCHITECTURES[name])
    catalog = catalogs[name]
    known = {module.name: module for module in catalog.modules}
    assert list(known) == [key for key, _ in model.named_modules() if key]
    assert catalog.aliases == {}
    for key, module in model.named_modules():
        if type(module) is nn.Linear:
            expected = (Kind.LINEAR, module.in_features, module.out_features)
            assert (known[key].kind, known[key].in_size, known[key].out_size) == expected
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    named = (catalog.input_embedding, catalog.output_embedding)
    assert [None if key is None else model.get_submodule(key) for key in named] == [*embeddings]


@pytest.mark.parametrize("name", [*ARCHITECTURES, "t5_untied"])
def test_tied_modules_are_those_that_peft_finds(name: str) -> None:
    config = ARCHITECTURES[name.removesuffix("_untied")]
    if name.endswith("_untied"):
        config = {**config, "tie_word_embeddings": False}
    expected = _get_module_names_tied_with_embedding(meta_model(config))
    assert list(catalog_build(config, BASE).tied_modules) == expected


def test_two_workers_make_the_same_bytes(catalogs: dict[str, Catalog], tmp_path: Path) -> None:
    configs = tmp_path / "configs.json"
    configs.write_text(json.dumps(ARCHITECTURES))
    made = [
        json.loads(run(["-c", MAKE_ALL, str(configs), BASE], tmp_path / seed, seed))
        for seed in ("0", "4711")
    ]
    assert made[0] == made[1]
    assert {name: text.encode() for name, text in made[0].items()} == {
        name: catalog.to_bytes() for name, catalog in catalogs.items()
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_catalog_survives_its_bytes(catalogs: dict[str, Catalog], name: str) -> None:
    assert catalog_parse(catalogs[name].to_bytes()) == catalogs[name]


@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
def test_the_process_makes_the_same_of_a_folder_and_of_its_config(
    catalogs: dict[str, Catalog], tmp_path: Path, name: str
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(ARCHITECTURES[name], indent=1))
    for source in (base, base / "config.json"):
        arguments = ["-m", "gpu_worker.validation.catalog_process", str(source), BASE]
        assert run(arguments, tmp_path / "elsewhere", "1") == catalogs[name].to_bytes()


def test_the_kinds_that_are_not_plain_linears(catalogs: dict[str, Catalog]) -> None:
    fused = module_of(catalogs["gpt2"], "transformer.h.0.attn.c_attn")
    assert (fused.kind, fused.in_size, fused.out_size) == (Kind.CONV1D, 32, 96)
    table = module_of(catalogs["gpt2"], "transformer.wte")
    assert (table.kind, table.in_size, table.out_size) == (Kind.EMBEDDING, 64, 32)
    patches = next(m for m in catalogs["gemma3"].modules if m.kind is Kind.CONV2D)
    assert patches.name.endswith("patch_embedding")
    sizes = (patches.in_size, patches.out_size, patches.kernel, patches.groups)
    assert sizes == (3, 32, (8, 8), 1)
    # Its forward never calls this one: an adapter on it would do nothing.
    attention = next(m for m in catalogs["gemma3"].modules if m.class_name == "MultiheadAttention")
    inner = module_of(catalogs["gemma3"], f"{attention.name}.out_proj")
    assert (attention.kind, inner.kind) == (Kind.OTHER, Kind.INERT)


def test_a_grouped_convolution_says_its_groups() -> None:
    with torch.device("meta"):
        module = nn.Conv2d(8, 12, kernel_size=(3, 5), groups=4)
    made = catalog_builder._module("conv", module)
    assert (made.in_size, made.out_size, made.kernel, made.groups) == (8, 12, (3, 5), 4)
    assert made.tensors["weight"] == (12, 2, 3, 5)


def test_experts_say_in_which_order_they_are_stored(catalogs: dict[str, Catalog]) -> None:
    experts = module_of(catalogs["mixtral"], "model.layers.0.mlp.experts")
    assert (experts.kind, experts.transposed) == (Kind.OTHER, False)
    assert experts.tensors["gate_up_proj"] == (4, 96, 32)
    stored = module_of(catalog_build(GPT_OSS, BASE), "model.layers.0.mlp.experts")
    assert stored.transposed
    assert stored.tensors["gate_up_proj"] == (4, 32, 96)
    assert set(stored.parameters) == set(stored.tensors)


def test_buffers_are_told_from_parameters() -> None:
    with torch.device("meta"):
        module = nn.BatchNorm1d(4)
    made = catalog_builder._module("norm", module)
    assert set(made.tensors) - set(made.parameters) == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }


def test_a_second_name_of_a_module_leads_to_its_first() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(2, 2, device="meta"))
            self.second = self.first
            self.third = self.first[0]

    assert aliases(Twice()) == {"second": "first", "second.0": "first.0", "third": "first.0"}


def test_a_model_of_real_size_is_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    meta = catalog_builder._meta_model

    def watched(raw: Mapping[str, Any]) -> Any:
        built.append(meta(raw))
        return built[-1]

    monkeypatch.setattr(catalog_builder, "_meta_model", watched)
    catalog = catalog_build(LLAMA_70B, BASE)
    assert sum(1 for module in catalog.modules if module.kind is Kind.LINEAR) == 80 * 7 + 1
    assert {parameter.device.type for parameter in built[0].parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in built[0].parameters()) > 70_000_000_000


@pytest.mark.parametrize(
    ("quantization", "word"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes-4bit"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "awq"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_quantized_base_has_the_catalog_of_the_unquantized_one(
    catalogs: dict[str, Catalog], quantization: dict[str, Any], word: str, name: str
) -> None:
    config = {**ARCHITECTURES[name], "quantization_config": quantization}
    if name == "gemma3":
        text = {**config["text_config"], "quantization_config": quantization}
        config["text_config"] = text
    made = catalog_build(config, BASE)
    assert made.quantization == word
    assert made.model_copy(update={"quantization": "none"}) == catalogs[name]


def test_a_catalog_says_which_transformers_made_it(
    catalogs: dict[str, Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert catalogs["llama"].transformers_version == transformers.__version__
    monkeypatch.setattr(catalog_builder, "transformers", SimpleNamespace(__version__="6.0.0"))
    other = catalog_build(LLAMA, BASE)
    assert other.base_digest == catalogs["llama"].base_digest
    assert other.digest != catalogs["llama"].digest


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_class_is_the_one_that_is_named(name: str) -> None:
    config = ARCHITECTURES[name]
    model = meta_model(config)
    assert model_class_of(config) == (type(model.config), type(model))
    named = {**config, "architectures": [type(model).__name__]}
    assert model_class_of(named) == (type(model.config), type(model))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "clip"}, "causal"),
        ({"model_type": "t5"}, "architectures"),
        ({"architectures": []}, "exactly one"),
        ({"architectures": ["LlamaForCausalLM", "LlamaModel"]}, "exactly one"),
        ({"architectures": "LlamaForCausalLM"}, "exactly one"),
        ({"architectures": ["LlamaModel"]}, "LlamaForCausalLM"),
        ({"architectures": ["MistralForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": [7]}, "7"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ({"text_config": {"auto_map": {}}}, "auto_map"),
        ({"quantization_config": {"bits": 4}}, "quant_method"),
    ],
)
def test_a_base_that_is_not_plain_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        catalog_build({**LLAMA, **change}, BASE)


def test_a_config_that_makes_no_model_is_malformed() -> None:
    with pytest.raises(MalformedError, match="LlamaForCausalLM"):
        catalog_build({**LLAMA, "hidden_size": "wide"}, BASE)


@pytest.mark.parametrize("name", ["adapter_config.json", "modeling_evil.py", "sub/modeling.py"])
def test_a_base_directory_with_code_or_an_adapter_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert catalog_build(tmp_path, BASE).model_type == "llama"
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(RefusedError, match=Path(name).name):
        catalog_build(tmp_path, BASE)


def test_a_base_directory_whose_config_asks_for_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "x": [{"auto_map": {}}]}))
    with pytest.raises(RefusedError, match="auto_map"):
        catalog_build(tmp_path, BASE)


def test_an_unreadable_base_is_malformed(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(MalformedError):
            catalog_build(missing, BASE)
