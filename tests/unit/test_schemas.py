"""The generated files are current, and what the code writes is what they describe."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from jsonschema import Draft202012Validator

from registry_service.domain.declaration import Declaration
from registry_service.domain.digests import digest_of
from registry_service.domain.findings import Check, Code, refuse
from registry_service.trust import verdict
from schemas import generate

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
DIGEST = digest_of(b"x")
DECLARATION = Declaration(
    tenant="t-1042",
    adapter="support-zh",
    base_model_digest=DIGEST,
    peft_type="LORA",
    rank=8,
    alpha=16.0,
    target_modules=("q_proj", "v_proj"),
    tokenizer_digest=DIGEST,
    chat_template_digest=DIGEST,
    training_data_version="2026-11",
)
SHARED: dict[str, Any] = {
    "base_digest": DIGEST,
    "catalog_digest": DIGEST,
    "policy_digest": DIGEST,
    "issued_at": NOW,
    "not_after": NOW + timedelta(days=1),
    "verifier_id": "urn:registry",
}
VERDICT = verdict.VerdictClaims(
    adapter_digest=DIGEST,
    tenant_id=UUID(int=1),
    tenant="t-1042",
    adapter="support-zh",
    files=(("adapter_config.json", DIGEST),),
    input_attestations=(("urn:adapter-registry:report:scan", DIGEST),),
    **SHARED,
)
BASE = verdict.BaseClaims(name="smollm2", **SHARED)


FINDINGS = (generate.ROOT / "docs" / "findings.md").read_text("utf-8")


def validator(name: str) -> Draft202012Validator:
    schema = json.loads((generate.ROOT / "schemas" / f"{name}.json").read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


def test_what_is_generated_is_current() -> None:
    assert generate.drifted() == []


def test_a_stale_and_a_left_over_file_are_seen(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    for folder in ("schemas", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "docs" / "findings.md").write_text(FINDINGS)
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    (tmp_path / "schemas" / "artifact.json").write_text("{}")
    (tmp_path / "schemas" / "gone.json").write_text("{}")
    assert generate.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "schemas/artifact.json" in said
    assert "schemas/gone.json" in said


def test_every_code_is_explained_in_its_place() -> None:
    assert generate.findings_page_faults(FINDINGS) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("### FILE_EMPTY\n", "### FILE_VOID\n"), "FILE_EMPTY: not explained"),
        (("### FILE_EMPTY\n", "### FILE_VOID\n"), "FILE_VOID: no such code"),
        (("### FILE_EMPTY\n", "### FILE_EMPTY\n### FILE_EMPTY\n"), "FILE_EMPTY: out of order"),
        (("### NO_SANDBOX\n", "### NO_SANDBOX\n### FILE_EMPTY\n"), "FILE_EMPTY: out of order"),
        (("- What to do: ", "- Do: "), "FILE_NAME_FORBIDDEN: no '- What to do: '"),
    ],
)
def test_a_page_of_findings_that_does_not_fit_the_code_fails_the_check(
    change: tuple[str, str],
    fault: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    for folder in ("schemas", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "docs" / "findings.md").write_text(FINDINGS.replace(*change, 1))
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 1
    assert f"docs/findings.md: {fault}" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(generate.MODELS))
def test_every_schema_is_valid_and_refuses_unknown_fields(name: str) -> None:
    schema = json.loads((generate.ROOT / "schemas" / f"{name}.json").read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False
    assert schema["required"]


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("declaration", DECLARATION.to_bytes()),
        ("verdict-statement", verdict.verdict_statement(VERDICT)),
        ("base-statement", verdict.base_statement(BASE)),
    ],
)
def test_what_is_written_fits_its_schema_and_model(name: str, document: bytes) -> None:
    validator(name).validate(json.loads(document))
    generate.MODELS[name].model_validate_json(document)


def test_a_finding_fits_its_schema_and_model() -> None:
    finding = refuse(Check.STRUCTURE, Code.SHAPE_MISMATCH, "q_proj", "(16, 576)", "(8, 576)")
    document = json.dumps(finding.to_json())
    validator("finding").validate(json.loads(document))
    generate.MODELS["finding"].model_validate_json(document)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("baseModelDigest", "sha256:short"),
        ("rank", 0),
        ("rank", "8"),
        ("targetModules", ""),
        ("surprise", 1),
    ],
)
def test_a_schema_refuses_what_the_parser_refuses(field: str, value: object) -> None:
    document = json.loads(DECLARATION.to_bytes()) | {field: value}
    assert not validator("declaration").is_valid(document)


def test_a_schema_asks_for_every_field_as_the_parser_does() -> None:
    document = json.loads(DECLARATION.to_bytes())
    for field in document:
        rest = {name: value for name, value in document.items() if name != field}
        assert not validator("declaration").is_valid(rest), field


def test_an_artifact_names_what_it_is_and_what_it_runs_on() -> None:
    fields = validator("artifact").schema["properties"]
    assert {
        *("adapterId", "adapterDigest", "baseModelDigest", "peftType", "rank"),
        *("targetModules", "ownerTenant", "maxReplicas", "state"),
    } <= set(fields)
