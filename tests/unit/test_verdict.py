"""Verdicts: valid for one adapter on one base for one tenant until a time, and in one form."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from registry_service.domain.canonical import canonical_json
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import UntrustedError
from registry_service.trust import verdict as v
from registry_service.trust.dsse import IN_TOTO, dsse_sign
from registry_service.trust.keys import key_id

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
TENANT = UUID(int=1)
TRUSTED = (v.TrustedVerifier(KEY.public_key(), "urn:registry"),)
CLAIMS = v.VerdictClaims(
    adapter_digest=digest_of(b"adapter"),
    base_digest=digest_of(b"base"),
    tenant_id=TENANT,
    tenant="t-1042",
    adapter="support-zh",
    files=(
        ("adapter_config.json", digest_of(b"c")),
        ("adapter_model.safetensors", digest_of(b"w")),
    ),
    catalog_digest=digest_of(b"catalog"),
    policy_digest=digest_of(b"policy"),
    input_attestations=(("urn:report:scan", digest_of(b"r")),),
    issued_at=NOW,
    not_after=NOW + timedelta(days=1),
    verifier_id="urn:registry",
)
BASE = v.BaseClaims(
    base_digest=digest_of(b"base"),
    name="smollm2",
    catalog_digest=digest_of(b"catalog"),
    policy_digest=digest_of(b"policy"),
    issued_at=NOW,
    not_after=NOW + timedelta(days=1),
    verifier_id="urn:registry",
)


def sign(payload: bytes, key: Ed25519PrivateKey = KEY) -> bytes:
    return dsse_sign(IN_TOTO, payload, key.sign, key_id(key.public_key()))


def verify(envelope: bytes, **changes: Any) -> v.VerdictClaims:
    wanted: dict[str, Any] = {
        "trusted": TRUSTED,
        "adapter_digest": CLAIMS.adapter_digest,
        "base_digest": CLAIMS.base_digest,
        "tenant_id": TENANT,
        "now": NOW,
    }
    return v.verdict_verify(envelope, **wanted | changes)


ENVELOPE = sign(v.verdict_statement(CLAIMS))


def test_round_trip() -> None:
    assert verify(ENVELOPE) == CLAIMS
    assert verify(ENVELOPE, tenant_id=None) == CLAIMS


def test_form_is_a_verification_summary() -> None:
    document = json.loads(v.verdict_statement(CLAIMS))
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://slsa.dev/verification_summary/v1"
    assert [subject["name"] for subject in document["subject"]] == [
        "manifest",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    predicate = document["predicate"]
    assert predicate["resourceUri"] == f"urn:{CLAIMS.adapter_digest}"
    assert predicate["verificationResult"] == "PASSED"
    assert predicate["urn:adapter-registry:verdict/v1#notAfter"] == "2026-12-01T12:00:00Z"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"adapter_digest": digest_of(b"x")}, "a verdict about"),
        ({"base_digest": digest_of(b"x")}, "for base"),
        ({"tenant_id": UUID(int=2)}, "tenant"),
        ({"now": CLAIMS.not_after}, "expired"),
        ({"now": NOW - timedelta(minutes=2)}, "future"),
        ({"now": NOW.replace(tzinfo=None)}, "checked"),
        ({"trusted": ()}, "no verifier"),
        ({"trusted": (v.TrustedVerifier(OTHER.public_key(), "urn:registry"),)}, "another key"),
        ({"trusted": (v.TrustedVerifier(KEY.public_key(), "urn:other"),)}, "another verifier"),
    ],
)
def test_a_verdict_for_something_else_is_denied(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UntrustedError, match=reason):
        verify(ENVELOPE, **changes)


def test_a_key_speaks_only_as_the_verifier_pinned_with_it() -> None:
    # Both ids and both keys are pinned, but not as this pair.
    crossed = (
        v.TrustedVerifier(OTHER.public_key(), "urn:registry"),
        v.TrustedVerifier(KEY.public_key(), "urn:other"),
    )
    with pytest.raises(UntrustedError, match="another verifier"):
        verify(ENVELOPE, trusted=crossed)
    assert verify(ENVELOPE, trusted=(*crossed, *TRUSTED)) == CLAIMS


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        part: Any = document
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("_type", value="https://in-toto.io/Statement/v0.1"),
        _set("predicateType", value="https://slsa.dev/provenance/v1"),
        _set("extra", value=1),
        _set("subject", value=[]),
        _set("subject", value=None),
        _set("subject", 0, "name", value="other"),
        _set("subject", 1, "name", value=1),
        _set("subject", 1, "name", value="manifest"),
        _set("subject", 1, "digest", "sha512", value="00"),
        _set("predicate", value=[]),
        _set("predicate", "extra", value=1),
        _set("predicate", "verificationResult", value="FAILED"),
        _set("predicate", "verifiedLevels", value=[]),
        _set("predicate", "resourceUri", value="urn:other"),
        _set("predicate", "verifier", value={"id": 1}),
        _set("predicate", "policy", "uri", value="urn:other"),
        _set("predicate", "inputAttestations", 0, "uri", value=None),
        _set("predicate", "timeVerified", value="2026-11-30T12:00:00+00:00"),
        _set(
            "predicate", "urn:adapter-registry:verdict/v1#tenantId", value="{" + str(TENANT) + "}"
        ),
        _set("predicate", "urn:adapter-registry:verdict/v1#notAfter", value=None),
        lambda document: document["predicate"].pop("inputAttestations"),
        lambda document: document["predicate"].pop("urn:adapter-registry:verdict/v1#catalogDigest"),
    ],
)
def test_another_form_is_denied(change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(v.verdict_statement(CLAIMS))
    change(document)
    with pytest.raises(UntrustedError):
        verify(sign(canonical_json(document)))


@pytest.mark.parametrize("payload", [b"", b"[]", b"1", b"{}", v.verdict_statement(CLAIMS) + b" "])
def test_other_payloads_are_denied(payload: bytes) -> None:
    with pytest.raises(UntrustedError):
        verify(sign(payload))


def test_base_statement() -> None:
    def check(envelope: bytes, base: str = BASE.base_digest, now: datetime = NOW) -> v.BaseClaims:
        return v.base_verify(envelope, trusted=TRUSTED, base_digest=base, now=now)  # type: ignore[arg-type]  # a stand-in, or wrong on purpose

    envelope = sign(v.base_statement(BASE))
    assert check(envelope) == BASE
    with pytest.raises(UntrustedError, match="about"):
        check(envelope, base=digest_of(b"x"))
    with pytest.raises(UntrustedError, match="expired"):
        check(envelope, now=BASE.not_after)
    with pytest.raises(UntrustedError, match="another verifier"):
        check(sign(v.base_statement(replace(BASE, verifier_id="urn:other"))))
    renewed = replace(BASE, earlier_catalog_digests=(digest_of(b"1"), digest_of(b"2")))
    assert check(sign(v.base_statement(renewed))) == renewed
    assert renewed.catalog_digests == {BASE.catalog_digest, digest_of(b"1"), digest_of(b"2")}
    wrong = replace(BASE, earlier_catalog_digests=("sha256:short",))  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(UntrustedError):
        check(sign(v.base_statement(wrong)))
    # One kind of statement is never taken for the other.
    with pytest.raises(UntrustedError):
        check(ENVELOPE)
    with pytest.raises(UntrustedError):
        verify(envelope, adapter_digest=BASE.base_digest)
