"""Routing contexts: compact JWS (EdDSA) that say who a request is and which digest it runs.

For one node, one body, one use, and one minute.
Sources: RFC 7515 (JWS), RFC 8037 (EdDSA), RFC 8725 (fixed algorithm and type).
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol
from uuid import UUID

import jwt
from jwt.types import Options

from registry_service.domain import limits, names
from registry_service.domain.canonical import canonical_json, json_parse
from registry_service.domain.digests import Digest, digest_equal, digest_of, digest_parse
from registry_service.domain.errors import UntrustedError
from registry_service.trust.denial import denial
from registry_service.trust.keys import PublicKey, key_id

BASE_MARKER: Final = Digest("base")
_TYPE: Final = "routing-context+jwt"
_CLAIMS: Final = frozenset(
    {
        "iss",
        "aud",
        "iat",
        "exp",
        "jti",
        "tenantId",
        "tenant",
        "subject",
        "sessionId",
        "adapterId",
        "baseDigest",
        "adapterDigest",
        "tokenizerDigest",
        "chatTemplateDigest",
        "grantEpoch",
        "bodyDigest",
    }
)
_SEEN: Final = 100_000
_TOKEN_CHARS: Final = 16_384
_TEXT_CHARS: Final = 256
# Clocks of service and node may differ a little.
_SKEW_SECONDS: Final = 5


class _Signer(Protocol):
    @property
    def key_id(self) -> str: ...

    def sign(self, message: bytes) -> bytes: ...


@dataclass(frozen=True, slots=True)
class RoutingContext:
    """One request's identity. ``adapter_digest`` is ``BASE_MARKER`` for the base alone."""

    tenant_id: UUID
    tenant: str
    subject: str
    session_id: str
    adapter: str | None
    base_digest: Digest
    adapter_digest: Digest
    tokenizer_digest: Digest
    chat_template_digest: Digest
    grant_epoch: int
    node: str
    jti: str
    issued_at: datetime
    expires_at: datetime
    body_digest: Digest


def routing_context_sign(context: RoutingContext, issuer: str, signer: _Signer) -> str:
    """The context as a compact JWS."""
    header = {"alg": "EdDSA", "typ": _TYPE, "kid": signer.key_id}
    claims = {
        "iss": issuer,
        "aud": context.node,
        "iat": int(context.issued_at.timestamp()),
        "exp": int(context.expires_at.timestamp()),
        "jti": context.jti,
        "tenantId": str(context.tenant_id),
        "tenant": context.tenant,
        "subject": context.subject,
        "sessionId": context.session_id,
        "adapterId": context.adapter,
        "baseDigest": context.base_digest,
        "adapterDigest": context.adapter_digest,
        "tokenizerDigest": context.tokenizer_digest,
        "chatTemplateDigest": context.chat_template_digest,
        "grantEpoch": context.grant_epoch,
        "bodyDigest": context.body_digest,
    }
    # Signed through the port, whose key may be out of reach of a JWT library.
    signed = b".".join(_encode(canonical_json(part)) for part in (header, claims))
    return (signed + b"." + _encode(signer.sign(signed))).decode()


@denial("not a routing context that this node accepts")
def routing_context_verify(
    token: str,
    *,
    public_key: PublicKey,
    issuer: str,
    node: str,
    base_digest: Digest,
    body: bytes,
    now: datetime,
) -> RoutingContext:
    """The context of a request that holds here and now.

    1. signed by the pinned key; 2. in exactly our form; 3. by the pinned issuer, for this node;
    4. for this base; 5. for this body; 6. in its time. Any error is a denial.

    Raises:
        UntrustedError: the first of these that does not hold.
    """
    claims = _claims(token, public_key)
    context = _context(claims)
    for got, expected in ((claims["iss"], issuer), (context.node, node)):
        if not hmac.compare_digest(got.encode(), expected.encode()):
            raise UntrustedError("a routing context of another issuer or for another node")
    if not digest_equal(context.base_digest, base_digest):
        raise UntrustedError("a routing context for another base")
    if not digest_equal(context.body_digest, digest_of(body)):
        raise UntrustedError("a routing context for another body")
    expiry_check(context, now)
    return context


