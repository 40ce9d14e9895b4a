"""DSSE: one signature by the pinned key over type and payload; anything else is a denial."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from registry_service.domain.errors import MalformedError, UntrustedError
from registry_service.trust.dsse import (
    IN_TOTO,
    dsse_sign,
    dsse_verify,
    pre_authentication_encoding,
)
from registry_service.trust.keys import key_id, public_key_parse

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = KEY.public_key()
ENVELOPE = dsse_sign(IN_TOTO, b"payload", KEY.sign, key_id(PUBLIC))


def pem(key: Any) -> str:
    encoded: bytes = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return encoded.decode()


def test_pae_of_the_specification() -> None:
    expected = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert pre_authentication_encoding("http://example.com/HelloWorld", b"hello world") == expected


def test_round_trip_with_both_kinds_of_keys() -> None:
    assert dsse_verify(ENVELOPE, PUBLIC, IN_TOTO) == b"payload"
    key = ec.generate_private_key(ec.SECP256R1())
    public = public_key_parse(pem(key.public_key()))
    envelope = dsse_sign(
        IN_TOTO, b"x", lambda data: key.sign(data, ec.ECDSA(hashes.SHA256())), key_id(public)
    )
    assert dsse_verify(envelope, public, IN_TOTO) == b"x"


def test_another_key_or_type_is_denied() -> None:
    other = Ed25519PrivateKey.generate().public_key()
    with pytest.raises(UntrustedError, match="another key"):
        dsse_verify(ENVELOPE, other, IN_TOTO)
    # The key id is only a hint: with the right one, the signature still has to be right.
    forged = dsse_sign(IN_TOTO, b"payload", KEY.sign, key_id(other))
    with pytest.raises(UntrustedError, match="does not verify"):
        dsse_verify(forged, other, IN_TOTO)
    with pytest.raises(UntrustedError, match="type"):
        dsse_verify(ENVELOPE, PUBLIC, "text/plain")


def altered(**fields: object) -> bytes:
    return json.dumps(json.loads(ENVELOPE) | fields).encode()


SIGNATURE = json.loads(ENVELOPE)["signatures"][0]


@pytest.mark.parametrize(
    "envelope",
    [
        b"",
        b"[]",
        b"1",
        b"null",
        b"\xff",
        b"[" * 100_000,
        ENVELOPE.replace(b"{", b'{"payload":"",', 1),
        altered(payload=base64.b64encode(b"Payload").decode()),
        altered(payload="cGF5bG9hZB=="),
        altered(payload="cGF5bG9hZA==\n"),
        altered(payload=1),
        altered(payloadType="text/plain"),
        altered(payloadType=["x"]),
        altered(signatures=[]),
        altered(signatures=[SIGNATURE, SIGNATURE]),
        altered(signatures={"0": SIGNATURE}),
        altered(signatures=["x"]),
        altered(signatures=[SIGNATURE | {"cert": ""}]),
        altered(signatures=[SIGNATURE | {"sig": ""}]),
        altered(signatures=[SIGNATURE | {"sig": None}]),
        altered(extra=1),
    ],
)
def test_anything_else_is_denied(envelope: bytes) -> None:
    with pytest.raises(UntrustedError):
        dsse_verify(envelope, PUBLIC, IN_TOTO)


def test_every_flipped_bit_is_denied() -> None:
    for index in range(len(ENVELOPE)):
        spoiled = bytearray(ENVELOPE)
        spoiled[index] ^= 1
        with pytest.raises(UntrustedError):
            dsse_verify(bytes(spoiled), PUBLIC, IN_TOTO)


def test_odd_errors_are_denials_too() -> None:
    with pytest.raises(UntrustedError):
        dsse_verify(ENVELOPE, object(), IN_TOTO)  # type: ignore[arg-type]  # a stand-in, or wrong on purpose


def test_only_two_kinds_of_keys() -> None:
    for text in (
        "",
        "-----BEGIN PUBLIC KEY-----",
        pem(ec.generate_private_key(ec.SECP384R1()).public_key()),
    ):
        with pytest.raises(MalformedError):
            public_key_parse(text)
