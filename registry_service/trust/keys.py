"""Public keys: Ed25519 or ECDSA P-256, named by the SHA-256 of their DER form."""

from __future__ import annotations

import hashlib
from typing import TypeAlias

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from registry_service.domain.errors import MalformedError, UntrustedError

PublicKey: TypeAlias = Ed25519PublicKey | ec.EllipticCurvePublicKey


def public_key_parse(pem: str) -> PublicKey:
    """A public key from PEM.

    Raises:
        MalformedError: not PEM, or a key of another kind than Ed25519 and ECDSA P-256.
    """
    try:
        key = serialization.load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise MalformedError("public key: expected PEM (SubjectPublicKeyInfo)") from error
    if isinstance(key, Ed25519PublicKey):
        return key
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise MalformedError("public key: expected Ed25519 or ECDSA P-256")


def key_id(key: PublicKey) -> str:
    """``sha256:<hex>`` of the key's DER SubjectPublicKeyInfo."""
    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return "sha256:" + hashlib.sha256(der).hexdigest()


def signature_check(key: PublicKey, signature: bytes, message: bytes) -> None:
    """Verify a signature.

    Raises:
        UntrustedError: it does not verify.
    """
    try:
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, message)
        else:
            key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, TypeError) as error:
        raise UntrustedError("the signature does not verify") from error
