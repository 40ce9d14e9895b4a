"""The static checks together: order, structure, declaration, limits; none passes by a gap."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import sample_adapter as sample

from registry_service.domain.catalog import Kind
from registry_service.domain.digests import digest_of
from registry_service.domain.findings import Check, Code, Severity, refuse, review
from registry_service.domain.verification import BaseFacts, verdict_of

KEY = "base_model.model.model.layers.0.self_attn.q_proj"


def test_a_good_adapter_has_no_findings() -> None:
    assert sample.check(sample.files()) == ()
    for dtype in ("F16", "BF16"):
        assert sample.check(sample.files(weights=sample.weights(sample.tensors(dtype)))) == ()


def _with(**changes: Any) -> dict[str, Any]:
    """The good tensors, with these suffixes of KEY changed, added or (None) taken out."""
    tensors: dict[str, Any] = sample.tensors()
    for name, value in changes.items():
        tensors[name] = value
        if value is None:
            del tensors[name]
    return tensors


STRUCTURE = [
    (f"{KEY}.lora_A.weight", None, "MISSING_TENSOR", "(4, 16)", "no tensor"),
    (f"{KEY}.lora_A.weight", ("F32", (4, 12)), "SHAPE_MISMATCH", "(4, 16)", "(4, 12)"),
    (f"{KEY}.lora_A.weight", ("F32", (16, 4)), "SHAPE_MISMATCH", "(4, 16)", "(16, 4)"),
    (f"{KEY}.lora_A.weight", ("F32", (64,)), "SHAPE_MISMATCH", "(4, 16)", "(64,)"),
    (f"{KEY}.lora_A.weight", ("F32", (8, 16)), "RANK_MISMATCH", "(4, 16)", "(8, 16)"),
    (f"{KEY}.lora_B.weight", ("F32", (16, 8)), "RANK_MISMATCH", "(16, 4)", "(16, 8)"),
    (f"{KEY}.lora_A.weight", ("I8", (4, 16)), "DTYPE_MISMATCH", "F32 or F16 or BF16", "I8"),
    (f"{KEY}.lora_C.weight", ("F32", (4,)), "UNEXPECTED_TENSOR", "no tensor", "(4,) F32"),
    (f"{KEY}.lora_magnitude_vector", ("F32", (16,)), "UNEXPECTED_TENSOR", "no tensor", "(16,)"),
    (f"{KEY}.lora_magnitude_vector.weight", ("F32", (16,)), "UNEXPECTED_TENSOR", "no", "(16,)"),
    (f"{KEY}.weight", ("F32", (16, 16)), "BASE_TENSOR", "no tensor of the base", "(16, 16)"),
    (f"{KEY}.base_layer.weight", ("F32", (16, 16)), "BASE_TENSOR", "no tensor", "(16, 16)"),
    ("base_model.model.lm_head.weight", ("F32", (32, 16)), "BASE_TENSOR", "no", "(32, 16)"),
    ("lm_head.weight", ("F32", (32, 16)), "BASE_TENSOR", "no", "(32, 16)"),
    (
        "base_model.model.model.layers.1.norm.weight",
        ("F32", (16,)),
        "BASE_TENSOR",
        "no tensor of the base",
        "(16,) F32",
    ),
    (
        "base_model.model.lm_head.modules_to_save.weight",
        ("F32", (32, 16)),
        "BASE_TENSOR",
        "no",
        "(32, 16)",
    ),
    (f"{KEY}.lora_A.first.weight", ("F32", (4, 16)), "ADAPTER_NAME_IN_KEY", "a key", "first"),
    (f"{KEY}.lora_A.default.weight", ("F32", (4, 16)), "ADAPTER_NAME_IN_KEY", "a key", "default"),
    (f"{KEY}.lora_magnitude_vector.x", ("F32", (16,)), "ADAPTER_NAME_IN_KEY", "a key", "x"),
    (
        f"{KEY[len('base_model.model.') :]}.lora_A.weight",
        ("F32", (4, 16)),
        "UNEXPECTED_TENSOR",
        "no tensor",
        "(4, 16)",
    ),
]


@pytest.mark.parametrize(("name", "value", "code", "expected", "got"), STRUCTURE)
def test_structure(name: str, value: Any, code: str, expected: str, got: str) -> None:
    weights = sample.weights(_with(**{name: value}))
    findings = [f for f in sample.check(sample.files(weights=weights)) if f.check == 5]
    assert [(f.code, f.where) for f in findings] == [(code, name)]
    assert findings[0].expected.startswith(expected)
    assert findings[0].got.startswith(got)


def test_an_adapter_of_another_width_names_every_tensor() -> None:
    tensors = {
        name: (dtype, tuple(12 if size == 16 else size for size in shape))
        for name, (dtype, shape) in sample.tensors().items()
    }
    findings = sample.check(sample.files(weights=sample.weights(tensors)))
    assert [f.code for f in findings].index(Code.OTHER_WIDTH) == 0
    assert sample.codes(findings) == {"OTHER_WIDTH", "SHAPE_MISMATCH"}
    assert {f.where for f in findings if f.code is Code.SHAPE_MISMATCH} < set(tensors)
    assert ("(4, 16)", "(4, 12)") in {(f.expected, f.got) for f in findings}


def test_a_key_of_the_base_is_named_even_when_the_targets_are_unknown() -> None:
    content = sample.files(
        config=json.dumps(sample.config(target_modules=["nowhere"])).encode(),
        weights=sample.weights({"lm_head.weight": ("F32", (32, 16)), "x": ("F32", (1,))}),
    )
    codes = {f.code for f in sample.check(content) if f.check == 5}
    assert codes == {"TARGET_UNKNOWN", "BASE_TENSOR"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 8),
        ("alpha", 16),
        ("targetModules", ["q_proj"]),
        ("targetModules", "all-linear"),
        ("peftType", "IA3"),
        ("baseModelDigest", "sha256:" + "c" * 64),
        ("tokenizerDigest", "sha256:" + "c" * 64),
        ("chatTemplateDigest", "sha256:" + "c" * 64),
    ],
)
def test_a_declaration_that_disagrees_is_refused(field: str, value: Any) -> None:
    declaration = json.dumps(sample.declaration(**{field: value})).encode()
    findings = sample.check(sample.files(declaration=declaration))
    assert [(f.check, f.code) for f in findings] == [(4, "DECLARATION_MISMATCH")]
    assert findings[0].where.endswith(field)


@pytest.mark.parametrize(
    "content", [b"{}", b"[1]", b"{", json.dumps(sample.declaration(extra=1)).encode()]
)
def test_a_malformed_declaration_is_refused(content: bytes) -> None:
    findings = sample.check(sample.files(declaration=content))
    assert "DECLARATION_MALFORMED" in sample.codes(findings)


def test_an_adapters_own_tokenizer_and_template_are_declared_and_reviewed() -> None:
    own = {
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"chat_template": "{{ x }}"}',
        "evaluation-report.json": b"{}",
    }
    content = {**sample.files(), **own}
    refused = {f.where.rpartition(" ")[2] for f in sample.check(content) if f.severity == "refuse"}
    assert refused == {"tokenizerDigest", "chatTemplateDigest", "evaluationReportDigest"}
    facts = sample.inputs(content).own
    assert facts is not None
    declared = sample.declaration(
        tokenizerDigest=facts.tokenizer_digest,
        chatTemplateDigest=facts.chat_template_digest,
        evaluationReportDigest=digest_of(b"{}"),
    )
    findings = sample.check({**content, sample.DECLARATION: json.dumps(declared).encode()})
    assert {(f.code, f.severity) for f in findings} == {
        (Code.TOKENIZER_DIFFERS, Severity.REVIEW),
        (Code.TEMPLATE_DIFFERS, Severity.REVIEW),
    }
    assert verdict_of(findings) == "pass"


def test_a_template_that_cannot_be_read_does_not_fall_back_to_the_bases() -> None:
    content = {**sample.files(), "tokenizer_config.json": b'{"chat_template": '}
    assert "DECLARATION_MISMATCH" in sample.codes(sample.check(content))
    unread = sample.check({**sample.files(), "chat_template.jinja": b"{{ x }}"}, own=None)
    assert "DECLARATION_MISMATCH" in sample.codes(unread)


@pytest.mark.parametrize("part", ["weights", "config", "declaration"])
def test_what_is_not_given_is_refused(part: str) -> None:
    assert "FILE_MISSING" in sample.codes(sample.check(sample.files(**{part: None})))


@pytest.mark.parametrize("field", ["header_prefix", "config", "declaration"])
def test_a_part_that_the_caller_left_out_is_refused(field: str) -> None:
    findings = sample.check(sample.files(), **{field: None})
    assert verdict_of(findings) == "refuse"


def test_a_declaration_may_be_missing_only_when_that_is_said() -> None:
    content = sample.files(declaration=None)
    assert sample.check(content, declaration_required=False, base=BaseFacts(None, None)) == ()


def test_the_tenants_limits() -> None:
    findings = sample.check(sample.files(), max_rank=3, max_weight_bytes=10)
    assert [(f.check, f.code) for f in findings] == [(8, "TENANT_LIMIT"), (8, "TENANT_LIMIT")]


def test_the_librarys_word_is_asked_for_once_ours_is_given() -> None:
    from registry_service.domain.verification import static_check

    said = refuse(Check.HEADER, Code.HEADER_DISAGREES, "x", "y", "z")
    inputs = sample.inputs(sample.files())
    assert static_check(inputs, lambda prefix, size, header: said).findings == (said,)
    assert static_check(inputs, lambda prefix, size, header: None).findings == ()


def test_findings_come_in_the_order_of_the_checks() -> None:
    content = {
        **sample.files(
            weights=sample.weights({"../x": ("I8", (8,))}),
            config=json.dumps(sample.config(magic=1)).encode(),
            declaration=json.dumps(
                sample.declaration(baseModelDigest="sha256:" + "c" * 64)
            ).encode(),
        ),
        "evil.py": b"import os",
    }
    checks = [finding.check for finding in sample.check(content, max_weight_bytes=1)]
    assert checks == sorted(checks)
    assert set(checks) == {1, 2, 3, 4, 8}


def test_the_verdict_is_refuse_for_one_refusing_finding_only() -> None:
    look = review(Check.VALUES, Code.SPECTRUM, "x", "y", "z")
    assert verdict_of(()) == verdict_of((look,)) == "pass"
    assert verdict_of((look, refuse(Check.VALUES, Code.SPECTRUM, "x", "y", "z"))) == "refuse"


def test_a_thousand_tensors_take_well_under_the_bound() -> None:
    modules = tuple(sample.module(f"l.{n}.q", Kind.LINEAR, 4, 4) for n in range(500))
    catalog = sample.catalog(input_embedding=None, output_embedding=None, modules=modules)
    tensors = {}
    for module in modules:
        tensors[f"base_model.model.{module.name}.lora_A.weight"] = ("F32", (4, 4))
        tensors[f"base_model.model.{module.name}.lora_B.weight"] = ("F32", (4, 4))
    fields: dict[str, Any] = {"target_modules": ["q"]}
    content = sample.files(
        weights=sample.weights(tensors),
        config=json.dumps(sample.config(**fields)).encode(),
        declaration=json.dumps(sample.declaration(targetModules=["q"])).encode(),
    )
    inputs = sample.inputs(content, catalog=catalog)
    from registry_service.domain.verification import static_check

    started = time.process_time()
    assert static_check(inputs).findings == ()
    # The bound for a user is 150 ms; ten times that only says that nothing is quadratic.
    assert time.process_time() - started < 1.5
