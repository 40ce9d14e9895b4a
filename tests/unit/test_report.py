"""Thousands of findings become a few groups, and a cut report keeps one of every kind."""

from __future__ import annotations

import json

import pytest
import sample_adapter as sample

from registry_service.domain import limits
from registry_service.domain.catalog import Kind
from registry_service.domain.expected_tensors import Expectation, ExpectedTensors, expected_tensors
from registry_service.domain.findings import Check, Code, Finding, info, refuse, review
from registry_service.domain.peft_config import peft_config_parse
from registry_service.domain.report import (
    ModuleGroup,
    findings_cut,
    findings_group,
    modules_group,
    name_pattern,
    variety_check,
)


def missing(layer: int, name: str = "q_proj") -> Finding:
    where = f"base_model.model.model.layers.{layer}.{name}.lora_A.weight"
    return refuse(Check.STRUCTURE, Code.MISSING_TENSOR, where, f"(8, {layer})", "no tensor")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("model.layers.10.self_attn.q_proj", "model.layers.*.self_attn.q_proj"),
        ("a.1.experts.22.w1", "a.*.experts.*.w1"),
        ("0.model.layers.7", "0.model.layers.*"),
        ("h.7b.x", "h.7b.x"),
        ("", ""),
    ],
)
def test_numbers_of_layers_become_stars(name: str, pattern: str) -> None:
    assert name_pattern(name) == pattern


def test_the_same_fault_in_every_layer_is_one_group_with_three_examples() -> None:
    groups = findings_group([missing(n, name) for n in range(1000) for name in ("q", "v")])
    assert [(g.count, g.where) for g in groups] == [
        (1000, "base_model.model.model.layers.*.q.lora_A.weight"),
        (1000, "base_model.model.model.layers.*.v.lora_A.weight"),
    ]
    assert [example.expected for example in groups[0].examples] == ["(8, 0)", "(8, 1)", "(8, 2)"]


def test_refusals_come_first_then_by_check_then_as_they_came() -> None:
    findings = [
        info(Check.FILE_SET, Code.CONTENT_UNKNOWN, "a", "b", "c"),
        review(Check.VALUES, Code.SPECTRUM, "a", "b", "c"),
        review(Check.DECLARATION, Code.TOKENIZER_DIFFERS, "a", "b", "c"),
        refuse(Check.STRUCTURE, Code.OTHER_DEPTH, "z", "b", "c"),
        missing(1),
        refuse(Check.HEADER, Code.TENSOR_DTYPE, "a", "b", "c"),
    ]
    assert [group.code for group in findings_group(findings)] == [
        Code.TENSOR_DTYPE,
        Code.OTHER_DEPTH,
        Code.MISSING_TENSOR,
        Code.TOKENIZER_DIFFERS,
        Code.SPECTRUM,
        Code.CONTENT_UNKNOWN,
    ]


def test_a_group_is_json() -> None:
    (group,) = findings_group([missing(1)])
    assert json.loads(json.dumps(group.to_json())) == {
        "check": 5,
        "code": "MISSING_TENSOR",
        "severity": "refuse",
        "where": "base_model.model.model.layers.*.q_proj.lora_A.weight",
        "count": 1,
        "examples": [
            {
                "where": "base_model.model.model.layers.1.q_proj.lora_A.weight",
                "expected": "(8, 1)",
                "got": "no tensor",
            }
        ],
    }


def test_a_cut_keeps_every_code_and_the_order() -> None:
    flood = [refuse(Check.HEADER, Code.TENSOR_DTYPE, f"t{n}", "F32", "I8") for n in range(500)]
    last = refuse(Check.TENANT_LIMITS, Code.TENANT_LIMIT, "a", "b", "c")
    findings = [*flood, missing(1), missing(2), last]
    cut = findings_cut(findings, 100)
    assert len(cut) == 100
    assert cut[-3:] == (missing(1), missing(2), last)
    assert list(cut[:97]) == flood[:97]
    assert findings_cut(findings, 503) == tuple(findings)
    assert findings_cut(findings, 2) == (flood[0], missing(1))


def test_modules_are_grouped_with_rank_and_effective_scaling() -> None:
    config, findings = peft_config_parse(
        json.dumps(
            sample.config(
                rank_pattern={"layers.1.self_attn.q_proj": 8}, use_rslora=True, r=4, lora_alpha=8
            )
        ).encode()
    )
    assert config is not None, findings
    assert modules_group(expected_tensors(sample.catalog(), config)) == (
        ModuleGroup("model.layers.*.self_attn.q_proj", 1, 4, 4.0),
        ModuleGroup("model.layers.*.self_attn.q_proj", 1, 8, 8 / 8**0.5),
        ModuleGroup("model.layers.*.self_attn.v_proj", 2, 4, 4.0),
    )


def test_whole_modules_have_neither_rank_nor_scaling() -> None:
    head = sample.module("score", Kind.LINEAR, 16, 3)
    whole = Expectation((3, 16), ("F32",), head.name, 0, None)
    expected = ExpectedTensors({"base_model.model.score.weight": whole}, {}, (), {}, {})
    assert modules_group(expected) == (ModuleGroup("score", 1, None, None),)


def test_more_groups_than_are_compared_ask_for_a_look() -> None:
    groups = [ModuleGroup(f"m{n}", 1, 8, 2.0) for n in range(limits.REPORT_MODULE_GROUPS)]
    assert variety_check(groups) == ()
    (finding,) = variety_check([*groups, ModuleGroup("x", 1, 8, 2.0)])
    assert (finding.code, finding.severity) == ("MODULES_VARIED", "review")
    assert finding.got.startswith(f"{limits.REPORT_MODULE_GROUPS + 1}: ")
