"""Tells meter, metrics, traces and log of every request, each with the one tuple."""

from __future__ import annotations

import logging
import threading

from opentelemetry.context import Context

from gpu_worker.serving.adapter_statistics import AdapterStatistics
from gpu_worker.serving.meter import Amount, Meter, RequestTuple, who_fields
from gpu_worker.serving.metrics import Metrics
from gpu_worker.serving.residency import Key
from gpu_worker.serving.running import Running
from gpu_worker.serving.tracing import Tracer
from registry_service.domain.errors import RegistryError
from registry_service.trust.routing_context import BASE_MARKER

_LOG = logging.getLogger(__name__)


class Recorder:
    """Thread-safe: the model's thread and those of requests call it."""

    def __init__(self, metrics: Metrics, statistics: AdapterStatistics, tracer: Tracer) -> None:
        self.metrics = metrics
        self.statistics = statistics
        self._tracer = tracer
        self._lock = threading.Lock()
        self._meter = Meter()

    def used_since(self, change: int) -> tuple[dict[RequestTuple, Amount], int]:
        """The meter's totals that changed after a change, and the number of the last one."""
        with self._lock:
            return self._meter.since(change)

    def ended(self, running: Running) -> None:
        """The engine holds nothing of a request any more: what it used is final."""
        if not running.generations:
            return
        amount = running.amount
        with self._lock:
            self._meter.count(running.request.who, amount)
        self.metrics.used(amount)

    def token(self, running: Running, seconds: float) -> None:
        """An answer went on, ``seconds`` after its token before."""
        self.metrics.token(seconds)
        who = running.request.who
        if who.adapter_digest != BASE_MARKER:
            self.statistics.token(Key(who.tenant_id, who.adapter_digest), seconds)

    def finished(self, running: Running, caller: Context, outcome: str, *, good: bool) -> None:
        """A request was answered, or nobody waits for its answer any more."""
        request, amount = running.request, running.amount
        marks = request.marks
        if marks.first:
            self.metrics.first_token((marks.first - marks.arrived) / 1e9)
        self._tracer.write(running, caller, outcome=outcome, good=good)
        _LOG.info(
            "request ended: %s",
            outcome,
            extra={
                "event": "request.ended",
                "requestId": request.request_id,
                **request.who.fields(),
                "outcome": outcome,
                "promptTokens": amount.prompt,
                "completionTokens": amount.completion,
                "reusedTokens": amount.reused,
                "seconds": round((max(marks.last, marks.queued) - marks.arrived) / 1e9, 4),
            },
        )

    def refused(
        self, request_id: str, route: str, error: RegistryError, who: RequestTuple | None
    ) -> None:
        """A request was refused; its message may quote the request, and stays out of the log.

        ``who`` is None where no routing context held.
        """
        _LOG.info(
            "request refused: %s",
            error.code,
            extra={
                "event": "request.refused",
                "requestId": request_id,
                **who_fields(who),
                "route": route,
                "status": error.http_status,
                "code": error.code,
            },
        )
