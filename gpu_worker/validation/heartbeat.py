"""Keeps a job's lease while it runs, in a thread, and says when it is lost."""

from __future__ import annotations

import threading
from typing import Final

from registry_service.client import RegistryClient
from registry_service.domain.errors import ConflictError, RegistryError

_BEATS_PER_LEASE: Final = 3


class Heartbeat:
    """A context in which the lease is renewed. ``lost`` is set once somebody else has the job."""

    def __init__(
        self, client: RegistryClient, job_id: str, lease: int, lease_seconds: float
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._lease = lease
        self._pause = max(0.1, lease_seconds / _BEATS_PER_LEASE)
        self._over = threading.Event()
        self.lost = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._over.wait(self._pause):
            try:
                self._client.job_heartbeat(self._job_id, self._lease)
            except ConflictError:
                self.lost.set()
                return
            except RegistryError:
                # Unreachable for the moment: the lease outlives a missed beat or two.
                continue
