"""The grammar of every name: tenants, adapters, labels, aliases, subjects, nodes and bases.

Tenants and adapters are one path component of an OCI repository name; labels and aliases share
one namespace with the grammar of an OCI tag (distribution-spec 1.1, "Pulling manifests"), and
cannot be mistaken for a digest since a tag holds no colon.
"""

from __future__ import annotations

import re

from registry_service.domain import limits
from registry_service.domain.errors import MalformedError
from registry_service.domain.text import shown

_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}")
_SUBJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]*")
# A tag that could be read as a digest in one of its escaped spellings would be ambiguous.
_DIGEST_LIKE = re.compile(r"(?:sha256-)?[0-9a-f]{64}")
_RESERVED_TENANTS = frozenset({"platform"})


def tenant_name(value: object) -> str:
    """A tenant's name. Raises MalformedError."""
    name = _component(value, "tenant")
    if name in _RESERVED_TENANTS:
        raise MalformedError(f"tenant: {shown(name)} is reserved")
    return name


def adapter_name(value: object) -> str:
    """An adapter's name inside its tenant. Raises MalformedError."""
    return _component(value, "adapter")


def base_name(value: object) -> str:
    """A base model's short name. Raises MalformedError."""
    return _component(value, "base")


def node_name(value: object) -> str:
    """A serving node's name. Raises MalformedError."""
    return _component(value, "node")


def tag_name(value: object) -> str:
    """A label's or alias's name. Raises MalformedError."""
    if isinstance(value, str) and _TAG.fullmatch(value) and not _DIGEST_LIKE.fullmatch(value):
        return value
    raise MalformedError(
        "label or alias: expected 1 to 128 of A-Z a-z 0-9 _ . - and not a digest, "
        f"got {shown(value)}"
    )


def subject_name(value: object) -> str:
    """Who a token speaks for. Raises MalformedError."""
    if isinstance(value, str) and len(value) <= limits.SUBJECT_CHARS and _SUBJECT.fullmatch(value):
        return value
    raise MalformedError(
        f"subject: expected up to {limits.SUBJECT_CHARS} of A-Z a-z 0-9 . _ : @ / + -, "
        f"got {shown(value)}"
    )


def reason_text(value: object) -> str:
    """A person's reason: one printable line of bounded length. Raises MalformedError."""
    if (
        isinstance(value, str)
        and value.strip()
        and len(value) <= limits.REASON_CHARS
        and value.isprintable()
    ):
        return value.strip()
    raise MalformedError(
        f"reason: expected one printable line of up to {limits.REASON_CHARS} characters, "
        f"got {shown(value)}"
    )


def _component(value: object, what: str) -> str:
    if isinstance(value, str) and len(value) <= limits.NAME_CHARS and _COMPONENT.fullmatch(value):
        return value
    raise MalformedError(
        f"{what}: expected up to {limits.NAME_CHARS} of a-z 0-9 with single separators . _ -, "
        f"got {shown(value)}"
    )
