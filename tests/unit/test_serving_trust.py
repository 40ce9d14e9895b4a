"""What a node pins: three purposes, each with a key of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.serving.trust import trust_parse
from registry_service.backends import key_folder
from registry_service.domain.errors import MalformedError

ISSUER = "urn:registry"


@pytest.fixture
def document(tmp_path: Path) -> Any:
    key_folder.keys_create(tmp_path, ISSUER)
    return json.loads((tmp_path / key_folder.TRUST_FILE).read_bytes())


def test_what_the_service_writes_is_what_a_node_pins(document: Any) -> None:
    trust = trust_parse(json.dumps(document).encode())
    assert trust.list_issuer == trust.routing_issuer == ISSUER
    assert trust.list_key not in (trust.routing_key, trust.verifiers[0].public_key)


@pytest.mark.parametrize("purpose", ["verdict", "routingContext", "revocationList"])
def test_a_purpose_without_its_own_key_is_refused(document: Any, purpose: str) -> None:
    for other in document:
        if other != purpose:
            shared = document[other] | {"publicKey": document[purpose]["publicKey"]}
            with pytest.raises(MalformedError, match="a key of its own"):
                trust_parse(json.dumps(document | {other: shared}).encode())
    del document[purpose]
    with pytest.raises(MalformedError, match="registry_service keys"):
        trust_parse(json.dumps(document).encode())


@pytest.mark.parametrize(
    "pinned", [None, {}, {"publicKey": "x"}, {"publicKey": "", "issuer": "x"}, {"issuer": 5}]
)
def test_another_form_is_refused(document: Any, pinned: Any) -> None:
    with pytest.raises(MalformedError, match="revocationList"):
        trust_parse(json.dumps(document | {"revocationList": pinned}).encode())
