"""Verdicts: signed verification summaries (SLSA VSA v1) over an artifact or a base.

A verdict says that an adapter digest was admitted on one base digest, for one tenant, under one
policy, until a time. A summary has no expiry of its own, so ``notAfter`` and what else we need
stand under URI-named extensions.
Sources: in-toto Statement v1; https://slsa.dev/verification_summary/v1.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from registry_service.domain.digests import Digest, digest_equal, digest_parse
from registry_service.domain.errors import UntrustedError
from registry_service.trust.denial import denial
from registry_service.trust.dsse import IN_TOTO, dsse_verify
from registry_service.trust.keys import PublicKey
from registry_service.trust.statement import (
    digest_read,
    extensions_read,
    statement_read,
    statement_write,
    text_read,
    time_parse,
    time_text,
)

_EXTENSION: Final = "urn:adapter-registry:verdict/v1#"
_BASE_EXTENSION: Final = "urn:adapter-registry:base/v1#"
_EARLIER: Final = "earlierCatalogDigests"
_MANIFEST_NAME: Final = "manifest"


@dataclass(frozen=True, slots=True)
class VerdictClaims:
    """What a verdict states about an artifact. Times in UTC, to the second."""

    adapter_digest: Digest
    base_digest: Digest
    tenant_id: UUID
    tenant: str
    adapter: str
    files: tuple[tuple[str, Digest], ...]
    catalog_digest: Digest
    policy_digest: Digest
    input_attestations: tuple[tuple[str, Digest], ...]
    issued_at: datetime
    not_after: datetime
    verifier_id: str


@dataclass(frozen=True, slots=True)
class BaseClaims:
    """What the statement that admitted a base says.

    ``catalog_digest`` is the catalog that artifacts are checked against from now on. The earlier
    ones were admitted, too: what was checked against them goes on, and so do nodes that made them.
    """

    base_digest: Digest
    name: str
    catalog_digest: Digest
    policy_digest: Digest
    issued_at: datetime
    not_after: datetime
    verifier_id: str
    earlier_catalog_digests: tuple[Digest, ...] = ()

    @property
    def catalog_digests(self) -> frozenset[Digest]:
        """Every catalog that the base was admitted with."""
        return frozenset({self.catalog_digest, *self.earlier_catalog_digests})


@dataclass(frozen=True, slots=True)
class TrustedVerifier:
    """A pinned pair: this key may speak as this verifier."""

    public_key: PublicKey
    verifier_id: str


def verdict_statement(claims: VerdictClaims) -> bytes:
    """The statement to sign, as canonical JSON. The adapter digest is the first subject."""
    extensions = {
        "tenantId": str(claims.tenant_id),
        "tenant": claims.tenant,
        "adapter": claims.adapter,
        "baseModelDigest": claims.base_digest,
        "catalogDigest": claims.catalog_digest,
        "notAfter": time_text(claims.not_after),
    }
    subjects = [(_MANIFEST_NAME, claims.adapter_digest), *sorted(claims.files)]
    return statement_write(
        subjects,
        verifier_id=claims.verifier_id,
        issued_at=claims.issued_at,
        resource=claims.adapter_digest,
        policy_digest=claims.policy_digest,
        attestations=claims.input_attestations,
        extensions={_EXTENSION + name: value for name, value in extensions.items()},
    )


def base_statement(claims: BaseClaims) -> bytes:
    """The statement that admits a base with its catalog."""
    extensions: dict[str, str | list[str]] = {
        "name": claims.name,
        "catalogDigest": claims.catalog_digest,
        _EARLIER: list(claims.earlier_catalog_digests),
        "notAfter": time_text(claims.not_after),
    }
    return statement_write(
        [(_MANIFEST_NAME, claims.base_digest)],
        verifier_id=claims.verifier_id,
        issued_at=claims.issued_at,
        resource=claims.base_digest,
        policy_digest=claims.policy_digest,
        attestations=(),
        extensions={_BASE_EXTENSION + name: value for name, value in extensions.items()},
    )


@denial("not a verdict that can be checked")
def verdict_verify(
    envelope: bytes,
    *,
    trusted: tuple[TrustedVerifier, ...],
    adapter_digest: Digest,
    base_digest: Digest,
    tenant_id: UUID | None,
    now: datetime,
) -> VerdictClaims:
    """The claims of a verdict that holds here and now.

    1. signed by a pinned key; 2. in exactly our form; 3. by the verifier id pinned with that key;
    4. for this adapter, base and tenant (``tenant_id`` None: any); 5. not expired, not from the
    future.

    Raises:
        UntrustedError: the first of these that does not hold.
    """
    signers, payload = _payload(envelope, trusted)
    with denial("not a verdict in the expected form"):
        claims = _verdict_parse(payload)
    _verifier_check(claims.verifier_id, signers)
    if not digest_equal(claims.adapter_digest, adapter_digest):
        raise UntrustedError(f"a verdict about {claims.adapter_digest}, expected {adapter_digest}")
    if not digest_equal(claims.base_digest, base_digest):
        raise UntrustedError(f"a verdict for base {claims.base_digest}, expected {base_digest}")
    if tenant_id is not None:
        same = hmac.compare_digest(claims.tenant_id.bytes, tenant_id.bytes)
        if not same:
            raise UntrustedError("a verdict for another tenant than expected")
    _time_check(claims.issued_at, claims.not_after, now)
    return claims


@denial("not a base statement that can be checked")
def base_verify(
    envelope: bytes, *, trusted: tuple[TrustedVerifier, ...], base_digest: Digest, now: datetime
) -> BaseClaims:
    """The claims of a base's statement that holds here and now; as ``verdict_verify``.

    Raises:
        UntrustedError: it does not hold.
    """
    signers, payload = _payload(envelope, trusted)
    with denial("not a base statement in the expected form"):
        claims = _base_parse(payload)
    _verifier_check(claims.verifier_id, signers)
    if not digest_equal(claims.base_digest, base_digest):
        raise UntrustedError(f"a statement about {claims.base_digest}, expected {base_digest}")
    _time_check(claims.issued_at, claims.not_after, now)
    return claims


def _payload(
    envelope: bytes, trusted: tuple[TrustedVerifier, ...]
) -> tuple[list[TrustedVerifier], bytes]:
    """The payload, and every pinned pair whose key signed it."""
    signers, payload = [], b""
    failure = UntrustedError("no verifier is pinned")
    for pinned in trusted:
        try:
            payload = dsse_verify(envelope, pinned.public_key, IN_TOTO)
        except UntrustedError as error:
            failure = error
        else:
            signers.append(pinned)
    if not signers:
        raise failure
    return signers, payload


def _verdict_parse(payload: bytes) -> VerdictClaims:
    subjects, predicate = statement_read(payload)
    extension = extensions_read(
        predicate,
        _EXTENSION,
        {"tenantId", "tenant", "adapter", "baseModelDigest", "catalogDigest", "notAfter"},
    )
    (_, adapter_digest), *files = subjects
    claims = VerdictClaims(
        adapter_digest=adapter_digest,
        base_digest=digest_parse(extension["baseModelDigest"]),
        tenant_id=UUID(extension["tenantId"]),
        tenant=extension["tenant"],
        adapter=extension["adapter"],
        files=tuple(files),
        catalog_digest=digest_parse(extension["catalogDigest"]),
        policy_digest=digest_read(predicate["policy"]["digest"]),
        input_attestations=tuple(
            (text_read(item["uri"]), digest_read(item["digest"]))
            for item in predicate["inputAttestations"]
        ),
        issued_at=time_parse(predicate["timeVerified"]),
        not_after=time_parse(extension["notAfter"]),
        verifier_id=text_read(predicate["verifier"]["id"]),
    )
    # Writing it again gives the same bytes: nothing unknown, missing or in another form was read.
    if not hmac.compare_digest(verdict_statement(claims), payload):
        raise UntrustedError("statement: has unknown, missing or differently written fields")
    return claims


def _base_parse(payload: bytes) -> BaseClaims:
    subjects, predicate = statement_read(payload)
    extension = extensions_read(predicate, _BASE_EXTENSION, {"name", "catalogDigest", "notAfter"})
    ((_, base_digest),) = subjects
    claims = BaseClaims(
        base_digest=base_digest,
        name=extension["name"],
        catalog_digest=digest_parse(extension["catalogDigest"]),
        policy_digest=digest_read(predicate["policy"]["digest"]),
        issued_at=time_parse(predicate["timeVerified"]),
        not_after=time_parse(extension["notAfter"]),
        verifier_id=text_read(predicate["verifier"]["id"]),
        earlier_catalog_digests=tuple(
            digest_parse(digest) for digest in predicate[_BASE_EXTENSION + _EARLIER]
        ),
    )
    if not hmac.compare_digest(base_statement(claims), payload):
        raise UntrustedError("statement: has unknown, missing or differently written fields")
    return claims


def _time_check(issued_at: datetime, not_after: datetime, now: datetime) -> None:
    if now >= not_after:
        raise UntrustedError(f"expired at {time_text(not_after)}")
    # Clocks of service and node may differ a little; a statement from far ahead is not believed.
    if (issued_at - now).total_seconds() > 60:
        raise UntrustedError(f"issued in the future, at {time_text(issued_at)}")


def _verifier_check(verifier_id: str, signers: list[TrustedVerifier]) -> None:
    said = verifier_id.encode()
    if not any(hmac.compare_digest(said, signer.verifier_id.encode()) for signer in signers):
        raise UntrustedError("a statement of another verifier than the one pinned with its key")
