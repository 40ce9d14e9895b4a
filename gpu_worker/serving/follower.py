"""What ties a node to its registry: the feed, the heartbeat and the revocation list.

The feed tells of a revocation, and of a withdrawn grant, at once. The heartbeat's answer holds what
the node has still to let go of, and whatever it holds that is not approved: so one that missed
events, or was restarted in the middle, catches up. The list says the same under a signature with an
expiry; a node that cannot get it in time refuses new work.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

from gpu_worker.serving.held_list import HeldList
from gpu_worker.serving.residency import Key
from gpu_worker.serving.residents import Residents
from gpu_worker.serving.store import NodeStore
from gpu_worker.serving.withdrawn import Grant, Withdrawn
from registry_service.client import RegistryClient
from registry_service.domain import limits
from registry_service.domain.digests import digest_parse
from registry_service.domain.errors import (
    MalformedError,
    NotFoundError,
    RegistryError,
)

_LOG = logging.getLogger(__name__)
_REVOKED: Final = frozenset({"artifact.revoked", "revocation.hastened"})
_WITHDRAWN: Final = "grant.withdrawn"
_HEARTBEAT: Final = "heartbeat"
_RETRY_SECONDS: Final = 1.0
# Of a list's life between two looks at it: many tries before the alarm at half of it.
_REFRESH_AT: Final = 0.05


class Follower:
    """Three threads, one for each of feed, heartbeat and list."""

    def __init__(
        self,
        client: RegistryClient,
        store: NodeStore,
        node: str,
        held: HeldList,
        withdrawn: Withdrawn,
        *,
        feed_wait: float = limits.FEED_WAIT_SECONDS,
    ) -> None:
        self._client = client
        self._store = store
        self._node = node
        self._held = held
        self._withdrawn = withdrawn
        self._feed_wait = feed_wait
        self._index = store.feed_index()
        self._lease_seconds = float(limits.NODE_LEASE_SECONDS)
        self._refresh_now = threading.Event()
        self._beat_now = threading.Event()
        self._threads: list[threading.Thread] = []
        self._alarmed = 0
        self._stopping = threading.Event()

    @property
    def stale_reason(self) -> str | None:
        """Why no new work may be accepted (the revocation list does not hold), or None."""
        return self._held.stale_reason()

    @property
    def index(self) -> int:
        """The last event of the feed that was handled."""
        return self._index

    def start(self, residents: Residents) -> None:
        """Follow feed, lease and list from now on."""
        for name, step in (
            ("feed", lambda: self.feed_read(residents, self._feed_wait)),
            (_HEARTBEAT, lambda: self._heartbeat_step(residents)),
            ("revocation list", lambda: self._list_step(residents)),
        ):
            thread = threading.Thread(target=self._loop, args=(name, step), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """End the threads; one that waits for an answer ends with the process."""
        self._stopping.set()
        self._refresh_now.set()
        self._beat_now.set()

    def quiet_wait(self, seconds: float) -> None:
        """After ``stop``: wait until the last heartbeat is answered, which renews leases."""
        for thread in self._threads:
            if thread.name == _HEARTBEAT:
                thread.join(seconds)

    def reconcile(self, residents: Residents) -> None:
        """Compare what is resident and what lies in the store with what is approved.

        Raises:
            RegistryError: the registry does not answer, or its list does not hold.
        """
        self.heartbeat(residents)
        self.list_refresh(residents)

    def heartbeat(self, residents: Residents) -> None:
        """Renew the lease once, and let go of what the answer names."""
        answer = self._client.node_heartbeat(self._node, self._index, residents.report())
        for item in answer["revocations"]:
            key = Key(UUID(item["tenantId"]), digest_parse(item["adapterDigest"]))
            residents.revoke(key, item["deadlineSeconds"], owed=True)
        for item in answer["lostPlacements"]:
            key = Key(UUID(item["tenantId"]), digest_parse(item["adapterDigest"]))
            residents.placement_lost(key)
        residents.go_on()
        self._lease_seconds = float(answer["leaseSeconds"])

    def list_refresh(self, residents: Residents) -> None:
        """Fetch the revocation list when there is a newer one, and let go of what it names.

        Raises:
            UnavailableError: the registry does not answer. UntrustedError: its list does not hold.
        """
        envelope = self._client.revocation_list(self._held.number)
        if envelope is not None:
            self._held.take(envelope)
        # Also when it is the one from before: what could not be let go of then is tried again.
        residents.listed_revoke()
        self._alarm()

    def feed_read(self, residents: Residents, wait: float) -> None:
        """Handle one page of the feed, then keep its index.

        After a gap (the log is shorter than what was read, or an index is missing) and after an
        event that takes something back and cannot be read, everything is compared before the index
        is kept.
        """
        page = self._client.feed(self._index, wait)
        indexes = [event["index"] for event in page["items"]]
        end = page["next"]
        whole = end >= self._index and indexes == list(range(self._index + 1, end + 1))
        for event in page["items"]:
            whole = self._handle(event, residents) and whole
        if not whole:
            _LOG.warning(
                "feed: expected events from %d without gaps, got %d up to %d; comparing everything",
                self._index + 1,
                len(indexes),
                end,
                extra={"event": "feed.gap"},
            )
            self._withdrawn.missed()
            self.reconcile(residents)
        if end != self._index:
            self._index = end
            self._store.feed_index_write(self._index)

    def acknowledge(self, key: Key, freed: int, purged: int) -> None:
        """Say that a key is gone; whether somebody waits for it, the registry knows.

        Raises:
            RegistryError: it was not heard. The heartbeat's answer names the key again.
        """
        with contextlib.suppress(NotFoundError):
            self._client.node_acknowledge(self._node, str(key.tenant_id), key.digest, freed, purged)

    def _handle(self, event: dict[str, Any], residents: Residents) -> bool:
        """Act on an event; False when it takes something back and cannot be read."""
        try:
            if event["kind"] == _WITHDRAWN:
                self._withdrawn.add(*_withdrawal(event))
            if event["kind"] not in _REVOKED:
                return True
            key = Key(UUID(event["tenantId"]), digest_parse(event["subject"]))
            deadline = _seconds(event["body"].get("deadlineSeconds"))
        except (AttributeError, KeyError, TypeError, ValueError, MalformedError) as error:
            _LOG.error("feed: event %s cannot be read: %r", event["index"], error)
            return False
        residents.revoke(key, deadline)
        self._refresh_now.set()
        # An old event, of before this node was there, waits for nobody: the answer says which does.
        self._beat_now.set()
        return True

    def _heartbeat_step(self, residents: Residents) -> None:
        self._beat_now.wait(self._lease_seconds / 3)
        self._beat_now.clear()
        if not self._stopping.is_set():
            self.heartbeat(residents)

    def _list_step(self, residents: Residents) -> None:
        self._refresh_now.wait(self._refresh_seconds())
        self._refresh_now.clear()
        if not self._stopping.is_set():
            self.list_refresh(residents)

    def _refresh_seconds(self) -> float:
        life = self._held.life_seconds
        return _RETRY_SECONDS if life is None else life * _REFRESH_AT

    def _loop(self, what: str, step: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            try:
                step()
            except Exception as error:  # noqa: BLE001 - the list runs out, which is the answer
                if self._stopping.is_set():
                    return
                shown = error.message if isinstance(error, RegistryError) else repr(error)
                _LOG.warning("%s: %s", what, shown)
                self._alarm()
                self._stopping.wait(_RETRY_SECONDS)

    def _alarm(self) -> None:
        """Once for each list: half of its life is over and there is no newer one."""
        number = self._held.number
        if self._held.past_half and self._alarmed != number:
            self._alarmed = number
            _LOG.error(
                "revocation list %d: half of its life is over and there is no newer one",
                number,
                extra={"event": "revocation_list.overdue"},
            )


def _withdrawal(event: dict[str, Any]) -> tuple[Grant, int]:
    """Whose grant was withdrawn, and the epoch that contexts have from then on."""
    adapter, subject, epoch = event["body"]["adapter"], event["subject"], event["body"]["epoch"]
    if not (isinstance(adapter, str) and isinstance(subject, str)) or type(epoch) is not int:
        raise ValueError("expected an adapter, a subject and a whole epoch")
    return Grant(UUID(event["tenantId"]), adapter, subject), epoch


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError("deadlineSeconds: expected seconds or null")
    return float(value)
