"""Tells meter, metrics, traces and log of every request, each with the one tuple.

The log has one line of each: ``request.ended`` when it was begun, else ``request.refused``. A trace
is written of each whose routing context held: others are nobody's, and would fill the collector.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from opentelemetry.context import Context

from gpu_worker.serving.adapter_statistics import AdapterStatistics
from gpu_worker.serving.meter import Amount, Meter, RequestTuple, who_fields
from gpu_worker.serving.metrics import Metrics
from gpu_worker.serving.residency import Key
from gpu_worker.serving.running import Marks, Running
from gpu_worker.serving.tracing import Traced, Tracer
from registry_service.domain.errors import RegistryError
from registry_service.trust.routing_context import BASE_MARKER

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came, before anything of it is believed.

    ``arrived`` is in nanoseconds since the epoch, ``trace`` is its caller's.
    """

    request_id: str
    route: str
    arrived: int
    trace: Context


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

    def used_run_end(self, change: int, most: int) -> dict[RequestTuple, Amount] | None:
        """End the meter's run when it holds more than ``most`` tuples, else None.

        Returns its totals that changed after a change: nothing else knows them any more.
        """
        with self._lock:
            return self._meter.run_end(change) if len(self._meter) > most else None

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
        traced = Traced(request.request_id, request.who, marks, amount)
        self._tracer.write(traced, caller, outcome=outcome, good=good)
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

    def refused(self, asked: Asked, error: RegistryError, who: RequestTuple | None) -> None:
        """A request was not begun; its message may quote the request, and stays out of the log.

        ``who`` is None where no routing context held.
        """
        if who is not None:
            marks = Marks(arrived=asked.arrived, last=time.time_ns())
            traced = Traced(asked.request_id, who, marks, Amount())
            self._tracer.write(traced, asked.trace, outcome=error.code.lower(), good=False)
        _LOG.info(
            "request refused: %s",
            error.code,
            extra={
                "event": "request.refused",
                "requestId": asked.request_id,
                **who_fields(who),
                "route": asked.route,
                "status": error.http_status,
                "code": error.code,
            },
        )
