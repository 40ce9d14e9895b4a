"""Catalogs: canonical bytes out, strict parsing in."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sample_adapter as sample

from registry_service.domain.canonical import canonical_json
from registry_service.domain.catalog import catalog_parse
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import MalformedError


def test_a_catalog_survives_its_bytes_and_has_their_digest() -> None:
    catalog = sample.catalog()
    content = catalog.to_bytes()
    assert catalog_parse(content) == catalog
    assert catalog.digest == digest_of(content)
    assert canonical_json(json.loads(content)) == content
    assert {"baseDigest", "modelClass", "transformersVersion"} < set(json.loads(content))


def _document() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(sample.catalog().to_bytes())
    return result


LINEAR = 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "model"),
        ("name", "a..b"),
        ("name", "é"),
        ("name", "a/b"),
        ("kind", "conv2d"),
        ("kind", "other"),
        ("inSize", None),
        ("inSize", 0),
        ("inSize", True),
        ("inSize", 16.0),
        ("inSize", 17),
        ("outSize", "16"),
        ("className", ""),
        ("tensors", {"weight": [1, -1]}),
        ("tensors", {"weight": "16"}),
        ("extra", 1),
    ],
)
def test_a_module_that_does_not_add_up_is_refused(field: str, value: Any) -> None:
    document = _document()
    assert document["modules"][LINEAR]["kind"] == "linear"
    document["modules"][LINEAR][field] = value
    with pytest.raises(MalformedError):
        catalog_parse(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("baseDigest", "sha256:B"),
        ("modules", []),
        ("tiedModules", 1),
        ("schemaVersion", 2),
        ("inputEmbedding", "nowhere"),
        ("outputEmbedding", ""),
        ("modelType", "a b"),
        ("extra", None),
    ],
)
def test_a_catalog_with_a_wrong_field_is_refused(field: str, value: Any) -> None:
    document = {**_document(), field: value}
    with pytest.raises(MalformedError):
        catalog_parse(json.dumps(document).encode())


@pytest.mark.parametrize("field", ["baseDigest", "modules", "modelType", "inputEmbedding"])
def test_a_missing_field_is_refused(field: str) -> None:
    document = _document()
    del document[field]
    with pytest.raises(MalformedError, match=field):
        catalog_parse(json.dumps(document).encode())


def test_a_repeated_key_is_refused() -> None:
    content = sample.catalog().to_bytes()
    with pytest.raises(MalformedError, match="twice"):
        catalog_parse(content[:-1] + b',"modelType":"x"}')
