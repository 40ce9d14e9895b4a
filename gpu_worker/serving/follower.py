"""What ties a node to its registry: the feed that it follows and the lease that it renews.

The feed tells of a revocation at once; the heartbeat's answer holds what the node has still to let
go of, so that one that missed events, or was restarted in the middle, catches up. A node that
cannot renew refuses new work before the registry counts it as gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

from gpu_worker.serving.residency import Key
from gpu_worker.serving.residents import Residents
from gpu_worker.serving.store import NodeStore
from registry_service.client import RegistryClient
from registry_service.domain import limits
from registry_service.domain.digests import digest_parse
from registry_service.domain.errors import (
    NotFoundError,
    RegistryError,
    UnavailableError,
)

_LOG = logging.getLogger(__name__)
_REVOKED: Final = "artifact.revoked"
_RETRY_SECONDS: Final = 1.0


class Follower:
    """Two threads; ``fresh`` says whether new work may be accepted."""

    def __init__(
        self,
        client: RegistryClient,
        store: NodeStore,
        node: str,
        *,
        elapsed: Callable[[], float] = time.monotonic,
        feed_wait: float = limits.FEED_WAIT_SECONDS,
    ) -> None:
        self._client = client
        self._store = store
        self._node = node
        self._elapsed = elapsed
        self._feed_wait = feed_wait
        self._index = store.feed_index()
        self._lease_until = float("-inf")
        self._lease_seconds = float(limits.NODE_LEASE_SECONDS)
        self._stopping = threading.Event()

    @property
    def fresh(self) -> bool:
        """True while the lease runs."""
        return self._elapsed() < self._lease_until

    @property
    def index(self) -> int:
        """The last event of the feed that was handled."""
        return self._index

    def start(self, residents: Residents) -> None:
        """Follow feed and lease from now on."""
        for name, run in (("feed", self._feed_loop), ("heartbeat", self._heartbeat_loop)):
            threading.Thread(target=run, args=(residents,), name=name, daemon=True).start()

    def stop(self) -> None:
        """End both threads; one that waits for an answer ends with the process."""
        self._stopping.set()

    def heartbeat(self, residents: Residents) -> None:
        """Renew the lease once.

        What is revoked is refused before the lease counts as renewed.
        """
        asked_at = self._elapsed()
        answer = self._client.node_heartbeat(self._node, self._index, residents.report())
        for item in answer["revocations"]:
            key = Key(UUID(item["tenantId"]), digest_parse(item["adapterDigest"]))
            residents.revoke(key, item["deadlineSeconds"])
        self._lease_seconds = float(answer["leaseSeconds"])
        # Counted from before the question: the registry counts from when it got it.
        self._lease_until = asked_at + self._lease_seconds

    def feed_read(self, residents: Residents, wait: float) -> None:
        """Handle one page of the feed, then keep its index."""
        page = self._client.feed(self._index, wait)
        for event in page["items"]:
            self._handle(event, residents)
        if page["next"] > self._index:
            self._index = page["next"]
            self._store.feed_index_write(self._index)

    def acknowledge(self, key: Key, freed: int) -> None:
        """Say that a key is gone, until it is heard or nobody waits for it."""
        while not self._stopping.is_set():
            try:
                self._client.node_acknowledge(self._node, str(key.tenant_id), key.digest, freed, 0)
            except NotFoundError:
                return
            except UnavailableError as error:
                _LOG.warning("acknowledgement: %s", error.message)
                self._stopping.wait(_RETRY_SECONDS)
            else:
                return

    def _handle(self, event: dict[str, Any], residents: Residents) -> None:
        if event["kind"] != _REVOKED:
            return
        key = Key(UUID(event["tenantId"]), digest_parse(event["subject"]))
        residents.revoke(key, event["body"].get("deadlineSeconds"))

    def _feed_loop(self, residents: Residents) -> None:
        while not self._stopping.is_set():
            try:
                self.feed_read(residents, self._feed_wait)
            except Exception as error:  # noqa: BLE001 - whatever it is, the node keeps following
                self._trouble("feed", error)

    def _heartbeat_loop(self, residents: Residents) -> None:
        while not self._stopping.wait(self._lease_seconds / 3):
            try:
                self.heartbeat(residents)
            except Exception as error:  # noqa: BLE001 - the lease runs out, which is the answer
                self._trouble("heartbeat", error)

    def _trouble(self, what: str, error: Exception) -> None:
        shown = error.message if isinstance(error, RegistryError) else repr(error)
        _LOG.warning("%s: %s", what, shown)
        self._stopping.wait(_RETRY_SECONDS)
