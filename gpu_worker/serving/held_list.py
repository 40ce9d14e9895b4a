"""The revocation list that a node holds: verified, never an older one, and fresh or not.

The highest number is kept on disk before its list counts, so that no replay, not even after a
restart, brings back what was revoked. What is refused here leaves the held list as it is, and that
one runs out: a node that cannot get a newer one stops accepting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from gpu_worker.serving.store import NodeStore
from registry_service.domain.digests import Digest, digest_equal, digest_of
from registry_service.domain.errors import UntrustedError
from registry_service.trust.keys import PublicKey, key_id
from registry_service.trust.revocation_list import (
    RevocationList,
    Revoked,
    RevokedIndex,
    revocation_list_verify,
)
from registry_service.trust.statement import time_text

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    revocations: RevocationList
    index: RevokedIndex
    until: float


class HeldList:
    """Thread-safe: one thread refreshes, requests ask."""

    def __init__(
        self,
        store: NodeStore,
        public_key: PublicKey,
        issuer: str,
        *,
        now: Callable[[], datetime],
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without a list, and with the highest number that was ever held.

        Raises:
            MalformedError: that number cannot be read.
        """
        self._store = store
        self._public_key = public_key
        self._issuer = issuer
        self._now = now
        self._elapsed = elapsed
        self._highest, self._digest = store.list_mark(key_id(public_key))
        self._held: _Held | None = None
        self._lock = threading.Lock()

    @property
    def number(self) -> int:
        """The number of the list that is held; 0 when there is none."""
        held = self._held
        return 0 if held is None else held.revocations.number

    @property
    def fresh(self) -> bool:
        """True while new work may be accepted."""
        return self.stale_reason() is None

    @property
    def past_half(self) -> bool:
        """True when the next list is overdue: half of this one's life is over."""
        held = self._held
        return held is None or self._now() >= held.revocations.half_at

    @property
    def life_seconds(self) -> float | None:
        """How long a list lives that is issued now; None before the first one."""
        held = self._held
        if held is None:
            return None
        return (held.revocations.expires_at - held.revocations.issued_at).total_seconds()

    def stale_reason(self) -> str | None:
        """Why no new work is accepted, or None when it is."""
        held = self._held
        if held is None:
            return "no revocation list yet"
        # The clock may be set back, and the counter stands while a machine sleeps: either ends it.
        if self._now() >= held.revocations.expires_at or self._elapsed() >= held.until:
            expired = time_text(held.revocations.expires_at)
            return f"revocation list {held.revocations.number} expired at {expired}"
        return None

    def find(self, tenant_id: UUID, adapter_digest: Digest, *others: Digest) -> Revoked | None:
        """What the held list says of an adapter, by any of its digests. An expired list counts."""
        held = self._held
        return None if held is None else held.index.find(tenant_id, adapter_digest, *others)

    def take(self, envelope: bytes) -> None:
        """Hold this list from now on.

        Raises:
            UntrustedError: it does not verify, has expired, or is not the newest that was held.
            UnavailableError: its number cannot be kept.
        """
        with self._lock:
            try:
                self._take(envelope)
            except UntrustedError as error:
                _LOG.error(
                    "revocation list refused: %s",
                    error.message,
                    extra={"event": "revocation_list.refused"},
                )
                raise

    def _take(self, envelope: bytes) -> None:
        now, elapsed = self._now(), self._elapsed()
        revocations = revocation_list_verify(
            envelope, public_key=self._public_key, issuer=self._issuer, now=now
        )
        digest, number = digest_of(envelope), revocations.number
        if number < self._highest:
            raise UntrustedError(f"expected number {self._highest} or more, got {number}")
        if number == self._highest and self._digest and not digest_equal(digest, self._digest):
            raise UntrustedError(f"expected the list {number} that was held before, got another")
        if number > self._highest:
            self._store.list_mark_write(key_id(self._public_key), number, digest)
            self._highest, self._digest = number, digest
        left = (revocations.expires_at - now).total_seconds()
        self._held = _Held(revocations, RevokedIndex(revocations.entries), elapsed + left)
