"""securesystemslib as the oracle of our DSSE, in both directions."""

from __future__ import annotations

import json

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from registry_service.domain.errors import UntrustedError
from registry_service.trust.dsse import (
    IN_TOTO,
    dsse_sign,
    dsse_verify,
    pre_authentication_encoding,
)
from registry_service.trust.keys import key_id

PAYLOADS = [b"", b"{}", b"x" * 1000, bytes(range(256))]
KEYS: list[Ed25519PrivateKey | ec.EllipticCurvePrivateKey] = [
    Ed25519PrivateKey.generate(),
    ec.generate_private_key(ec.SECP256R1()),
]


def sign(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, message: bytes) -> bytes:
    if isinstance(key, Ed25519PrivateKey):
        return key.sign(message)
    return key.sign(message, ec.ECDSA(hashes.SHA256()))


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("key", KEYS, ids=["ed25519", "p256"])
def test_the_oracle_accepts_ours(
    key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, payload: bytes
) -> None:
    ours = dsse_sign(IN_TOTO, payload, lambda m: sign(key, m), key_id(key.public_key()))
    envelope = Envelope.from_dict(json.loads(ours))
    assert envelope.pae() == pre_authentication_encoding(IN_TOTO, payload)
    theirs = SSlibKey.from_crypto(key.public_key(), key_id(key.public_key()))
    assert envelope.verify([theirs], 1)
    envelope.payload += b"x"
    with pytest.raises(VerificationError):
        envelope.verify([theirs], 1)


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("key", KEYS, ids=["ed25519", "p256"])
def test_we_accept_the_oracles(
    key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, payload: bytes
) -> None:
    public = key.public_key()
    envelope = Envelope(payload, IN_TOTO, {})
    envelope.sign(CryptoSigner(key, SSlibKey.from_crypto(public, key_id(public))))
    theirs = json.dumps(envelope.to_dict()).encode()
    assert dsse_verify(theirs, public, IN_TOTO) == payload
    with pytest.raises(UntrustedError):
        dsse_verify(theirs, KEYS[1 - KEYS.index(key)].public_key(), IN_TOTO)
