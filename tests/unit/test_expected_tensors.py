"""Selection, names, shapes, scaling; and what matches nothing. PEFT's word: the contract test."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import sample_adapter as sample

from registry_service.domain import limits
from registry_service.domain.catalog import Kind, Module
from registry_service.domain.expected_tensors import ExpectedTensors, expected_tensors
from registry_service.domain.expressions import expressions_of, matches_of
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
    ids=lambda value: str(sorted(value)),
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


def test_a_base_copy_stands_apart_from_what_the_file_must_hold() -> None:
    catalog = sample.catalog(
        input_embedding="model.embed_tokens",
        output_embedding=None,
        modules=(sample.module("model.embed_tokens", Kind.EMBEDDING, 32, 16),),
    )
    options = config(target_modules=["embed_tokens"])
    named = expected_tensors(catalog, options, full_tensors=True)
    assert set(shapes(named)) == {
        "model.embed_tokens.lora_embedding_A",
        "model.embed_tokens.lora_embedding_B",
    }
    copy = "base_model.model.model.embed_tokens.base_layer.weight"
    assert {name: item.shape for name, item in named.copies.items()} == {copy: (32, 16)}
    assert named.full_tensors
    assert not expected_tensors(catalog, options).full_tensors
    # PEFT looks for the bare name only.
    whole = config(target_modules=["model.embed_tokens"])
    assert expected_tensors(catalog, whole, full_tensors=True).copies == {}
    rows = config(target_modules=["embed_tokens"], trainable_token_indices=[1])
    assert sample.codes(expected_tensors(catalog, rows).findings) == {"TARGET_KIND"}


EXPERTS = sample.catalog(
    model_type="gpt_oss",
    input_embedding=None,
    output_embedding=None,
    modules=(
        sample.other("mlp.experts", gate_up_proj=(4, 32, 16), down_proj=(4, 16, 24)),
        sample.module("shared.up_proj", Kind.LINEAR, 16, 16),
    ),
)
PARAMETERS = {"target_parameters": ["down_proj", "gate_up_proj"], "peft_version": "0.21.2"}


def test_experts_lie_beside_each_other_along_the_rank_and_nest() -> None:
    result = expected_tensors(EXPERTS, config(target_modules=[], **PARAMETERS))
    assert shapes(result) == {
        "mlp.experts.base_layer.lora_A.weight": (16, 16),
        "mlp.experts.base_layer.lora_B.weight": (32, 16),
        "mlp.experts.lora_A.weight": (16, 24),
        "mlp.experts.lora_B.weight": (16, 16),
    }
    assert set(result.scaling) == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    swapped = EXPERTS.modules[0].model_copy(update={"transposed": True})
    catalog = EXPERTS.model_copy(update={"modules": (swapped,)})
    assert shapes(expected_tensors(catalog, config(target_modules=[], **PARAMETERS))) == {
        "mlp.experts.base_layer.lora_A.weight": (16, 32),
        "mlp.experts.base_layer.lora_B.weight": (16, 16),
        "mlp.experts.lora_A.weight": (16, 16),
        "mlp.experts.lora_B.weight": (24, 16),
    }


@pytest.mark.parametrize("targets", ["all-linear", ["up_proj"], ["mlp.gate"]])
def test_targets_that_peft_rewrites_to_fused_experts_are_refused(targets: Any) -> None:
    catalog = EXPERTS.model_copy(update={"model_type": "qwen3_moe"})
    result = expected_tensors(catalog, config(target_modules=targets))
    assert "TARGET_KIND" in sample.codes(result.findings)
    assert "target_parameters" in result.findings[0].expected
    assert expected_tensors(EXPERTS, config(target_modules=["up_proj"])).findings == ()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"target_parameters": ["none"]}, "TARGET_UNKNOWN"),
        ({"target_parameters": ["norm.weight"]}, "TARGET_KIND"),
        ({"target_parameters": ["q_proj.weight"]}, "TARGET_KIND"),
        ({"lora_bias": True, "target_modules": ["wte"]}, "TARGET_KIND"),
        ({"trainable_token_indices": [32]}, "TARGET_KIND"),
        ({"trainable_token_indices": {"norm": [1]}}, "TARGET_KIND"),
        ({"trainable_token_indices": {"none": [1]}}, "TARGET_UNKNOWN"),
        ({"trainable_token_indices": {"wte": [1], "model.wte": [2]}}, "CONFIG_VALUE"),
        ({"trainable_token_indices": [1], "target_modules": ["wte"]}, "TARGET_KIND"),
        ({"trainable_token_indices": [1], "modules_to_save": ["wte"]}, "TARGET_KIND"),
        ({"modules_to_save": ["none"]}, "TARGET_UNKNOWN"),
        ({"modules_to_save": ["dropout"]}, "CONFIG_OPTION_UNSUPPORTED"),
        ({"modules_to_save": ["t"]}, "CONFIG_OPTION_UNSUPPORTED"),
        ({"modules_to_save": ["self_attn", "v_proj"]}, "TARGET_KIND"),
        ({"task_type": "SEQ_CLS"}, "TARGET_UNKNOWN"),
        ({"task_type": "TOKEN_CLS"}, "CONFIG_VALUE"),
        ({"layers_to_transform": [0], "layers_pattern": ["blocks"]}, "TARGET_UNKNOWN"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], code: str) -> None:
    fields = {"peft_version": "0.21.2", **changes}
    result = expected_tensors(sample.catalog(), config(**fields), full_tensors=True)
    assert code in sample.codes(result.findings)
    assert result.tensors == {}


def test_a_null_target_is_refused_with_the_list_to_write() -> None:
    catalog = sample.catalog().model_copy(update={"model_type": "llama"})
    (finding,) = expected_tensors(catalog, config(target_modules=None)).findings
    assert finding.code == "TARGETS_MISSING"
    assert "PEFT's default for llama is ['q_proj', 'v_proj']" in finding.expected


def test_whole_modules_need_the_tenants_policy() -> None:
    options = config(modules_to_save=["norm"])
    refused = expected_tensors(sample.catalog(), options)
    assert sample.codes(refused.findings) == {"FULL_TENSOR"}
    allowed = expected_tensors(sample.catalog(), options, full_tensors=True)
    whole = {name for name in shapes(allowed) if "lora" not in name}
    assert whole == {"model.layers.0.norm.weight", "model.layers.1.norm.weight"}


def test_an_entry_without_a_dot_saves_what_ends_with_it() -> None:
    catalog = sample.catalog(
        input_embedding=None,
        output_embedding=None,
        modules=(
            sample.module("query", Kind.LINEAR, 16, 16),
            sample.module("pre_classifier", Kind.LINEAR, 16, 16),
            sample.module("classifier", Kind.LINEAR, 16, 3),
        ),
    )
    options = config(target_modules=["query"], task_type="SEQ_CLS")
    names = set(shapes(expected_tensors(catalog, options, full_tensors=True)))
    assert {"pre_classifier.weight", "classifier.weight"} <= names
    everything = config(target_modules="all-linear", task_type="SEQ_CLS")
    assert sample.codes(expected_tensors(catalog, everything, full_tensors=True).findings) == {
        "TARGET_KIND"
    }


def test_rows_of_an_embedding() -> None:
    result = expected(trainable_token_indices=[3, 1, 7])
    name = "model.wte.token_adapter.trainable_tokens_delta"
    assert shapes(result)[name] == (3, 16)
    tied = sample.catalog().model_copy(update={"tied_modules": ("lm_head",)})
    options = config(trainable_token_indices={"lm_head": [1]})
    (finding,) = expected_tensors(tied, options).findings
    assert "the input embedding model.wte" in finding.expected


def test_a_bias_of_the_update() -> None:
    assert shapes(expected(lora_bias=True))[f"{V0}.lora_B.bias"] == (8,)


def test_a_convolution() -> None:
    conv = Module(
        name="patch",
        kind=Kind.CONV2D,
        class_name="Conv2d",
        in_size=6,
        out_size=10,
        kernel=(3, 5),
        groups=2,
        tensors={"weight": (10, 3, 3, 5)},
    )
    catalog = sample.catalog(input_embedding=None, output_embedding=None, modules=(conv,))
    assert shapes(expected_tensors(catalog, config(target_modules=["patch"]))) == {
        "patch.lora_A.weight": (4, 6, 3, 5),
        "patch.lora_B.weight": (10, 2, 1, 1),
    }
    for changes in ({"r": 3}, {"use_dora": True}):
        result = expected_tensors(catalog, config(target_modules=["patch"], **changes))
        assert sample.codes(result.findings) == {"TARGET_KIND"}
    plain = conv.model_copy(update={"groups": 1, "tensors": {"weight": (10, 6, 3, 5)}})
    catalog = catalog.model_copy(update={"modules": (plain,)})
    options = config(target_modules=["patch"], use_dora=True)
    assert shapes(expected_tensors(catalog, options))["patch.lora_magnitude_vector"] == (
        *(1, 10, 1, 1),
    )


def test_the_answers_of_expressions_are_taken_as_they_are() -> None:
    options = config(
        target_modules=".*(q|v)_proj",
        exclude_modules=".*1.*",
        rank_pattern={"q.*": 2, "(v)_proj": 1},
    )
    assert expressions_of(options) == (
        *(".*(q|v)_proj", ".*1.*", "q.*", r"(.*\.)?(q.*)", "(v)_proj", r"(.*\.)?((v)_proj)"),
    )
    answers = matches_of(
        sample.catalog(), options, lambda texts, names: dict.fromkeys(texts, frozenset())
    )
    assert set(answers) == set(expressions_of(options))
    answers = {
        **dict.fromkeys(expressions_of(options), frozenset[str]()),
        ".*(q|v)_proj": frozenset({Q0, Q1, V0, V1}),
        ".*1.*": frozenset({Q1, V1}),
        r"(.*\.)?(q.*)": frozenset({Q0}),
        r"(.*\.)?((v)_proj)": frozenset({V0}),
    }
    result = expected_tensors(sample.catalog(), options, answers)
    ranks = {item.module: item.rank for item in result.tensors.values()}
    assert ranks == {Q0: 2, V0: 1}
    nothing = expected_tensors(
        sample.catalog(), options, dict.fromkeys(expressions_of(options), frozenset[str]())
    )
    assert sample.codes(nothing.findings) == {"TARGET_UNKNOWN", "PATTERN_UNUSED"}


def test_too_many_patterns_for_too_many_modules_are_refused() -> None:
    modules = tuple(sample.module(f"l{n}.q", Kind.LINEAR, 1, 1) for n in range(3000))
    catalog = sample.catalog(input_embedding=None, output_embedding=None, modules=modules)
    keys = {f"l{n}.q": 2 for n in range(1000)}
    assert limits.PATTERN_MATCHES < 1000 * 3000
    result = expected_tensors(catalog, config(target_modules=["q"], rank_pattern=keys))
    assert sample.codes(result.findings) == {"CONFIG_VALUE"}
