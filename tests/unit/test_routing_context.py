"""Routing contexts: one node, one base, one body, one minute, one use."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from registry_service.domain.canonical import canonical_json
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import UntrustedError
from registry_service.trust import routing_context as r
from registry_service.trust.keys import key_id

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
BODY = b'{"prompt":"hello"}'


class Signer:
    def __init__(self, seed: int = 0) -> None:
        self.key = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
        self.key_id = key_id(self.key.public_key())

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message)


SIGNER = Signer()
CONTEXT = r.RoutingContext(
    tenant_id=UUID(int=1),
    tenant="t-1042",
    subject="user@example",
    session_id="session-1",
    adapter="support-zh",
    base_digest=digest_of(b"base"),
    adapter_digest=digest_of(b"adapter"),
    tokenizer_digest=digest_of(b"tokenizer"),
    chat_template_digest=digest_of(b"template"),
    grant_epoch=3,
    node="node-1",
    jti="0001",
    issued_at=NOW,
    expires_at=NOW + timedelta(seconds=60),
    body_digest=digest_of(BODY),
)
TOKEN = r.routing_context_sign(CONTEXT, "urn:registry", SIGNER)


def verify(token: str, **changes: Any) -> r.RoutingContext:
    wanted: dict[str, Any] = {
        "public_key": SIGNER.key.public_key(),
        "issuer": "urn:registry",
        "node": "node-1",
        "base_digest": CONTEXT.base_digest,
        "body": BODY,
        "now": NOW,
    }
    return r.routing_context_verify(token, **wanted | changes)


def test_round_trip() -> None:
    assert verify(TOKEN) == CONTEXT
    base = replace(CONTEXT, adapter=None, adapter_digest=r.BASE_MARKER, grant_epoch=0)
    assert verify(r.routing_context_sign(base, "urn:registry", SIGNER)) == base


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"issuer": "urn:other"}, "issuer"),
        ({"node": "node-2"}, "node"),
        ({"base_digest": digest_of(b"x")}, "base"),
        ({"body": BODY + b" "}, "body"),
        ({"now": CONTEXT.expires_at}, "expired"),
        ({"now": NOW - timedelta(seconds=6)}, "not valid yet"),
        ({"now": NOW.replace(tzinfo=None)}, "not a routing context"),
        ({"public_key": Signer(1).key.public_key()}, "not a routing context"),
        ({"public_key": ec.generate_private_key(ec.SECP256R1()).public_key()}, "not a routing"),
    ],
)
def test_a_context_for_something_else_is_denied(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UntrustedError, match=reason):
        verify(TOKEN, **changes)


def test_a_long_life_is_denied() -> None:
    long = replace(CONTEXT, expires_at=NOW + timedelta(hours=1))
    with pytest.raises(UntrustedError):
        verify(r.routing_context_sign(long, "urn:registry", SIGNER))


def made(claims: dict[str, Any], header: dict[str, Any] | None = None, raw: bytes = b"") -> str:
    """A token in any form, signed with the right key."""
    head = {"alg": "EdDSA", "typ": "routing-context+jwt", "kid": SIGNER.key_id} | (header or {})
    parts = (canonical_json(head), raw or canonical_json(claims))
    signed = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    signature = base64.urlsafe_b64encode(SIGNER.sign(signed)).rstrip(b"=")
    return (signed + b"." + signature).decode()


CLAIMS: dict[str, Any] = jwt.decode(TOKEN, options={"verify_signature": False})


def test_made_makes_what_is_accepted() -> None:
    assert verify(made(CLAIMS)) == CONTEXT


@pytest.mark.parametrize(
    "claims",
    [
        {"extra": 1},
        {"iat": 1.5},
        {"iat": True},
        {"exp": "1"},
        {"exp": 10**15},
        {"jti": ""},
        {"jti": 1},
        {"sessionId": "x" * 257},
        {"tenantId": "x"},
        {"tenant": "../x"},
        {"subject": "a b"},
        {"adapterId": 1},
        {"adapterId": None},
        {"adapterDigest": "base"},
        {"adapterDigest": None},
        {"aud": ["node-1"]},
        {"iss": None},
        {"grantEpoch": -1},
        {"grantEpoch": "3"},
        {"bodyDigest": None},
    ],
)
def test_another_claim_is_denied(claims: dict[str, Any]) -> None:
    with pytest.raises(UntrustedError):
        verify(made(CLAIMS | claims))


@pytest.mark.parametrize("name", sorted(CLAIMS))
def test_a_missing_claim_is_denied(name: str) -> None:
    with pytest.raises(UntrustedError):
        verify(made({key: value for key, value in CLAIMS.items() if key != name}))


@pytest.mark.parametrize(
    "token",
    [
        "",
        "a.b.c",
        "é.b.c",
        "x" * 20_000,
        TOKEN + "x",
        TOKEN.rsplit(".", 1)[0] + ".",
        made(CLAIMS, {"alg": "none"}),
        made(CLAIMS, {"alg": "HS256"}),
        made(CLAIMS, {"typ": "JWT"}),
        made(CLAIMS, {"kid": "other"}),
        made(CLAIMS, {"kid": None}),
        made(CLAIMS, {"jku": "http://x"}),
        made(CLAIMS, raw=b" " + canonical_json(CLAIMS)),
        made(CLAIMS, raw=canonical_json(CLAIMS)[:-1] + b',"jti":"0001"}'),
        made(CLAIMS, raw=b"[]"),
        jwt.encode(CLAIMS, "k" * 32, "HS256"),
    ],
)
def test_another_form_is_denied(token: str) -> None:
    with pytest.raises(UntrustedError):
        verify(token)


def test_a_context_serves_once() -> None:
    seen = r.SeenContexts(lambda: NOW)
    seen.claim("a", CONTEXT.expires_at)
    seen.claim("b", CONTEXT.expires_at)
    with pytest.raises(UntrustedError, match="used before"):
        seen.claim("a", CONTEXT.expires_at)
    with pytest.raises(UntrustedError, match="expired"):
        seen.claim("c", NOW)


def test_memory_is_bounded_and_forgets_only_what_is_over() -> None:
    now = [NOW]
    seen = r.SeenContexts(lambda: now[0], limit=2)
    seen.claim("a", NOW + timedelta(seconds=10))
    seen.claim("b", NOW + timedelta(seconds=60))
    with pytest.raises(UntrustedError, match="too many"):
        seen.claim("c", NOW + timedelta(seconds=60))
    now[0] += timedelta(seconds=10)
    seen.claim("c", NOW + timedelta(seconds=60))
    with pytest.raises(UntrustedError):
        seen.claim("b", NOW + timedelta(seconds=60))


def test_of_many_threads_one_gets_a_context() -> None:
    seen = r.SeenContexts(lambda: NOW)

    def claim(_: int) -> bool:
        try:
            seen.claim("a", CONTEXT.expires_at)
        except UntrustedError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(claim, range(200))) == 1
