"""Selection, names, shapes, scaling; and what matches nothing. PEFT's word: the contract test."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import sample_adapter as sample

from registry_service.domain import limits
from registry_service.domain.catalog import Kind
from registry_service.domain.expected_tensors import ExpectedTensors, expected_tensors
from registry_service.domain.peft_config import LoraConfig, peft_config_parse

Q0 = "model.layers.0.self_attn.q_proj"
Q1 = "model.layers.1.self_attn.q_proj"
V0 = "model.layers.0.self_attn.v_proj"
V1 = "model.layers.1.self_attn.v_proj"
F0, F1 = "model.layers.0.mlp.c_fc", "model.layers.1.mlp.c_fc"


def config(**changes: Any) -> LoraConfig:
    result, findings = peft_config_parse(json.dumps(sample.config(**changes)).encode())
    assert result is not None, findings
    return result


def expected(**changes: Any) -> ExpectedTensors:
    return expected_tensors(sample.catalog(), config(**changes))


def shapes(result: ExpectedTensors) -> dict[str, tuple[int, ...]]:
    assert result.findings == ()
    return {
        name.removeprefix("base_model.model."): item.shape for name, item in result.tensors.items()
    }


def test_linear_conv1d_and_embedding_with_dora() -> None:
    targets = [Q0, F0, "wte"]
    assert shapes(expected(target_modules=targets, use_dora=True)) == {
        f"{Q0}.lora_A.weight": (4, 16),
        f"{Q0}.lora_B.weight": (16, 4),
        f"{Q0}.lora_magnitude_vector": (16,),
        f"{F0}.lora_A.weight": (4, 16),
        f"{F0}.lora_B.weight": (48, 4),
        f"{F0}.lora_magnitude_vector": (48,),
        "model.wte.lora_embedding_A": (4, 32),
        "model.wte.lora_embedding_B": (16, 4),
        "model.wte.lora_magnitude_vector": (16,),
    }


@pytest.mark.parametrize(
    ("changes", "selected"),
    [
        ({}, {Q0, Q1, V0, V1}),
        ({"target_modules": "all-linear"}, {Q0, Q1, V0, V1, F0, F1}),
        ({"target_modules": "all-linear", "exclude_modules": ["c_fc"]}, {Q0, Q1, V0, V1}),
        ({"exclude_modules": ["0.self_attn.q_proj"]}, {Q1, V0, V1}),
        ({"layers_to_transform": 1}, {Q1, V1}),
        ({"target_modules": [Q0, "v_proj"], "layers_to_transform": [1]}, {Q0, V1}),
        ({"target_modules": ["self_attn.q_proj"]}, {Q0, Q1}),
    ],
    ids=str,
)
def test_the_selection(changes: dict[str, Any], selected: set[str]) -> None:
    assert set(expected(**changes).scaling) == selected


def test_ranks_alphas_and_scaling_follow_the_first_matching_pattern() -> None:
    result = expected(
        rank_pattern={r"layers\.0\.self_attn\.q_proj": 2, "q_proj": 8},
        alpha_pattern={"v_proj": 3.0},
    )
    ranks = {item.module: item.rank for item in result.tensors.values()}
    assert ranks == {Q0: 2, Q1: 8, V0: 4, V1: 4}
    assert result.scaling == {Q0: 4.0, Q1: 1.0, V0: 0.75, V1: 0.75}
    swapped = expected(rank_pattern={"q_proj": 8, "layers.0.self_attn.q_proj": 2})
    assert {item.rank for item in swapped.tensors.values() if item.module == Q0} == {8}
    stable = expected(use_rslora=True)
    assert stable.scaling[Q0] == pytest.approx(8 / math.sqrt(4))


@pytest.mark.parametrize(
    ("changes", "code", "got"),
    [
        ({"target_modules": ["q_proj", "k_proj"]}, "TARGET_UNKNOWN", "k_proj"),
        ({"target_modules": ["proj"]}, "TARGET_UNKNOWN", "proj"),
        ({"exclude_modules": ["k_proj"]}, "TARGET_UNKNOWN", "k_proj"),
        ({"exclude_modules": ["v_proj"]}, "TARGET_UNKNOWN", "v_proj"),
        ({"layers_to_transform": [0, 7]}, "TARGET_UNKNOWN", "7"),
        ({"target_modules": ["self_attn"]}, "TARGET_KIND", "Block"),
        ({"target_modules": ["lm_head"]}, "TARGET_KIND", "Linear"),
        ({"rank_pattern": {"k_proj": 2}}, "PATTERN_UNUSED", "k_proj"),
        ({"alpha_pattern": {"c_fc": 2}}, "PATTERN_UNUSED", "c_fc"),
        ({"rank_pattern": {"q.proj": 2}}, "CONFIG_OPTION_UNSUPPORTED", "q.proj"),
    ],
    ids=str,
)
def test_what_peft_does_silently_is_a_finding(changes: dict[str, Any], code: str, got: str) -> None:
    result = expected(**changes)
    assert result.tensors == {}
    assert code in sample.codes(result.findings)
    assert got in {finding.got for finding in result.findings}


def test_embed_tokens_is_refused_by_name_until_its_copy_is_served() -> None:
    catalog = sample.catalog(
        input_embedding=None,
        output_embedding=None,
        modules=(sample.module("model.embed_tokens", Kind.EMBEDDING, 32, 16),),
    )
    result = expected_tensors(catalog, config(target_modules=["embed_tokens"]))
    assert [finding.code for finding in result.findings] == ["TARGET_KIND"]


@pytest.mark.parametrize("targets", ["all-linear", ["up_proj"]])
def test_fused_experts_are_refused(targets: Any) -> None:
    catalog = sample.catalog(
        input_embedding=None,
        output_embedding=None,
        modules=(
            sample.other("mlp.experts", gate_up_proj=(4, 32, 16), down_proj=(4, 16, 16)),
            sample.module("shared.up_proj", Kind.LINEAR, 16, 16),
        ),
    )
    result = expected_tensors(catalog, config(target_modules=targets))
    assert sample.codes(result.findings) == {"TARGET_KIND"}


def test_too_many_patterns_for_too_many_modules_are_refused() -> None:
    modules = tuple(sample.module(f"l{n}.q", Kind.LINEAR, 1, 1) for n in range(3000))
    catalog = sample.catalog(input_embedding=None, output_embedding=None, modules=modules)
    keys = {f"l{n}.q": 2 for n in range(1000)}
    assert limits.PATTERN_MATCHES < 1000 * 3000
    result = expected_tensors(catalog, config(target_modules=["q"], rank_pattern=keys))
    assert sample.codes(result.findings) == {"CONFIG_VALUE"}
