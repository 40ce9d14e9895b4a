"""Traces of requests: one span for each, with those of its parts. They carry the tuple.

Nothing is traced unless a collector is named. No span holds a prompt, a token or a context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NoOpTracerProvider, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace import TracerProvider as AnyTracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gpu_worker.serving.meter import Amount, RequestTuple
from gpu_worker.serving.running import Marks

_SCOPE: Final = "gpu_worker.serving"
_CALLER: Final = TraceContextTextMapPropagator()


def provider_open(endpoint: str | None, *, node: str) -> AnyTracerProvider:
    """Send traces to an OTLP/HTTP collector, or nowhere."""
    if endpoint is None:
        return NoOpTracerProvider()
    provider = TracerProvider(
        resource=Resource({"service.name": _SCOPE, "service.instance.id": node})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


def provider_close(provider: AnyTracerProvider) -> None:
    """Send what is left."""
    if isinstance(provider, TracerProvider):
        provider.shutdown()


def caller_context(headers: Mapping[str, str]) -> Context:
    """The caller's trace (W3C traceparent), when it sent one that can be read."""
    return _CALLER.extract({k: headers[k] for k in _CALLER.fields if k in headers}, Context())


@dataclass(frozen=True, slots=True)
class Traced:
    """What a trace says of a request that came to its end, begun or not."""

    request_id: str
    who: RequestTuple
    marks: Marks
    amount: Amount


class Tracer:
    """Writes one trace for each request, after its end."""

    def __init__(self, provider: AnyTracerProvider) -> None:
        self._tracer = provider.get_tracer(_SCOPE)

    def write(self, traced: Traced, caller: Context, *, outcome: str, good: bool) -> None:
        """Write a request's spans; ``outcome`` says how it ended."""
        marks, amount = traced.marks, traced.amount
        attributes: dict[str, str | int] = {
            **traced.who.fields(),
            "requestId": traced.request_id,
            "outcome": outcome,
            "promptTokens": amount.prompt,
            "completionTokens": amount.completion,
            "reusedTokens": amount.reused,
        }
        span = self._tracer.start_span(
            "request", caller, SpanKind.SERVER, attributes, start_time=marks.arrived
        )
        if not good:
            span.set_status(StatusCode.ERROR)
        inside = set_span_in_context(span, caller)
        for name, start, end in _parts(marks):
            part = self._tracer.start_span(name, inside, attributes=attributes, start_time=start)
            part.end(end)
        span.end(max(marks.last, marks.joined, marks.queued))


def _parts(marks: Marks) -> list[tuple[str, int, int]]:
    """The parts that a request came through, with where they begin and end."""
    borders = (
        ("admit", marks.arrived, marks.allowed),
        ("load", marks.allowed, marks.loaded),
        ("queue", marks.queued, marks.joined),
        ("prefill", marks.joined, marks.first),
        ("decode", marks.first, marks.last),
    )
    return [(name, start, end) for name, start, end in borders if start and end]
