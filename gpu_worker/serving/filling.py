"""Loads that end on the shelf: who waits for one has its references when it serves.

A load that fails, or that nobody waits for any more before it began, leaves no entry.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Protocol

from gpu_worker.serving.admission import RevokedBytesError
from gpu_worker.serving.brief import compute_briefly
from gpu_worker.serving.disk import Disk
from gpu_worker.serving.emptying import Emptying
from gpu_worker.serving.loader import Load, LoadQueue, Ticket
from gpu_worker.serving.loading import Loaded, Loading, Shelf
from gpu_worker.serving.residency import Key, ResidentState
from registry_service.domain.errors import NotFoundError, RegistryError, UnavailableError

_LOG = logging.getLogger(__name__)


class Watch(Protocol):
    """Hears of loads and uses."""

    def hit(self, key: Key) -> None:
        """A request found it resident."""
        ...

    def loaded(self, key: Key, seconds: float) -> None:
        """It was loaded."""
        ...

    def load_failed(self, key: Key) -> None:
        """A load failed."""
        ...


class Filling:
    """Fills the shelf, on the load queue's threads."""

    def __init__(self, shelf: Shelf, loading: Loading, disk: Disk, emptying: Emptying) -> None:
        self.watches: list[Watch] = []
        self._changed, self._table, self._loaded = shelf.changed, shelf.table, shelf.loaded
        self._loading = loading
        self._disk = disk
        self._emptying = emptying
        self.queue = LoadQueue(self._load, loading.limits.queue, elapsed=time.monotonic)

    def ticket(self, load: Load, sequences: int, *, paced: bool = True) -> Ticket:
        """A place among those who wait for a load. With the shelf's lock held.

        Raises:
            NotFoundError: revoked. UnavailableError: not now, with when to come again.
        """
        state = self._table.state(load.key)
        if self._table.is_revoked(load.key):
            raise NotFoundError("not found")
        if state not in {None, ResidentState.LOADING}:
            raise UnavailableError("the adapter is being unloaded", retry_after=1)
        if state is not None:
            return self.queue.join(load, sequences, paced=paced)
        self._table.load_begin(load.key)
        try:
            return self.queue.join(load, sequences, paced=paced)
        except BaseException:
            # Whatever stopped it, nobody loads this key.
            self._table.load_failed(load.key)
            raise

    def wait(self, ticket: Ticket, sequences: int, seconds: float | None) -> None:
        """Wait for the end of a load; the references of whoever waited are taken then.

        Raises:
            UnavailableError: it takes longer than ``seconds``. RegistryError: it failed.
        """
        if not ticket.done.wait(seconds):
            with self._changed:
                if not ticket.done.is_set():
                    self._leave(ticket, sequences)
                    raise UnavailableError("the adapter is still being loaded")
        if ticket.error is not None:
            raise ticket.error

    def _leave(self, ticket: Ticket, sequences: int) -> None:
        if self.queue.leave(ticket, sequences):
            # It never began, and never will: whoever comes next begins anew.
            self._table.load_failed(ticket.load.key)
            self._changed.notify_all()

    def _load(self, ticket: Ticket) -> None:
        """Load what a ticket names; on any failure its entry is gone, and nothing is left."""
        key, started = ticket.load.key, time.monotonic()
        loaded: Loaded | None = None
        try:
            # The queue's threads live on, and none of them is to keep what helps it to compute.
            loaded = compute_briefly(
                partial(self._loading.load, ticket.load, self._emptying, self._disk)
            )
            self._serve(ticket, loaded)
        except BaseException as error:
            # Whatever stopped it, who waits is told, and the load is undone.
            with self._changed:
                loading = self._table.state(key) is ResidentState.LOADING
            if not loading:
                # It serves, or drains, and that was told: what came after it undoes nothing.
                raise
            self._load_failed(ticket, loaded, error)
            return
        seconds = time.monotonic() - started
        _LOG.info("%s: loaded in %.2f s", key.digest, seconds)
        for watch in self.watches:
            watch.loaded(key, seconds)
        self._emptying.trim(key)

    def _serve(self, ticket: Ticket, loaded: Loaded) -> None:
        key = ticket.load.key
        with self._changed:
            self._loaded[key] = loaded
            entry = self._emptying.listed(key)
            if entry is not None:
                # A newer list came while this was loading: it goes from LOADING to DRAINING.
                self._emptying.revoke(key, self._emptying.seconds_left(entry))
            state = self._table.load_end(key, loaded.admitted.size, ticket.waiting)
            serving = state is ResidentState.SERVING
            self.queue.settle(ticket, None if serving else NotFoundError("not found"))
            self._changed.notify_all()

    def _load_failed(self, ticket: Ticket, loaded: Loaded | None, error: BaseException) -> None:
        key = ticket.load.key
        if not isinstance(error, RegistryError):
            _LOG.error("%s: the load failed", key.digest, exc_info=error)
        else:
            _LOG.warning("%s: not loaded: %s", key.digest, error.message)
        if loaded is not None:
            try:
                loaded.undo.close()
            except Exception:  # noqa: BLE001 - whoever waits is told; its weights go the next time
                _LOG.exception("%s: the load is not undone", key.digest)
        with self._changed:
            if isinstance(error, RevokedBytesError):
                # What is here of it, its slots too, goes as if it had been resident.
                self._emptying.revoke(key, None)
            self._loaded.pop(key, None)
            self._table.load_failed(key)
            self.queue.settle(ticket, error)
            self._changed.notify_all()
        for watch in self.watches:
            watch.load_failed(key)
