"""What a node pins: who may sign verdicts, routing contexts and the revocation list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from registry_service.domain.canonical import json_parse
from registry_service.domain.errors import MalformedError
from registry_service.trust.keys import PublicKey, key_id, public_key_parse
from registry_service.trust.verdict import TrustedVerifier

_PURPOSES: Final = frozenset({"verdict", "routingContext", "revocationList"})


@dataclass(frozen=True, slots=True)
class Trust:
    """The pinned keys and names."""

    verifiers: tuple[TrustedVerifier, ...]
    routing_key: PublicKey
    routing_issuer: str
    list_key: PublicKey
    list_issuer: str


def trust_parse(content: bytes) -> Trust:
    """Parse ``trust.json``.

    Raises:
        MalformedError: a missing or unknown field, a key that cannot be read, or one key for two
            purposes.
    """
    document = json_parse(content, what="trust.json", limit=64 * 1024)
    if not isinstance(document, dict) or set(document) != _PURPOSES:
        raise MalformedError(
            "trust.json: expected exactly verdict, routingContext and revocationList; "
            "make it with 'python -m registry_service keys'"
        )
    key, verifier = _pair(document["verdict"], "verdict", "verifierId")
    routing_key, issuer = _pair(document["routingContext"], "routingContext", "issuer")
    list_key, list_issuer = _pair(document["revocationList"], "revocationList", "issuer")
    if len({key_id(each) for each in (key, routing_key, list_key)}) != len(_PURPOSES):
        raise MalformedError("trust.json: expected a key of its own for each purpose")
    return Trust((TrustedVerifier(key, verifier),), routing_key, issuer, list_key, list_issuer)


def _pair(value: Any, what: str, name: str) -> tuple[PublicKey, str]:
    if not isinstance(value, dict) or set(value) != {"publicKey", name}:
        raise MalformedError(f"trust.json: {what}: expected exactly publicKey and {name}")
    if not all(isinstance(text, str) and text for text in value.values()):
        raise MalformedError(f"trust.json: {what}: expected text")
    return public_key_parse(value["publicKey"]), value[name]