def expiry_check(context: RoutingContext, now: datetime) -> None:
    """Refuse a context that is over, not begun, or longer than we mint; also after the queue.

    Raises:
        UntrustedError: it is.
    """
    life = (context.expires_at - context.issued_at).total_seconds()
    early = (context.issued_at - now).total_seconds()
    if now >= context.expires_at or early > _SKEW_SECONDS or life > limits.ROUTING_CONTEXT_SECONDS:
        raise UntrustedError("a routing context that is expired or not valid yet")


class SeenContexts:
    """Remembers the contexts that were used until they expire, so that each serves once.

    One instance a node. Contexts are remembered in this process: a node that restarts may see one
    again within its minute.
    """

    def __init__(self, now: Callable[[], datetime], *, limit: int = _SEEN) -> None:
        self._now = now
        self._limit = limit
        self._seen: dict[str, tuple[datetime]] = {}

    def claim(self, jti: str, expires_at: datetime) -> None:
        """Use a context up. Safe to call from several threads.

        Raises:
            UntrustedError: it was used or is over, or too many are remembered to tell.
        """
        now = self._now()
        if now >= expires_at:
            raise UntrustedError("a routing context that is expired")
        if len(self._seen) >= self._limit:
            for old, (end,) in list(self._seen.items()):
                if end <= now:
                    self._seen.pop(old, None)
            if len(self._seen) >= self._limit:
                raise UntrustedError("too many requests at once to tell used contexts apart")
        mark = (expires_at,)
        # setdefault is one step: of two threads with the same context only one gets its own mark.
        if self._seen.setdefault(jti, mark) is not mark:
            raise UntrustedError("a routing context that was used before")


def _claims(token: str, public_key: PublicKey) -> dict[str, Any]:
    if len(token) > _TOKEN_CHARS:
        raise UntrustedError("a routing context that is too long")
    # Times, issuer and audience are checked by us, against a clock that is handed in.
    unchecked: Options = {
        "verify_exp": False,
        "verify_iat": False,
        "verify_nbf": False,
        "verify_aud": False,
        "verify_iss": False,
        "verify_jti": False,
        "verify_sub": False,
    }
    jwt.decode_complete(
        token,
        public_key,
        algorithms=["EdDSA"],
        options=unchecked,
    )
    # PyJWT's JSON takes duplicate keys and more; what counts is what the strict parser reads.
    first, second, _ = token.split(".")
    header, claims = _part(first), _part(second)
    if set(header) != {"alg", "typ", "kid"} or (header["alg"], header["typ"]) != ("EdDSA", _TYPE):
        raise UntrustedError("a token of another kind than a routing context")
    if not hmac.compare_digest(header["kid"].encode(), key_id(public_key).encode()):
        raise UntrustedError("a routing context signed by another key than the pinned one")
    if set(claims) != _CLAIMS:
        raise UntrustedError("a routing context with unknown or missing claims")
    return claims


def _part(text: str) -> dict[str, Any]:
    raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    value = json_parse(raw, what="routing context", limit=_TOKEN_CHARS)
    if not isinstance(value, dict) or canonical_json(value) != raw:
        raise UntrustedError("a routing context in another form than RFC 8785 JSON")
    return value


def _context(claims: dict[str, Any]) -> RoutingContext:
    adapter, digest = claims["adapterId"], claims["adapterDigest"]
    if (adapter is None) != (digest == BASE_MARKER):
        raise UntrustedError("a routing context that mixes adapter and base")
    _text(claims["iss"])
    return RoutingContext(
        tenant_id=UUID(claims["tenantId"]),
        tenant=names.tenant_name(claims["tenant"]),
        subject=names.subject_name(claims["subject"]),
        session_id=_text(claims["sessionId"]),
        adapter=None if adapter is None else names.adapter_name(adapter),
        base_digest=digest_parse(claims["baseDigest"]),
        adapter_digest=BASE_MARKER if adapter is None else digest_parse(digest),
        tokenizer_digest=digest_parse(claims["tokenizerDigest"]),
        chat_template_digest=digest_parse(claims["chatTemplateDigest"]),
        grant_epoch=_whole(claims["grantEpoch"]),
        node=names.node_name(claims["aud"]),
        jti=_text(claims["jti"]),
        issued_at=datetime.fromtimestamp(_whole(claims["iat"]), UTC),
        expires_at=datetime.fromtimestamp(_whole(claims["exp"]), UTC),
        body_digest=digest_parse(claims["bodyDigest"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _TEXT_CHARS:
        raise UntrustedError(f"expected text of 1 to {_TEXT_CHARS} characters")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UntrustedError("expected a whole number")
    return value


def _encode(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
