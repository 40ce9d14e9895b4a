"""The declaration: exact fields, nothing coerced."""

from __future__ import annotations

from typing import Any

import pytest

from registry_service.domain.canonical import canonical_json
from registry_service.domain.declaration import Declaration, declaration_parse
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import MalformedError

DOCUMENT: dict[str, Any] = {
    "schemaVersion": 1,
    "tenant": "t-1042",
    "adapter": "support-zh",
    "baseModelDigest": digest_of(b"base"),
    "peftType": "LORA",
    "rank": 8,
    "alpha": 16,
    "targetModules": ["q_proj", "v_proj"],
    "tokenizerDigest": digest_of(b"tokenizer"),
    "chatTemplateDigest": digest_of(b"template"),
    "trainingDataVersion": "2026-11",
    "evaluationReportDigest": None,
    "baseQuantization": "none",
    "maxReplicas": 2,
}


def test_round_trip() -> None:
    declaration = declaration_parse(canonical_json(DOCUMENT))
    assert declaration.to_bytes() == canonical_json(DOCUMENT)
    assert (declaration.rank, declaration.base_model_digest) == (8, digest_of(b"base"))
    assert declaration_parse(declaration.to_bytes()) == declaration


def test_all_linear_and_building_by_name() -> None:
    fields = declaration_parse(canonical_json(DOCUMENT)).model_dump()
    declaration = Declaration(**fields | {"target_modules": "all-linear"})
    assert declaration_parse(declaration.to_bytes()).target_modules == "all-linear"


@pytest.mark.parametrize("field", sorted(DOCUMENT))
def test_every_field_must_be_there(field: str) -> None:
    document = {name: value for name, value in DOCUMENT.items() if name != field}
    with pytest.raises(MalformedError, match=field):
        declaration_parse(canonical_json(document))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schemaVersion", 2),
        ("tenant", "T"),
        ("tenant", "platform"),
        ("adapter", "a/b"),
        ("baseModelDigest", "sha256:00"),
        ("peftType", "lora"),
        ("rank", 0),
        ("rank", "8"),
        ("rank", True),
        ("rank", 10**6),
        ("alpha", 0),
        ("alpha", "16"),
        ("targetModules", ""),
        ("targetModules", ["v_proj", "q_proj"]),
        ("targetModules", ["q_proj", "q_proj"]),
        ("targetModules", "a\u202eb"),
        ("targetModules", [1]),
        ("trainingDataVersion", ""),
        ("trainingDataVersion", "a\u202eb"),
        ("evaluationReportDigest", ""),
        ("baseQuantization", "No Such"),
        ("maxReplicas", 0),
        ("extra", 1),
        ("base_model_digest", digest_of(b"x")),
    ],
)
def test_another_value_is_refused(field: str, value: object) -> None:
    with pytest.raises(MalformedError, match="declaration"):
        declaration_parse(canonical_json(DOCUMENT | {field: value}))


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'{"rank":1,"rank":1}', b"\xff"])
def test_what_is_no_document_is_refused(content: bytes) -> None:
    with pytest.raises(MalformedError, match="declaration"):
        declaration_parse(content)
