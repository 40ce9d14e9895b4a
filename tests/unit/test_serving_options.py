"""What a node is started with: command line, pinned trust, and its own folder."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import UUID

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gpu_worker.serving.options import options_parse, wanted_parse
from gpu_worker.serving.residency import Key
from gpu_worker.serving.store import NodeStore
from gpu_worker.serving.trust import trust_parse
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import MalformedError

DIGEST = digest_of(b"x")
NEEDED = ["--url", "http://r", "--token-file", "t", "--name", "node-1", "--base", "b"]
NEEDED += ["--port", "8000", "--trust", "t.json", "--store", "s"]


def test_options() -> None:
    options = options_parse([*NEEDED, "--preload", f"t-1042/support-zh@{DIGEST}"])
    assert options.public_url == "http://127.0.0.1:8000"
    assert options.preload[0].digest == DIGEST
    assert (options.preload[0].tenant, options.preload[0].adapter) == ("t-1042", "support-zh")
    with pytest.raises(SystemExit):
        options_parse([*NEEDED, "--prelod", "x"])


@pytest.mark.parametrize("text", ["", "t/a", "t/a@prod", f"a@{DIGEST}", f"../a/b@{DIGEST}"])
def test_a_preload_names_a_digest(text: str) -> None:
    with pytest.raises(MalformedError):
        wanted_parse(text)


def _pem() -> str:
    return (
        Ed25519PrivateKey.generate()
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        .decode()
    )


def test_trust() -> None:
    document = {
        "verdict": {"publicKey": _pem(), "verifierId": "urn:v"},
        "routingContext": {"publicKey": _pem(), "issuer": "urn:i"},
    }
    trust = trust_parse(json.dumps(document).encode())
    assert (trust.verifiers[0].verifier_id, trust.routing_issuer) == ("urn:v", "urn:i")
    for broken in (
        {**document, "more": 1},
        {"verdict": document["verdict"]},
        {**document, "verdict": {"publicKey": "x", "verifierId": "urn:v"}},
        {**document, "verdict": {"publicKey": _pem(), "verifierId": ""}},
        [],
    ):
        with pytest.raises(MalformedError):
            trust_parse(json.dumps(broken).encode())


def test_store(tmp_path: Path) -> None:
    key = Key(UUID(int=3), DIGEST)
    store = NodeStore(tmp_path, url="http://r", node="node-1")
    assert store.feed_index() == 0
    store.feed_index_write(7)
    store.folder(key).mkdir(parents=True)
    (store.folder(key) / "file").write_bytes(b"123")
    leftover = store.folder(key).with_name(".staging")
    leftover.mkdir()
    store.close()
    again = NodeStore(tmp_path, url="http://r", node="node-1")
    assert again.feed_index() == 7
    assert again.keys() == (key,)
    assert not leftover.exists()
    assert again.remove(key) == 3
    assert again.remove(key) == 0
    assert again.keys() == ()
    again.close()
    other = NodeStore(tmp_path, url="http://other", node="node-1")
    assert other.feed_index() == 0
    (tmp_path / "feed.json").write_text("{")
    assert other.feed_index() == 0
    other.close()
