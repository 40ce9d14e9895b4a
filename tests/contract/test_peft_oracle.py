"""Expected tensors against PEFT itself, on meta models: names, shapes and scaling must be equal."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import peft
import pytest
import torch
import transformers

from gpu_worker.validation.catalog_builder import catalog_build
from registry_service.domain.catalog import Catalog, Kind, catalog_parse
from registry_service.domain.digests import Digest
from registry_service.domain.errors import MalformedError, RefusedError
from registry_service.domain.expected_tensors import expected_tensors
from registry_service.domain.findings import Code
from registry_service.domain.peft_config import peft_config_parse

pytestmark = pytest.mark.torch

BASE = Digest("sha256:" + "b" * 64)
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    },
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "vocab_size": 64,
    },
}
ATTENTION = ["q_proj", "v_proj"]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": ATTENTION}),
    ("llama", {"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.down_proj"]}),
    ("llama", {"target_modules": "all-linear"}),
    ("llama", {"target_modules": "all-linear", "use_dora": True}),
    ("llama", {"target_modules": "all-linear", "exclude_modules": ["gate_proj", "0.mlp.up_proj"]}),
    ("llama", {"target_modules": ATTENTION, "use_rslora": True, "lora_alpha": 5}),
    ("llama", {"target_modules": ATTENTION, "layers_to_transform": 1}),
    ("llama", {"target_modules": ATTENTION, "layers_to_transform": [0, 2], "use_dora": True}),
    (
        "llama",
        {"target_modules": ["model.layers.0.self_attn.q_proj", "v_proj"], "layers_to_transform": 2},
    ),
    ("llama", {"target_modules": ATTENTION, "rank_pattern": {"q_proj": 3}}),
    (
        "llama",
        {
            "target_modules": ATTENTION,
            "rank_pattern": {"layers.0.self_attn.q_proj": 2, "q_proj": 5},
            "alpha_pattern": {"v_proj": 40, "model.layers.1.self_attn.q_proj": 3},
        },
    ),
    (
        "llama",
        {
            "target_modules": ATTENTION,
            "rank_pattern": {"q_proj": 5, r"layers\.0\.self_attn\.q_proj": 2},
            "use_rslora": True,
        },
    ),
    ("gpt2", {"target_modules": ["c_attn"]}),
    ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "use_dora": True}),
    ("gpt2", {"target_modules": "all-linear", "layers_to_transform": None}),
    ("gpt2", {"target_modules": ["wte"]}),
    ("gpt2", {"target_modules": ["wte", "wpe", "c_attn"], "rank_pattern": {"wte": 2}}),
    ("gpt2", {"target_modules": ["wte"], "use_dora": True}),
    ("gpt2", {"target_modules": ["attn.c_proj"], "fan_in_fan_out": True}),
    ("gpt_neox", {"target_modules": ["query_key_value", "dense_4h_to_h"]}),
    ("gpt_neox", {"target_modules": "all-linear"}),
    ("gpt_neox", {"target_modules": ["embed_in"]}),
    ("mixtral", {"target_modules": ["q_proj", "o_proj"]}),
]


@pytest.fixture(scope="module")
def catalogs() -> dict[str, Catalog]:
    return {name: catalog_build(config, BASE) for name, config in CONFIGS.items()}


def _model(name: str) -> Any:
    fields = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(CONFIGS[name]["model_type"], **fields)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def _saved(config: Any) -> bytes:
    """The bytes that PEFT itself writes for a config."""
    fields = config.to_dict()
    for key, value in fields.items():
        if isinstance(value, set):
            fields[key] = sorted(value)
    return json.dumps(fields, indent=2, sort_keys=True, default=str).encode()


@pytest.mark.parametrize(("base", "options"), CASES, ids=lambda value: str(value)[:80])
def test_names_shapes_and_scaling_equal_pefts(
    catalogs: dict[str, Catalog], base: str, options: dict[str, Any]
) -> None:
    fields = {"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM", **options}
    content = _saved(peft.LoraConfig(**fields))
    config, findings = peft_config_parse(content)
    assert config is not None, findings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(
            _model(base), peft.LoraConfig(**json.loads(content)), low_cpu_mem_usage=True
        )
        state = peft.get_peft_model_state_dict(model)
    ours = expected_tensors(catalogs[base], config)
    assert ours.findings == ()
    assert {n: e.shape for n, e in ours.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    scaling = {
        name.removeprefix("base_model.model."): module.scaling["default"]
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert ours.scaling == pytest.approx(scaling)


def test_what_peft_saves_after_all_linear_is_read_the_same(
    catalogs: dict[str, Catalog],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(_model("llama"), config, low_cpu_mem_usage=True)
    shown, findings = peft_config_parse(_saved(model.peft_config["default"]))
    named, _ = peft_config_parse(_saved(peft.LoraConfig(r=4, target_modules="all-linear")))
    assert shown is not None, findings
    assert named is not None
    assert shown.target_modules != "all-linear"
    catalog = catalogs["llama"]
    assert expected_tensors(catalog, shown) == expected_tensors(catalog, named)


@pytest.mark.parametrize("targets", ["all-linear", ["gate"], ["q_proj", "w1"]])
def test_targets_that_peft_rewrites_to_fused_experts_are_refused(
    catalogs: dict[str, Catalog], targets: Any
) -> None:
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": targets}
    config, _ = peft_config_parse(json.dumps(fields).encode())
    assert config is not None
    codes = {finding.code for finding in expected_tensors(catalogs["mixtral"], config).findings}
    assert Code.TARGET_KIND in codes


def test_every_lora_field_of_this_peft_has_a_class() -> None:
    saved = {**peft.LoraConfig(target_modules=["q_proj"]).to_dict(), "target_modules": ["q_proj"]}
    assert peft_config_parse(json.dumps(saved, default=str).encode())[1] == ()


@pytest.mark.parametrize("base", CONFIGS)
def test_a_catalog_lists_the_models_tensors(catalogs: dict[str, Catalog], base: str) -> None:
    catalog = catalogs[base]
    listed = {
        f"{module.name}.{key}": shape
        for module in catalog.modules
        for key, shape in module.tensors.items()
    }
    state = {name: tuple(tensor.shape) for name, tensor in _model(base).state_dict().items()}
    assert listed == state


def test_a_catalog_knows_kinds_sizes_and_embeddings(catalogs: dict[str, Catalog]) -> None:
    llama = {module.name: module for module in catalogs["llama"].modules}
    key = llama["model.layers.0.self_attn.k_proj"]
    assert (key.kind, key.in_size, key.out_size) == (Kind.LINEAR, 32, 16)
    assert catalogs["llama"].tied
    assert catalogs["llama"].model_class == "LlamaForCausalLM"
    assert catalogs["llama"].input_embedding == "model.embed_tokens"
    assert catalogs["llama"].output_embedding == "lm_head"
    gpt2 = {module.name: module for module in catalogs["gpt2"].modules}
    fused = gpt2["transformer.h.0.attn.c_attn"]
    assert (fused.kind, fused.in_size, fused.out_size) == (Kind.CONV1D, 32, 96)
    table = gpt2["transformer.wte"]
    assert (table.kind, table.in_size, table.out_size) == (Kind.EMBEDDING, 64, 32)


@pytest.mark.parametrize("base", CONFIGS)
def test_a_catalog_is_the_same_every_time_and_survives_its_bytes(
    catalogs: dict[str, Catalog], base: str
) -> None:
    again = catalog_build(CONFIGS[base], BASE)
    assert again.to_bytes() == catalogs[base].to_bytes()
    assert catalog_parse(again.to_bytes()) == again


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}}, RefusedError),
        ({"text_config": {"auto_map": {}}}, RefusedError),
        ({"model_type": "no-such-model"}, RefusedError),
        ({"model_type": "clip"}, RefusedError),
        ({"architectures": ["LlamaForSequenceClassification"]}, RefusedError),
        ({"hidden_size": "wide"}, MalformedError),
    ],
)
def test_a_base_that_is_not_plain_is_refused(change: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        catalog_build({**CONFIGS["llama"], **change}, BASE)


@pytest.mark.parametrize("name", ["adapter_config.json", "modeling_evil.py"])
def test_a_base_directory_with_code_or_an_adapter_is_refused(tmp_path: Any, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    assert catalog_build(tmp_path, BASE).model_type == "llama"
    (tmp_path / name).write_text("{}")
    with pytest.raises(RefusedError, match=name):
        catalog_build(tmp_path, BASE)


def test_an_unreadable_base_is_malformed(tmp_path: Any) -> None:
    with pytest.raises(MalformedError):
        catalog_build(tmp_path / "none", BASE)
