"""Expected tensors against PEFT itself, on meta models: names, shapes and scaling must be equal.

Each case shows one option or one combination; ``test_peft_random.py`` draws the others.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import peft
import pytest
from architectures import ARCHITECTURES, meta_model
from peft.utils import transformers_weight_conversion as conversion
from peft_oracle import config_bytes, equal, ours, pefts

from gpu_worker.validation.catalog_builder import catalog_build
from registry_service.domain.catalog import Catalog
from registry_service.domain.digests import Digest
from registry_service.domain.peft_config import peft_config_parse
from registry_service.domain.peft_fields import OTHER_PEFT_TYPES
from registry_service.domain.rewrites import REWRITTEN_TARGETS, REWRITTEN_TYPES

pytestmark = pytest.mark.torch

BASE = Digest("sha256:" + "b" * 64)
ATTENTION = ["q_proj", "v_proj"]
LAYER = "model.language_model.layers"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": ATTENTION}),
    ("llama", {"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.down_proj"]}),
    ("llama", {"target_modules": "all-linear"}),
    ("llama", {"target_modules": "all-linear", "use_dora": True}),
    ("llama", {"target_modules": "all-linear", "exclude_modules": ["gate_proj", "0.mlp.up_proj"]}),
    ("llama", {"target_modules": ATTENTION, "use_rslora": True, "lora_alpha": 5}),
    ("llama", {"target_modules": ATTENTION, "layers_to_transform": 1}),
    ("llama", {"target_modules": ATTENTION, "layers_to_transform": [0, 2], "use_dora": True}),
    ("llama", {"target_modules": ATTENTION, "layers_to_transform": 1, "layers_pattern": "layers"}),
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
    (
        "llama",
        {
            "target_modules": r".*\.(q|v)_proj",
            "exclude_modules": r"model\.layers\.1\..*",
            "rank_pattern": {r"^model\.layers\.0.*": 2},
            "alpha_pattern": {r".*v_proj": 1},
        },
    ),
    ("llama", {"target_modules": r"^(model(?=\.).*\.(k_proj|up_proj))$"}),
    ("llama", {"target_modules": ATTENTION, "lora_bias": True}),
    ("llama", {"target_modules": [*ATTENTION, "embed_tokens"]}),
    ("llama", {"target_modules": [*ATTENTION, "lm_head"], "use_dora": True}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    ("llama", {"target_modules": ["model.embed_tokens", "q_proj"]}),
    ("llama", {"target_modules": r".*(embed_tokens|q_proj)"}),
    ("llama", {"target_modules": ATTENTION, "trainable_token_indices": [1, 5, 3]}),
    ("llama_tied", {"target_modules": ATTENTION, "trainable_token_indices": [0]}),
    (
        "llama",
        {
            "target_modules": ["embed_tokens", "q_proj"],
            "trainable_token_indices": {"lm_head": [1, 2]},
        },
    ),
    ("llama", {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "norm"]}),
    ("llama_tied", {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"]}),
    ("llama", {"target_modules": ATTENTION, "target_parameters": ["o_proj.weight"]}),
    ("gpt2", {"target_modules": ["c_attn"]}),
    ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "use_dora": True}),
    ("gpt2", {"target_modules": ["c_attn", "c_fc"], "lora_bias": True}),
    ("gpt2", {"target_modules": "all-linear", "layers_to_transform": None}),
    ("gpt2", {"target_modules": ["wte"]}),
    ("gpt2", {"target_modules": ["wte", "wpe", "c_attn"], "rank_pattern": {"wte": 2}}),
    ("gpt2", {"target_modules": ["wte"], "use_dora": True}),
    ("gpt2", {"target_modules": ["attn.c_proj"], "fan_in_fan_out": True}),
    ("gpt_neox", {"target_modules": ["query_key_value", "dense_4h_to_h"]}),
    ("gpt_neox", {"target_modules": "all-linear"}),
    ("gpt_neox", {"target_modules": ["embed_in"]}),
    ("falcon", {"target_modules": ["query_key_value"]}),
    ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    ("mixtral", {"target_modules": ["q_proj", "o_proj"]}),
    ("mixtral", {"target_modules": [], "target_parameters": ["gate_up_proj", "down_proj"]}),
    (
        "mixtral",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["gate.weight", "gate_up_proj", "down_proj"],
            "rank_pattern": {r".*\.gate_up_proj": 8},
            "alpha_pattern": {r".*\.gate_up_proj": 32},
        },
    ),
    ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}),
    ("mixtral", {"target_modules": r".*\.self_attn\.(q|k)_proj"}),
    ("deepseek_v3", {"target_modules": r".*\.(q_b|kv_b)_proj"}),
    ("deepseek_v3", {"target_modules": ["q_a_proj", "kv_b_proj"], "use_dora": True}),
    ("gemma3", {"target_modules": [f"{LAYER}.0.self_attn.q_proj", "fc1"]}),
    ("gemma3", {"target_modules": ["patch_embedding"], "use_dora": True}),
    ("gemma3", {"target_modules": "all-linear", "exclude_modules": ["head.attention.out_proj"]}),
    ("gemma3", {"target_modules": ["patch_embedding", "fc2"], "lora_bias": True}),
    ("t5", {"target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM"}),
    ("t5", {"target_modules": ["shared", "wo"], "task_type": "SEQ_2_SEQ_LM"}),
    ("bert_classifier", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
    ("bert_classifier", {"target_modules": "all-linear", "task_type": "SEQ_CLS"}),
    ("distilbert_classifier", {"target_modules": ["q_lin", "v_lin"], "task_type": "SEQ_CLS"}),
    ("llama_classifier", {"target_modules": "all-linear", "task_type": "SEQ_CLS"}),
]


@pytest.fixture(scope="module")
def catalogs() -> dict[str, Catalog]:
    return {name: catalog_build(config, BASE) for name, config in ARCHITECTURES.items()}


@pytest.mark.parametrize(("base", "options"), CASES, ids=lambda value: str(value)[:80])
def test_names_shapes_and_scaling_equal_pefts(
    catalogs: dict[str, Catalog], base: str, options: dict[str, Any]
) -> None:
    content = config_bytes({"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM", **options})
    expected, findings = ours(catalogs[base], content)
    assert expected is not None, findings
    saved = pefts(meta_model(ARCHITECTURES[base]), content)
    every = {**expected.tensors, **expected.copies}
    assert {name: item.shape for name, item in every.items()} == saved.shapes
    assert equal(expected, saved), saved.scaling


@pytest.mark.parametrize(
    ("base", "targets", "why"),
    [
        # PEFT puts an adapter on a projection whose weights alone its attention reads.
        ("gemma3", "all-linear", "attention reads the weights alone"),
        ("gemma3", ["out_proj"], "attention reads the weights alone"),
        ("mixtral", "all-linear", "PEFT rewrites this target"),
        ("qwen3_moe", r".*\.gate_proj", "PEFT rewrites this target"),
        ("qwen3_moe", r".*\.mlp\..*", "PEFT rewrites this target"),
        # PEFT would target every layer here, and the expression names one.
        ("mixtral", r"model\.layers\.1\.self_attn\.q_proj", "PEFT reads the expression as"),
    ],
)
def test_what_peft_would_do_otherwise_is_refused_with_the_reason(
    catalogs: dict[str, Catalog], base: str, targets: Any, why: str
) -> None:
    content = config_bytes({"r": 4, "target_modules": targets, "task_type": "CAUSAL_LM"})
    expected, findings = ours(catalogs[base], content)
    assert expected is None
    assert why in findings[0].expected


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_2_SEQ_LM"])
@pytest.mark.parametrize("base", ["bert_classifier", "llama_classifier"])
def test_a_task_that_peft_does_not_take_for_the_class_is_refused(
    catalogs: dict[str, Catalog], base: str, task: str
) -> None:
    content = config_bytes({"r": 4, "target_modules": "all-linear", "task_type": task})
    with pytest.raises(AttributeError):
        pefts(meta_model(ARCHITECTURES[base]), content)
    findings = ours(catalogs[base], content)[1]
    assert ("CONFIG_VALUE", "adapter_config.json: task_type") in {
        (finding.code, finding.where) for finding in findings
    }


def test_what_peft_saves_after_all_linear_is_read_the_same(catalogs: dict[str, Catalog]) -> None:
    content = config_bytes({"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(**json.loads(content))
        placed: Any = peft.get_peft_model(
            meta_model(ARCHITECTURES["llama"]), config, low_cpu_mem_usage=True
        )
    written = placed.peft_config["default"].to_dict()
    names = sorted(written["target_modules"])
    shown, _ = ours(catalogs["llama"], config_bytes({**written, "target_modules": names}))
    assert shown is not None
    assert shown == ours(catalogs["llama"], content)[0]


def test_what_peft_rewrites_for_fused_experts_is_what_the_table_says() -> None:
    known = conversion._MODEL_TO_CONVERSION_PATTERN
    converted = {
        name: family
        for name, family in known.items()
        if family in conversion._MOE_TARGET_MODULE_MAPPING
        and name.islower()
        and conversion.get_checkpoint_conversion_mapping(name) is not None
    }
    assert converted == REWRITTEN_TYPES
    mapping = conversion._MOE_TARGET_MODULE_MAPPING
    assert {name: frozenset(targets) for name, targets in mapping.items()} == REWRITTEN_TARGETS


def test_every_lora_field_of_this_peft_has_a_class() -> None:
    assert peft_config_parse(config_bytes({"target_modules": ["q_proj"]}))[1] == ()


def test_every_other_type_of_this_peft_is_known_by_name() -> None:
    assert {kind.value for kind in peft.PeftType} == {"LORA", *OTHER_PEFT_TYPES}
