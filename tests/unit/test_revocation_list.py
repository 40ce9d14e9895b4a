"""The revocation list: who signed what, in which form, and whom an entry names."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from registry_service.backends.file_signer import FileSigner
from registry_service.domain import limits
from registry_service.domain.canonical import canonical_json
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import UntrustedError
from registry_service.trust.dsse import IN_TOTO, dsse_sign
from registry_service.trust.keys import public_key_parse
from registry_service.trust.revocation_list import (
    PAYLOAD_TYPE,
    RevocationList,
    Revoked,
    RevokedIndex,
    revocation_list_payload,
    revocation_list_verify,
)

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
ISSUER = "urn:registry"
TENANT, OTHER = UUID(int=1), UUID(int=2)
ADAPTER, WEIGHTS, CONTENT = digest_of(b"adapter"), digest_of(b"weights"), digest_of(b"content")
ENTRY = Revoked(ADAPTER, WEIGHTS, CONTENT, None, NOW + timedelta(seconds=30))
BARE = Revoked(digest_of(b"bare"), None, None, TENANT, None)
LIST = RevocationList(7, ISSUER, NOW, NOW + timedelta(minutes=10), (ENTRY, BARE))


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> FileSigner:
    return FileSigner.create(tmp_path_factory.mktemp("keys") / "key.pem")


def sign(payload: bytes, signer: FileSigner, kind: str = PAYLOAD_TYPE) -> bytes:
    return dsse_sign(kind, payload, signer.sign, signer.key_id)


def verify(envelope: bytes, signer: FileSigner, now: datetime = NOW) -> RevocationList:
    key = public_key_parse(signer.public_pem)
    return revocation_list_verify(envelope, public_key=key, issuer=ISSUER, now=now)


def test_what_was_signed_is_read_back(signer: FileSigner) -> None:
    assert verify(sign(revocation_list_payload(LIST), signer), signer) == LIST
    assert LIST.half_at == NOW + timedelta(minutes=5)


@pytest.mark.parametrize(
    ("seconds", "reason"), [(600, "expired at"), (3600, "expired at"), (-61, "in the future")]
)
def test_a_list_holds_until_it_expires_and_not_before_it_is_issued(
    signer: FileSigner, seconds: int, reason: str
) -> None:
    envelope = sign(revocation_list_payload(LIST), signer)
    assert verify(envelope, signer, NOW + timedelta(seconds=599)) == LIST
    assert verify(envelope, signer, NOW - timedelta(seconds=60)) == LIST
    with pytest.raises(UntrustedError, match=reason):
        verify(envelope, signer, NOW + timedelta(seconds=seconds))


def test_another_key_and_another_purpose_are_refused(signer: FileSigner, tmp_path: Any) -> None:
    payload = revocation_list_payload(LIST)
    other = FileSigner.create(tmp_path / "other.pem")
    with pytest.raises(UntrustedError, match="another key"):
        verify(sign(payload, other), signer)
    with pytest.raises(UntrustedError, match="payload of type"):
        verify(sign(payload, signer, IN_TOTO), signer)


def test_another_issuer_is_refused(signer: FileSigner) -> None:
    payload = revocation_list_payload(
        RevocationList(7, "urn:other", NOW, LIST.expires_at, LIST.entries)
    )
    with pytest.raises(UntrustedError, match="another issuer"):
        verify(sign(payload, signer), signer)


CHANGES: list[dict[str, Any]] = [
    {"surprise": 1},
    {"number": 0},
    {"number": -1},
    {"number": True},
    {"number": "7"},
    {"number": 7.5},
    {"issuedAt": "2026-11-30T12:00:00+00:00"},
    {"expiresAt": None},
    {"issuer": ""},
    {"entries": None},
    {"entries": [{}]},
    {"entries": [{"adapterDigest": "x"}]},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_another_form_is_refused(signer: FileSigner, change: dict[str, Any]) -> None:
    document = json.loads(revocation_list_payload(LIST)) | change
    with pytest.raises(UntrustedError):
        verify(sign(canonical_json(document), signer), signer)


@pytest.mark.parametrize("field", ["number", "issuer", "issuedAt", "expiresAt", "entries"])
def test_a_missing_field_is_refused(signer: FileSigner, field: str) -> None:
    document = json.loads(revocation_list_payload(LIST))
    del document[field]
    with pytest.raises(UntrustedError, match="expected form"):
        verify(sign(canonical_json(document), signer), signer)


def test_every_changed_byte_of_an_envelope_is_refused(signer: FileSigner) -> None:
    envelope = sign(revocation_list_payload(LIST), signer)
    for position in range(0, len(envelope), 7):
        changed = bytearray(envelope)
        changed[position] ^= 1
        with pytest.raises(UntrustedError):
            verify(bytes(changed), signer)


def test_the_payload_of_an_envelope_is_canonical_json(signer: FileSigner) -> None:
    envelope = json.loads(sign(revocation_list_payload(LIST), signer))
    document = json.loads(base64.b64decode(envelope["payload"]))
    assert canonical_json(document) == revocation_list_payload(LIST)
    assert document["entries"][1] == {
        "adapterDigest": BARE.adapter_digest,
        "weightsDigest": None,
        "contentDigest": None,
        "tenantId": str(TENANT),
        "cancelAt": None,
    }


def test_an_entry_names_its_adapter_and_the_same_bytes_in_another_package() -> None:
    index = RevokedIndex(LIST.entries)
    another = digest_of(b"another package")
    assert index.find(TENANT, ADAPTER) == ENTRY
    assert index.find(TENANT, another, WEIGHTS, digest_of(b"x")) == ENTRY
    assert index.find(TENANT, another, digest_of(b"x"), CONTENT) == ENTRY
    assert index.find(TENANT, another, digest_of(b"x"), digest_of(b"y")) is None
    assert index.find(TENANT, another) is None


def test_what_a_tenant_revoked_is_revoked_for_itself() -> None:
    index = RevokedIndex((Revoked(ADAPTER, WEIGHTS, CONTENT, TENANT, None),))
    another = digest_of(b"another package")
    assert index.find(TENANT, another, WEIGHTS) is not None
    assert index.find(OTHER, another, WEIGHTS, CONTENT) is None


def test_the_most_urgent_of_several_entries_counts() -> None:
    late = Revoked(digest_of(b"late"), WEIGHTS, None, None, NOW + timedelta(days=1))
    never = Revoked(digest_of(b"never"), WEIGHTS, None, None, None)
    index = RevokedIndex((never, late, ENTRY))
    assert index.find(TENANT, digest_of(b"another package"), WEIGHTS) == ENTRY


def test_as_many_entries_as_a_list_may_have_fit_in_what_a_node_takes(signer: FileSigner) -> None:
    longest = Revoked(ADAPTER, WEIGHTS, CONTENT, TENANT, NOW)
    few, more = (
        len(sign(revocation_list_payload(replace(LIST, entries=(longest,) * count)), signer))
        for count in (30, 60)
    )
    # Equal entries are equally long in the envelope, but for base64's padding.
    each = (more - few + 4) / 30
    assert few + each * limits.REVOCATION_LIST_ENTRIES < limits.REVOCATION_LIST_BYTES
