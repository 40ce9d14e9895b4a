"""Digests are ``sha256:<64 lower-case hex>``; the parser refuses anything else."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import NewType

from registry_service.domain.errors import MalformedError
from registry_service.domain.text import shown

Digest = NewType("Digest", str)

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def digest_parse(value: object, what: str = "digest") -> Digest:
    """Return ``value`` as a digest.

    Raises:
        MalformedError: anything but ``sha256:`` and 64 lower-case hex digits.
    """
    if isinstance(value, str) and _DIGEST.fullmatch(value):
        return Digest(value)
    raise MalformedError(f"{what}: expected sha256:<64 lower-case hex digits>, got {shown(value)}")


def is_digest(value: object) -> bool:
    """True when ``value`` has a digest's grammar (a name never has: it cannot hold a colon)."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def digest_of(data: bytes) -> Digest:
    """SHA-256 of ``data``."""
    return Digest("sha256:" + hashlib.sha256(data).hexdigest())


def digest_equal(left: str, right: str) -> bool:
    """Compare two digests in constant time."""
    return hmac.compare_digest(left.encode(), right.encode())
