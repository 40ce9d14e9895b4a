"""The identity sidecar of a page: what its KV was made under, whose it is, and which page it is.

It is canonical JSON (RFC 8785), lies beside the page in plain sight, and is the associated data
that the page is sealed with: neither can be changed or exchanged without the other.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from gpu_worker.serving.identity import Adapters, Identity, Layout
from registry_service.domain import limits
from registry_service.domain.canonical import canonical_json, json_parse
from registry_service.domain.digests import Digest, digest_parse
from registry_service.domain.errors import MalformedError
from registry_service.domain.names import subject_name
from registry_service.domain.text import shown
from registry_service.trust.routing_context import BASE_MARKER

_FORMAT: Final = "formatVersion"
_FIELDS: Final = frozenset(
    {
        *(_FORMAT, "tenantId", "baseDigest", "adapters", "tokenizerDigest", "chatTemplateDigest"),
        *("dtype", "layout", "engineVersion", "libraryVersions"),
        *("sessionId", "subject", "page", "tokenCount", "tokensDigest", "stateDigest", "keyId"),
    }
)


class Refusal(StrEnum):
    """Why a page is not restored."""

    MISSING = "missing"
    UNREADABLE = "unreadable"
    FORMAT = "format"
    NODE_KEY = "node key"
    TENANT = "tenant"
    SESSION = "session"
    SUBJECT = "subject"
    BASE = "base"
    COMBINATION = "combination"
    ADAPTER = "adapter"
    SCALE = "scale"
    TOKENIZER = "tokenizer"
    TEMPLATE = "chat template"
    DTYPE = "dtype"
    LAYOUT = "layout"
    ENGINE = "engine version"
    LIBRARIES = "library versions"
    OLDER_PAGE = "older page"
    SIDECAR = "changed sidecar"
    STATE = "changed state"
    LANE = "not taken by a lane"
    REVOKED = "revoked"


class SlotRefusedError(Exception):
    """A page that must not be restored. It never leaves the slots: the turn is prefilled cold."""

    def __init__(self, reason: Refusal, expected: object, got: object) -> None:
        super().__init__(reason)
        self.reason = reason
        self.expected = shown(expected)
        self.got = shown(got)


@dataclass(frozen=True, slots=True)
class Session:
    """Whose slot: a session of one subject, inside the identity's tenant."""

    session_id: str
    subject: str

    def __post_init__(self) -> None:
        text = self.session_id
        if not isinstance(text, str) or not 0 < len(text) <= limits.SESSION_CHARS:
            raise MalformedError(
                f"session: expected text of 1 to {limits.SESSION_CHARS} characters"
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise MalformedError("session: expected text, got a lone surrogate")
        subject_name(self.subject)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What stands beside a page. The digests of tokens and state are keyed by the node."""

    identity: Identity
    session: Session
    page: int
    token_count: int
    tokens_digest: Digest
    state_digest: Digest
    key_id: Digest

    def to_bytes(self) -> bytes:
        """The sidecar as RFC 8785 JSON."""
        identity, layout = self.identity, self.identity.layout
        adapters = identity.adapters
        return canonical_json(
            {
                _FORMAT: identity.format_version,
                "tenantId": str(identity.tenant_id),
                "baseDigest": identity.base_digest,
                "adapters": adapters
                if isinstance(adapters, str)
                else [{"digest": digest, "scale": scale} for digest, scale in adapters],
                "tokenizerDigest": identity.tokenizer_digest,
                "chatTemplateDigest": identity.chat_template_digest,
                "dtype": identity.dtype,
                "layout": {"layers": layout.layers, "blockTokens": layout.block_tokens},
                "engineVersion": identity.engine_version,
                "libraryVersions": dict(identity.library_versions),
                "sessionId": self.session.session_id,
                "subject": self.session.subject,
                "page": self.page,
                "tokenCount": self.token_count,
                "tokensDigest": self.tokens_digest,
                "stateDigest": self.state_digest,
                "keyId": self.key_id,
            }
        )


def sidecar_parse(content: bytes, format_version: int) -> Sidecar:
    """A sidecar of this format version, in exactly our form.

    The version is looked at first: what other versions hold is not known here.

    Raises:
        SlotRefusedError: FORMAT, COMBINATION or UNREADABLE.
    """
    try:
        document = json_parse(content, what="sidecar", limit=limits.SLOT_SIDECAR_BYTES)
        if not isinstance(document, dict):
            raise MalformedError("sidecar: expected an object")
        if document.get(_FORMAT) != format_version:
            raise SlotRefusedError(Refusal.FORMAT, format_version, document.get(_FORMAT))
        if set(document) != _FIELDS or canonical_json(document) != content:
            raise MalformedError("sidecar: expected exactly its fields, as RFC 8785 JSON")
        return _sidecar(document)
    except (MalformedError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SlotRefusedError(Refusal.UNREADABLE, "a sidecar", str(error)) from error


def identity_check(found: Identity, wanted: Identity) -> None:
    """Compare part by part what KV was made under with what a turn runs under.

    Raises:
        SlotRefusedError: the first part that differs.
    """
    for reason, got, expected in (
        (Refusal.FORMAT, found.format_version, wanted.format_version),
        (Refusal.TENANT, found.tenant_id, wanted.tenant_id),
        (Refusal.BASE, found.base_digest, wanted.base_digest),
        (Refusal.ADAPTER, found.adapter_digest, wanted.adapter_digest),
        (Refusal.SCALE, found.adapters, wanted.adapters),
        (Refusal.TOKENIZER, found.tokenizer_digest, wanted.tokenizer_digest),
        (Refusal.TEMPLATE, found.chat_template_digest, wanted.chat_template_digest),
        (Refusal.DTYPE, found.dtype, wanted.dtype),
        (Refusal.LAYOUT, found.layout, wanted.layout),
        (Refusal.ENGINE, found.engine_version, wanted.engine_version),
        (Refusal.LIBRARIES, found.library_versions, wanted.library_versions),
    ):
        same_check(reason, got, expected)


def same_check(reason: Refusal, got: object, expected: object) -> None:
    """Refuse for ``reason`` unless the two are equal, compared in constant time.

    Raises:
        SlotRefusedError: they differ.
    """
    # repr is exact for every type that stands in a sidecar.
    if not hmac.compare_digest(repr(got).encode(), repr(expected).encode()):
        raise SlotRefusedError(reason, expected, got)


def _sidecar(document: dict[str, Any]) -> Sidecar:
    layout = document["layout"]
    if set(layout) != {"layers", "blockTokens"}:
        raise MalformedError("sidecar: layout: expected exactly its fields")
    identity = Identity(
        format_version=document[_FORMAT],
        tenant_id=UUID(document["tenantId"]),
        base_digest=document["baseDigest"],
        adapters=_adapters(document["adapters"]),
        tokenizer_digest=document["tokenizerDigest"],
        chat_template_digest=document["chatTemplateDigest"],
        dtype=document["dtype"],
        layout=Layout(
            layers=tuple(tuple(layer) for layer in layout["layers"]),
            block_tokens=layout["blockTokens"],
        ),
        engine_version=document["engineVersion"],
        library_versions=tuple(sorted(document["libraryVersions"].items())),
    )
    return Sidecar(
        identity=identity,
        session=Session(document["sessionId"], document["subject"]),
        page=_whole(document["page"]),
        token_count=_whole(document["tokenCount"]),
        tokens_digest=digest_parse(document["tokensDigest"], "sidecar: tokensDigest"),
        state_digest=digest_parse(document["stateDigest"], "sidecar: stateDigest"),
        key_id=digest_parse(document["keyId"], "sidecar: keyId"),
    )


def _adapters(value: Any) -> Adapters:
    if value == BASE_MARKER:
        return BASE_MARKER
    if not isinstance(value, list) or len(value) != 1:
        got = len(value) if isinstance(value, list) else value
        raise SlotRefusedError(Refusal.COMBINATION, "exactly one adapter, or the base", got)
    pair = value[0]
    if set(pair) != {"digest", "scale"}:
        raise MalformedError("sidecar: adapters: expected digest and scale")
    scale = pair["scale"]
    # RFC 8785 writes 1.0 as 1.
    return ((pair["digest"], float(scale) if type(scale) is int else scale),)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise MalformedError("sidecar: expected a whole number from 1")
    return value
