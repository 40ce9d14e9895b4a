"""The strict config reader: the table of fields, types and values."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sample_adapter as sample
from hypothesis import given, settings
from hypothesis import strategies as st

from registry_service.domain import limits
from registry_service.domain.peft_config import LoraConfig, peft_config_parse


def parse(**changes: Any) -> tuple[LoraConfig | None, set[str]]:
    config, findings = peft_config_parse(json.dumps(sample.config(**changes)).encode())
    return config, sample.codes(findings)


def test_a_plain_config_is_read() -> None:
    config, codes = parse(target_modules=["v_proj", "q_proj"], rank_pattern={"q": 2, "a": 3})
    assert codes == set()
    assert config == LoraConfig(
        r=4,
        lora_alpha=8.0,
        target_modules=("q_proj", "v_proj"),
        rank_pattern=(("q", 2), ("a", 3)),
        task_type=sample.config()["task_type"],
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "all-linear"},
        {"exclude_modules": ["lm_head"]},
        {"exclude_modules": None},
        {"layers_to_transform": 1},
        {"layers_to_transform": [0, 1]},
        {"layers_to_transform": []},
        {"use_dora": True, "use_rslora": True},
        {"lora_alpha": 0.5},
        {"alpha_pattern": {r"layers\.1\.q_proj": 3.5}},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"task_type": None},
        {"megatron_core": "megatron.core"},
        {"megatron_core": None},
        {"loftq_config": {}},
        {"runtime_config": {"ephemeral_gpu_offload": False}},
        {"base_model_name_or_path": "org/model", "revision": "main", "peft_version": "0.21.2"},
        {"lora_dropout": 0.1, "inference_mode": True, "fan_in_fan_out": True},
        {"target_modules": None},
        {"target_modules": ".*q_proj"},
        {"exclude_modules": ".*mlp.*"},
        {"rank_pattern": {"^q_proj": 4, "(q|v)_proj": 2}},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": None},
        {"task_type": "SEQ_CLS"},
        {"trainable_token_indices": [1, 0]},
        {"trainable_token_indices": {"wte": [1]}},
        {"layers_pattern": "layers", "layers_to_transform": [1]},
        {"layers_pattern": ["h", "layers"], "layers_to_transform": [1]},
        {"target_parameters": ["experts.down_proj"], "peft_version": "0.19.1"},
        {"target_modules": [], "target_parameters": ["down_proj"], "peft_version": "1.0"},
    ],
    ids=str,
)
def test_served_and_harmless_values_are_accepted(changes: dict[str, Any]) -> None:
    assert parse(**changes)[1] == set()


VALUE = [
    {"r": "8"},
    {"r": True},
    {"r": 8.0},
    {"r": 0},
    {"r": -1},
    {"r": limits.RANK + 1},
    {"r": None},
    {"lora_alpha": 0},
    {"lora_alpha": -8},
    {"lora_alpha": "16"},
    {"lora_alpha": True},
    {"lora_alpha": limits.ALPHA + 1},
    {"target_modules": []},
    {"target_modules": ""},
    {"target_modules": "q" * (limits.EXPRESSION_CHARS + 1)},
    {"target_modules": "q\u202ev"},
    {"target_modules": "ALL-LINEAR"},
    {"target_modules": ["q_proj", "q_proj"]},
    {"target_modules": ["q_proj", 1]},
    {"target_modules": ["q_.*"]},
    {"target_modules": [""]},
    {"target_modules": {"q_proj": 1}},
    {"exclude_modules": [None]},
    {"rank_pattern": {"q": 0}},
    {"rank_pattern": {"q": "4"}},
    {"rank_pattern": []},
    {"rank_pattern": None},
    {"alpha_pattern": None},
    {"alpha_pattern": {"q": -1}},
    {"use_dora": 1},
    {"use_rslora": "false"},
    {"use_dora": None},
    {"layers_to_transform": [-1]},
    {"layers_to_transform": [1, 1]},
    {"layers_to_transform": [True]},
    {"layers_to_transform": "1"},
    {"target_modules": "all-linear", "layers_to_transform": [0]},
    {"target_modules": ".*q_proj", "layers_to_transform": [0]},
    {"rank_pattern": {"": 4}},
    {"layers_pattern": "layers"},
    {"layers_pattern": [1], "layers_to_transform": [0]},
    {"lora_bias": 0},
    {"lora_bias": True, "use_dora": True},
    {"lora_bias": True, "init_lora_weights": "gaussian"},
    {"modules_to_save": "lm_head"},
    {"modules_to_save": ["lm_.*"]},
    {"trainable_token_indices": []},
    {"trainable_token_indices": {}},
    {"trainable_token_indices": [-1]},
    {"trainable_token_indices": [1, 1]},
    {"trainable_token_indices": [True]},
    {"trainable_token_indices": {"wte": 3}},
    {"target_parameters": "down_proj"},
    {"target_parameters": ["p"], "peft_version": "0.19.0", "use_dora": True},
    {"target_parameters": ["p"], "peft_version": "0.19.0", "lora_bias": True},
    {"target_parameters": ["p"], "peft_version": "0.19.0", "lora_dropout": 0.1},
    {"target_parameters": ["p"], "peft_version": "0.19.0", "fan_in_fan_out": True},
    {"lora_dropout": 1.0},
    {"inference_mode": 0},
    {"base_model_name_or_path": "a\u202eb"},
    {"peft_version": "1 2"},
]


@pytest.mark.parametrize("changes", VALUE, ids=str)
def test_wrong_values_are_refused_and_nothing_is_coerced(changes: dict[str, Any]) -> None:
    assert parse(**changes) == (None, {"CONFIG_VALUE"})


UNSUPPORTED = [
    {"bias": "all"},
    {"bias": "lora_only"},
    {"target_parameters": ["experts.gate_up_proj"]},
    {"target_parameters": ["experts.gate_up_proj"], "peft_version": "0.18.1"},
    {"target_parameters": ["experts.gate_up_proj"], "peft_version": "main"},
    {"layer_replication": [[0, 2]]},
    {"layers_pattern": "(layers|h)", "layers_to_transform": [0]},
    {"use_qalora": True},
    {"use_bdlora": {}},
    {"use_bdlora": False},
    {"alora_invocation_tokens": [1]},
    {"ensure_weight_tying": True},
    {"arrow_config": {}},
    {"kasa_config": {}},
    {"velora_config": {}},
    {"monteclora_config": {}},
    {"runtime_config": {"ephemeral_gpu_offload": True}},
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "olora"},
    {"init_lora_weights": "pissa_niter_4"},
    {"init_lora_weights": "orthogonal"},
    {"init_lora_weights": "mica"},
    {"init_lora_weights": 1},
    {"task_type": "SING"},
    {"target_modules": [f"m{n}" for n in range(20)], "layers_to_transform": [0]},
    {"target_modules": ["lm_head", *(f"m{n}" for n in range(20))]},
]


@pytest.mark.parametrize("changes", UNSUPPORTED, ids=str)
def test_options_that_are_not_built_are_refused_by_name(changes: dict[str, Any]) -> None:
    config, findings = peft_config_parse(json.dumps(sample.config(**changes)).encode())
    assert config is None
    assert sample.codes(findings) == {"CONFIG_OPTION_UNSUPPORTED"}
    assert any(name in findings[0].where for name in changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_mapping": {"parent_library": "os"}},
        {"auto_map": None},
        {"auto_map": {}},
        {"megatron_core": "os"},
        {"megatron_config": {}},
        {"corda_config": {"cache_file": "/x.pt"}},
        {"eva_config": {}},
        {"loftq_config": {"loftq_bits": 4}},
        {"lora_ga_config": {}},
    ],
    ids=str,
)
def test_fields_that_import_or_read_are_forbidden(changes: dict[str, Any]) -> None:
    assert parse(**changes) == (None, {"CONFIG_FIELD_FORBIDDEN"})


def test_an_unknown_field_is_refused_even_when_null() -> None:
    config, findings = peft_config_parse(json.dumps(sample.config(lora_magic=None)).encode())
    assert config is None
    assert sample.codes(findings) == {"CONFIG_FIELD_UNKNOWN"}
    assert findings[0].where.endswith("lora_magic")


@pytest.mark.parametrize("field", ["r", "lora_alpha"])
def test_what_peft_would_fill_in_silently_is_required(field: str) -> None:
    fields = sample.config()
    del fields[field]
    config, findings = peft_config_parse(json.dumps(fields).encode())
    assert config is None
    assert sample.codes(findings) == {"CONFIG_VALUE"}


@pytest.mark.parametrize("value", ["IA3", "ADALORA", "lora", None, 1])
def test_another_peft_type_is_refused_by_name_and_nothing_else_is_said(value: Any) -> None:
    fields = {**sample.config(), "peft_type": value, "feedforward_modules": [], "r": None}
    config, findings = peft_config_parse(json.dumps(fields).encode())
    assert config is None
    assert [finding.code for finding in findings] == ["PEFT_TYPE_UNSUPPORTED"]
    assert str(value) in findings[0].got


def test_a_known_other_type_says_what_would_be_needed() -> None:
    findings = peft_config_parse(b'{"peft_type": "VERA"}')[1]
    assert "'LORA'; VERA would need its shared projections" in findings[0].expected


def test_what_has_no_peft_type_is_refused_for_that() -> None:
    findings = peft_config_parse(b'{"lora_rank": 8, "framework": "jax"}')[1]
    assert [(f.code, f.got) for f in findings] == [("PEFT_TYPE_UNSUPPORTED", "none")]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xef\xbb\xbf{}",
        b'{"r":1,"r":2}',
        b'{"lora_alpha":NaN}',
        b'{"lora_alpha":Infinity}',
        b'{"lora_alpha":1e999}',
        b'{"r":99999999999999999999}',
        b'{"a":"\\ud800"}',
        b'{"a":' + b"[" * 99 + b"]" * 99 + b"}",
        b" " * (limits.CONFIG_BYTES + 1),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_strict_json_object_is_malformed(content: bytes) -> None:
    config, findings = peft_config_parse(content)
    assert config is None
    assert sample.codes(findings) == {"CONFIG_MALFORMED"}


def test_all_problems_are_reported_at_once() -> None:
    _, codes = parse(r="8", bias="all", auto_map={}, magic=1)
    assert codes == {
        "CONFIG_VALUE",
        "CONFIG_OPTION_UNSUPPORTED",
        "CONFIG_FIELD_FORBIDDEN",
        "CONFIG_FIELD_UNKNOWN",
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9999) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [*sample.config(), "bias", "rank_pattern", "exclude_modules", "auto_map", "use_dora"]


@settings(max_examples=120, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(), JSON, max_size=4))
def test_any_config_is_read_whole_or_refused_with_a_reason(changes: dict[str, Any]) -> None:
    content = json.dumps(sample.config(**changes)).encode()
    config, findings = peft_config_parse(content)
    assert (config is None) == bool(findings)
    if config is not None:
        assert set(changes) <= set(FIELDS)
        assert type(config.r) is int
        assert 0 < config.lora_alpha <= limits.ALPHA
