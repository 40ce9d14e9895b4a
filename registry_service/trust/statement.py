"""The form that verdicts and base statements share: in-toto Statement v1 over a SLSA summary.

Reading picks the values out; the caller writes them again and compares the bytes, so that nothing
unknown, missing or written in another way was read.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from registry_service.domain.canonical import canonical_json, json_parse
from registry_service.domain.digests import Digest, digest_parse
from registry_service.domain.errors import UntrustedError

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://slsa.dev/verification_summary/v1"
_POLICY_URI: Final = "urn:adapter-registry:policy:admission"
_LEVEL: Final = "ADAPTER_REGISTRY_ADMITTED"
_LIMIT: Final = 1024 * 1024


def statement_write(
    subjects: list[tuple[str, Digest]],
    *,
    verifier_id: str,
    issued_at: datetime,
    resource: Digest,
    policy_digest: Digest,
    attestations: tuple[tuple[str, Digest], ...],
    extensions: dict[str, str | list[str]],
) -> bytes:
    """A statement as canonical JSON; the first subject is the manifest that is admitted."""
    predicate: dict[str, Any] = {
        "verifier": {"id": verifier_id},
        "timeVerified": time_text(issued_at),
        "resourceUri": _resource(resource),
        "policy": {"uri": _POLICY_URI, "digest": _digest_set(policy_digest)},
        "inputAttestations": [
            {"uri": uri, "digest": _digest_set(digest)} for uri, digest in attestations
        ],
        "verificationResult": "PASSED",
        "verifiedLevels": [_LEVEL],
        **extensions,
    }
    return canonical_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": name, "digest": _digest_set(digest)} for name, digest in subjects],
            "predicateType": PREDICATE_TYPE,
            "predicate": predicate,
        }
    )


def statement_read(payload: bytes) -> tuple[list[tuple[str, Digest]], dict[str, Any]]:
    """Subjects and predicate of a statement. Raises; its caller makes that a denial."""
    document = json_parse(payload, what="statement", limit=_LIMIT)
    subjects = [
        (text_read(item["name"]), digest_read(item["digest"])) for item in document["subject"]
    ]
    if len({name for name, _ in subjects}) != len(subjects):
        raise UntrustedError("statement: a subject occurs twice")
    return subjects, document["predicate"]


def extensions_read(predicate: dict[str, Any], prefix: str, names: set[str]) -> dict[str, str]:
    """The URI-named extensions under ``prefix``."""
    return {name: text_read(predicate[prefix + name]) for name in names}


def text_read(value: Any) -> str:
    """Text that is not empty. Raises UntrustedError."""
    if not isinstance(value, str) or not value:
        raise UntrustedError("statement: expected text")
    return value


def _resource(digest: Digest) -> str:
    return f"urn:{digest}"


def _digest_set(digest: Digest) -> dict[str, str]:
    return {"sha256": digest.removeprefix("sha256:")}


def digest_read(value: Any) -> Digest:
    """The one digest of an in-toto digest set."""
    (only,) = value.items()
    return digest_parse(f"{only[0]}:{only[1]}")


def time_text(value: datetime) -> str:
    """RFC 3339 in UTC, to the second."""
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_parse(value: str) -> datetime:
    """The inverse of ``time_text``."""
    return datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
