"""A node's metrics for Prometheus. None has a digest or a tenant as a label.

What is counted here is the node's; who used what is the meter's, and goes to the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gpu_worker.serving.meter import Amount

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_LOAD_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
_FIRST_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


@dataclass(frozen=True, slots=True)
class Looks:
    """What is looked up whenever somebody asks: each a number by name."""

    queues: Callable[[], Mapping[str, int]]
    resident_bytes: Callable[[], Mapping[str, int]]
    unloads: Callable[[], Mapping[str, int]]


class Metrics:
    """The metrics of one node. Thread-safe."""

    def __init__(self, looks: Looks) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Looked(looks))
        self._requests = Counter(
            "node_requests",
            "Requests by route and class of status",
            ("route", "status"),
            registry=self._registry,
        )
        self._tokens = Counter(
            "node_tokens",
            "Tokens: prompt, completion, and those of prompts that were not computed again",
            ("kind",),
            registry=self._registry,
        )
        self._load_failures = Counter(
            "node_load_failures", "Loads that failed", registry=self._registry
        )
        self._load = self._histogram(
            "node_load_seconds",
            "From a load's turn to the adapter being ready; waiting for the turn is not in it",
            _LOAD_SECONDS,
        )
        self._first = self._histogram(
            "node_first_token_seconds",
            "From a request's arrival to its first token",
            _FIRST_SECONDS,
        )
        self._token = self._histogram(
            "node_token_seconds", "From one token of an answer to its next", _TOKEN_SECONDS
        )

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)

    def answered(self, route: str, status: int) -> None:
        """A request was answered; ``route`` is one of the node's own, never what was asked for."""
        self._requests.labels(route, f"{status // 100}xx").inc()

    def used(self, amount: Amount) -> None:
        """A request came to its end."""
        for kind in ("prompt", "completion", "reused"):
            self._tokens.labels(kind).inc(getattr(amount, kind))

    def first_token(self, seconds: float) -> None:
        """A request gave its first token."""
        self._first.observe(seconds)

    def token(self, seconds: float) -> None:
        """An answer went on."""
        self._token.observe(seconds)

    def loaded(self, seconds: float) -> None:
        """An adapter was loaded."""
        self._load.observe(seconds)

    def load_failed(self) -> None:
        """A load failed."""
        self._load_failures.inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)


class _Looked(Collector):
    def __init__(self, looks: Looks) -> None:
        self._looks = looks

    def collect(self) -> Iterable[Metric]:
        queues = GaugeMetricFamily("node_queue_length", "Requests and loads", labels=("queue",))
        for name, count in self._looks.queues().items():
            queues.add_metric((name,), count)
        sizes = GaugeMetricFamily(
            "node_resident_bytes",
            "Bytes taken now, not those reserved; KV: lanes, prefix blocks, pages and saves",
            labels=("category",),
        )
        for name, size in self._looks.resident_bytes().items():
            sizes.add_metric((name,), size)
        unloads = CounterMetricFamily("node_unloads", "Adapters unloaded", labels=("reason",))
        for name, count in self._looks.unloads().items():
            unloads.add_metric((name,), count)
        return (queues, sizes, unloads)
