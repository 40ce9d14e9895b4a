"""What a node pins: who may sign verdicts, and who may sign routing contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from registry_service.domain.canonical import json_parse
from registry_service.domain.errors import MalformedError
from registry_service.trust.keys import PublicKey, public_key_parse
from registry_service.trust.verdict import TrustedVerifier


@dataclass(frozen=True, slots=True)
class Trust:
    """The pinned keys and names."""

    verifiers: tuple[TrustedVerifier, ...]
    routing_key: PublicKey
    routing_issuer: str


def trust_parse(content: bytes) -> Trust:
    """Parse ``trust.json``.

    Raises:
        MalformedError: a missing or unknown field, or a key that cannot be read.
    """
    document = json_parse(content, what="trust.json", limit=64 * 1024)
    if not isinstance(document, dict) or set(document) != {"verdict", "routingContext"}:
        raise MalformedError("trust.json: expected exactly verdict and routingContext")
    key, verifier = _pair(document["verdict"], "verdict", "verifierId")
    routing_key, issuer = _pair(document["routingContext"], "routingContext", "issuer")
    return Trust((TrustedVerifier(key, verifier),), routing_key, issuer)


def _pair(value: Any, what: str, name: str) -> tuple[PublicKey, str]:
    if not isinstance(value, dict) or set(value) != {"publicKey", name}:
        raise MalformedError(f"trust.json: {what}: expected exactly publicKey and {name}")
    if not all(isinstance(text, str) and text for text in value.values()):
        raise MalformedError(f"trust.json: {what}: expected text")
    return public_key_parse(value["publicKey"]), value[name]
