"""Tells the registry what tenants used on this node, so that they can see their own there."""

from __future__ import annotations

import logging
import threading
import uuid
from itertools import islice
from typing import Any

from gpu_worker.serving.meter import Amount, RequestTuple
from gpu_worker.serving.recorder import Recorder
from registry_service.client import RegistryClient
from registry_service.domain import limits
from registry_service.domain.errors import RegistryError

_LOG = logging.getLogger(__name__)


class UsageReport:
    """One thread. Totals are told until they were heard; told twice they count once.

    They are those of a run, and the registry adds up the runs of a node: one that has very many is
    ended, so that they do not grow for ever.
    """

    def __init__(self, client: RegistryClient, recorder: Recorder, node: str) -> None:
        self._client = client
        self._recorder = recorder
        self._node = node
        self._run = str(uuid.uuid4())
        self._heard = 0
        # The run before, and what was not heard of it.
        self._ended: tuple[str, dict[RequestTuple, Amount]] = (self._run, {})
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="usage", daemon=True)

    def start(self) -> None:
        """Tell from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Tell what is left, once, and end the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def send(self) -> None:
        """Tell what changed.

        Raises:
            RegistryError: it was not heard; the next time tells it too.
        """
        ended, left = self._ended
        self._tell(ended, left)
        self._ended = (ended, {})
        changed, change = self._recorder.used_since(self._heard)
        self._tell(self._run, changed)
        self._heard = change
        rest = self._recorder.used_run_end(change, limits.USAGE_TUPLES)
        if rest is not None:
            self._ended = (self._run, rest)
            self._run = str(uuid.uuid4())

    def _tell(self, run: str, totals: dict[RequestTuple, Amount]) -> None:
        items = iter(_item(who, amount) for who, amount in totals.items())
        while some := list(islice(items, limits.USAGE_ITEMS)):
            self._client.usage_report(self._node, run, some)

    def _loop(self) -> None:
        while not self._stopping.wait(limits.USAGE_SECONDS):
            self._try()
        self._try()

    def _try(self) -> None:
        try:
            self.send()
        except RegistryError as error:
            _LOG.warning("usage: %s", error.message)


def _item(who: RequestTuple, amount: Amount) -> dict[str, Any]:
    return {
        "tenantId": str(who.tenant_id),
        "adapterDigest": who.adapter_digest,
        "requests": amount.requests,
        "promptTokens": amount.prompt,
        "completionTokens": amount.completion,
        "reusedTokens": amount.reused,
    }
