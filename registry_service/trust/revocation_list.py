"""The revocation list: whatever is revoked and a node could load, signed, numbered, with an expiry.

One list for all bases: tensors that were revoked on one base stay revoked on every other. An entry
names the adapter digest, the digest of its weights file and the digest of its tensors' content, so
that the same bytes in another package are revoked, too. Who revokes decides how far that reaches:
the platform for every tenant, a tenant for itself, since otherwise a tenant could stop another's
adapter by publishing and revoking the same bytes. The adapter digest has one owner anyway.

The payload is canonical JSON under a type of its own, so that no other statement can be taken for a
list and no list for another statement.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from registry_service.domain import limits
from registry_service.domain.canonical import canonical_json, json_parse
from registry_service.domain.digests import Digest, digest_parse
from registry_service.domain.errors import UntrustedError
from registry_service.trust.denial import denial
from registry_service.trust.dsse import dsse_verify
from registry_service.trust.keys import PublicKey
from registry_service.trust.statement import text_read, time_parse, time_text

PAYLOAD_TYPE: Final = "application/vnd.adapter-registry.revocation-list.v1+json"
_LAST: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Revoked:
    """One revocation. What is None is not known, or there is none.

    ``tenant_id`` is the tenant for which weights and content are revoked, None for every tenant.
    ``cancel_at`` is when requests that still run are cancelled.
    """

    adapter_digest: Digest
    weights_digest: Digest | None
    content_digest: Digest | None
    tenant_id: UUID | None
    cancel_at: datetime | None


@dataclass(frozen=True, slots=True)
class RevocationList:
    """A list as it was signed. Times in UTC, to the second."""

    number: int
    issuer: str
    issued_at: datetime
    expires_at: datetime
    entries: tuple[Revoked, ...]

    @property
    def half_at(self) -> datetime:
        """When half of its life is over: without a newer one by then, something is wrong."""
        return self.issued_at + (self.expires_at - self.issued_at) / 2


class RevokedIndex:
    """Finds what a list says of an adapter."""

    def __init__(self, entries: tuple[Revoked, ...]) -> None:
        self._adapters: dict[Digest, list[Revoked]] = {}
        self._bytes: dict[Digest, list[Revoked]] = {}
        for entry in entries:
            self._adapters.setdefault(entry.adapter_digest, []).append(entry)
            for digest in (entry.weights_digest, entry.content_digest):
                if digest is not None:
                    self._bytes.setdefault(digest, []).append(entry)

    def find(self, tenant_id: UUID, adapter_digest: Digest, *others: Digest) -> Revoked | None:
        """The entry that names this adapter of a tenant, the most urgent of several, or None.

        ``others`` are the digests of its weights file and of its content, as far as they are known.
        """
        found = [*self._adapters.get(adapter_digest, ()), *self._named(tenant_id, others)]
        return min(found, key=lambda entry: entry.cancel_at or _LAST, default=None)

    def _named(self, tenant_id: UUID, digests: tuple[Digest, ...]) -> Iterator[Revoked]:
        for digest in digests:
            for entry in self._bytes.get(digest, ()):
                if entry.tenant_id in (None, tenant_id):
                    yield entry


def revocation_list_payload(revocations: RevocationList) -> bytes:
    """The payload to sign, as canonical JSON."""
    return canonical_json(
        {
            "issuer": revocations.issuer,
            "number": revocations.number,
            "issuedAt": time_text(revocations.issued_at),
            "expiresAt": time_text(revocations.expires_at),
            "entries": [entry_write(entry) for entry in revocations.entries],
        }
    )


@denial("not a revocation list that can be checked")
def revocation_list_verify(
    envelope: bytes, *, public_key: PublicKey, issuer: str, now: datetime
) -> RevocationList:
    """A list that holds now. Whether it is newer than the last one is for its holder to see.

    1. signed as a revocation list by the pinned key; 2. in exactly our form; 3. by the issuer that
    is pinned with that key; 4. not expired, not from the future.

    Raises:
        UntrustedError: the first of these that does not hold.
    """
    payload = dsse_verify(envelope, public_key, PAYLOAD_TYPE, limit=limits.REVOCATION_LIST_BYTES)
    with denial("not a revocation list in the expected form"):
        revocations = _parse(payload)
    if not hmac.compare_digest(revocations.issuer.encode(), issuer.encode()):
        raise UntrustedError("a revocation list of another issuer than the pinned one")
    if now >= revocations.expires_at:
        raise UntrustedError(
            f"revocation list {revocations.number}: expired at {time_text(revocations.expires_at)}"
        )
    if (revocations.issued_at - now).total_seconds() > limits.CLOCK_SKEW_SECONDS:
        raise UntrustedError(
            f"revocation list {revocations.number}: issued in the future, at "
            f"{time_text(revocations.issued_at)}; compare this machine's clock with the registry's"
        )
    return revocations


def _parse(payload: bytes) -> RevocationList:
    document = json_parse(payload, what="revocation list", limit=limits.REVOCATION_LIST_BYTES)
    number = document["number"]
    if type(number) is not int or number < 1:
        raise UntrustedError("revocation list: number: expected 1 or more")
    revocations = RevocationList(
        number=number,
        issuer=text_read(document["issuer"]),
        issued_at=time_parse(document["issuedAt"]),
        expires_at=time_parse(document["expiresAt"]),
        entries=tuple(_entry_read(item) for item in document["entries"]),
    )
    # Writing it again gives the same bytes: nothing unknown, missing or in another form was read.
    if not hmac.compare_digest(revocation_list_payload(revocations), payload):
        raise UntrustedError("revocation list: has unknown, missing or differently written fields")
    return revocations


def entry_write(entry: Revoked) -> dict[str, Any]:
    """An entry as the list has it."""
    return {
        "adapterDigest": entry.adapter_digest,
        "weightsDigest": entry.weights_digest,
        "contentDigest": entry.content_digest,
        "tenantId": None if entry.tenant_id is None else str(entry.tenant_id),
        "cancelAt": None if entry.cancel_at is None else time_text(entry.cancel_at),
    }


def _entry_read(item: Any) -> Revoked:
    weights, content = item["weightsDigest"], item["contentDigest"]
    tenant, cancel_at = item["tenantId"], item["cancelAt"]
    return Revoked(
        adapter_digest=digest_parse(item["adapterDigest"]),
        weights_digest=None if weights is None else digest_parse(weights),
        content_digest=None if content is None else digest_parse(content),
        tenant_id=None if tenant is None else UUID(tenant),
        cancel_at=None if cancel_at is None else time_parse(cancel_at),
    )
