"""The residents of a node: who may use them, one load for each, and letting go of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from gpu_worker.serving.admission import Admission, Admitted, Clock
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.residency import Key, Residency, ResidencyError, Resident, ResidentState
from gpu_worker.serving.store import NodeStore
from registry_service.domain.digests import Digest
from registry_service.domain.errors import NotFoundError, RefusedError

_LOG = logging.getLogger(__name__)
_LOADS_AT_ONCE: Final = 2

Acknowledge = Callable[[Key, int], None]
"""Tells the registry that a key is gone, and the bytes that became free."""


class Lease:
    """One request's hold on a resident; giving it back twice does nothing."""

    def __init__(self, residents: Residents, key: Key) -> None:
        self._residents = residents
        self._key: Key | None = key
        self._lock = threading.Lock()

    def release(self) -> None:
        """Give the reference back."""
        with self._lock:
            key, self._key = self._key, None
        if key is not None:
            self._residents.released(key)


class Residents:
    """Thread-safe: requests acquire, the feed and the heartbeat revoke."""

    def __init__(
        self,
        admission: Admission,
        engine: Engine,
        store: NodeStore,
        *,
        now: Clock,
        acknowledge: Acknowledge,
    ) -> None:
        self._admission = admission
        self._engine = engine
        self._store = store
        self._now = now
        self._acknowledge = acknowledge
        self._changed = threading.Condition()
        self._table = Residency()
        self._admitted: dict[Key, Admitted] = {}
        self._draining: set[Key] = set()
        self._loads = threading.Semaphore(_LOADS_AT_ONCE)

    def acquire(
        self, *, tenant_id: UUID, tenant: str, adapter: str, digest: Digest, template: Digest
    ) -> Lease:
        """A reference for a request, after loading when it has to be.

        Raises:
            RegistryError: not admitted, revoked, not loadable: refused. UnavailableError: later.
        """
        key = Key(tenant_id, digest)
        while True:
            with self._changed:
                state = self._wait_while_loading(key)
                if state is ResidentState.SERVING:
                    self._use_check(self._admitted[key], tenant, adapter, template)
                    return self._lease(key)
                if state is not None or self._table.is_revoked(key):
                    raise NotFoundError("not found")
                self._table.load_begin(key)
            self._load(key, tenant, adapter, tenant_id)

    def preload(self, tenant: str, adapter: str, digest: Digest) -> Key:
        """Load before listening.

        Raises:
            RegistryError: it is not valid here, or cannot be fetched.
        """
        claims = self._admission.verdict(tenant, adapter, digest, None)
        key = Key(claims.tenant_id, digest)
        with self._changed:
            if self._table.state(key) is not None:
                return key
            self._begin(key)
        self._load(key, tenant, adapter, claims.tenant_id)
        return key

    def serving(self, key: Key) -> bool:
        """True when requests for this key are accepted."""
        with self._changed:
            return self._table.state(key) is ResidentState.SERVING

    def released(self, key: Key) -> None:
        """A lease ended."""
        with self._changed:
            self._table.release(key)
            self._changed.notify_all()

    def residents(self) -> tuple[Resident, ...]:
        """Every resident now."""
        with self._changed:
            return self._table.residents()

    def report(self) -> list[dict[str, Any]]:
        """What the heartbeat reports: residents, and files of earlier runs as STORED."""
        resident = {item.key: str(item.state) for item in self.residents()}
        stored = dict.fromkeys(self._store.keys(), "STORED")
        return [
            {"tenantId": str(key.tenant_id), "adapterDigest": key.digest, "state": state}
            for key, state in (stored | resident).items()
        ]

    def revoke(self, key: Key, deadline_seconds: float | None) -> None:
        """Refuse a key at once, then drain, purge, unload and acknowledge beside the caller."""
        deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
        with self._changed:
            self._table.revoke(key, deadline)
            self._changed.notify_all()
            if key in self._draining:
                return
            self._draining.add(key)
        threading.Thread(target=self._drain, args=(key,), name="drain", daemon=True).start()

    def _drain(self, key: Key) -> None:
        try:
            with self._changed:
                loaded = self._wait_while_loading(key) is not None
                if loaded:
                    self._wait_drained(key)
            freed = self._let_go(key, loaded=loaded)
            _LOG.info("%s: gone, %d bytes freed", key.digest, freed)
            self._acknowledge(key, freed)
        except Exception:  # noqa: BLE001 - the next heartbeat names it again: it starts over
            _LOG.exception("%s: letting go failed", key.digest)
        finally:
            with self._changed:
                self._draining.discard(key)

    def _let_go(self, key: Key, *, loaded: bool) -> int:
        """Purge, then unload; the bytes of memory that became free."""
        self._store.remove(key)
        if not loaded:
            return 0
        with self._changed:
            if self._table.state(key) is ResidentState.DRAINING:
                self._table.purge(key)
        freed = self._engine.detach(key)
        with self._changed:
            self._table.unload(key)
            self._admitted.pop(key, None)
        return freed

    def _wait_drained(self, key: Key) -> None:
        cancelled = False
        while self._table.state(key) is ResidentState.DRAINING and not self._table.drained(key):
            deadline = self._table.deadline(key)
            left = None if deadline is None or cancelled else deadline - time.monotonic()
            if left is not None and left <= 0:
                _LOG.info("%s: %d requests cancelled", key.digest, self._engine.cancel(key))
                # One that was between its lease and the engine comes after: look again.
                self._changed.wait(0.05)
                continue
            self._changed.wait(left)

    def _wait_while_loading(self, key: Key) -> ResidentState | None:
        while self._table.state(key) is ResidentState.LOADING:
            self._changed.wait()
        return self._table.state(key)

    def _load(self, key: Key, tenant: str, adapter: str, tenant_id: UUID) -> None:
        """Load a key whose entry is LOADING; on any failure the entry is gone."""
        started = time.monotonic()
        try:
            with self._loads:
                claims = self._admission.verdict(tenant, adapter, key.digest, tenant_id)
                admitted = self._admission.load(claims)
        except BaseException:
            with self._changed:
                self._table.load_failed(key)
                self._changed.notify_all()
            raise
        with self._changed:
            self._admitted[key] = admitted
            self._table.load_end(key, admitted.size)
            self._changed.notify_all()
        _LOG.info("%s: loaded in %.2f s", key.digest, time.monotonic() - started)

    def _begin(self, key: Key) -> None:
        try:
            self._table.load_begin(key)
        except ResidencyError as error:
            raise NotFoundError("not found") from error

    def _lease(self, key: Key) -> Lease:
        try:
            self._table.acquire(key)
        except ResidencyError as error:
            raise NotFoundError("not found") from error
        return Lease(self, key)

    def _use_check(self, admitted: Admitted, tenant: str, adapter: str, template: Digest) -> None:
        claims = admitted.claims
        if (claims.tenant, claims.adapter) != (tenant, adapter):
            raise RefusedError("a routing context that names another tenant or adapter")
        if admitted.chat_template_digest != template:
            raise RefusedError("a routing context of another chat template")
        if _over(claims.not_after, self._now()):
            raise RefusedError("the verdict expired")


def _over(end: datetime, now: datetime) -> bool:
    return now >= end
