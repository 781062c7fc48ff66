"""OpenTelemetry traces: a span per HTTP request, and below it one per phase of each sample.

The spans are made when a request has ended, from the times that the front door has of it: the workers know nothing of
traces, and a step never waits for one. Needs the extra ``otel``.
"""

from __future__ import annotations

import time
from typing import Any

from jdserve.server.access import Exchange
from jdserve.server.watch import Served


class Tracing:
    """Turns an :class:`~jdserve.server.access.Exchange` into spans; a witness of the access log.

    Args:
        provider: an OpenTelemetry ``TracerProvider``.
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider = provider
        self._tracer = provider.get_tracer("jdserve")
        self._wall_ns = time.time_ns() - time.monotonic_ns()

    def __call__(self, exchange: Exchange) -> None:
        """Make the spans of a request that asked for text; others have none."""
        if not exchange.served:
            return
        trace = self._trace
        carrier = {} if exchange.traceparent is None else {"traceparent": exchange.traceparent}
        root = self._tracer.start_span(
            f"{exchange.method} {exchange.path}",
            context=self._propagator.extract(carrier),
            kind=trace.SpanKind.SERVER,
            start_time=self._ns(exchange.begin),
            attributes={
                "http.request.method": exchange.method,
                "url.path": exchange.path,
                "http.response.status_code": exchange.status,
                "jdserve.request_id": exchange.id,
            },
        )
        for one in exchange.served:
            self._sample(one, trace.set_span_in_context(root))
        if exchange.status >= 500:
            root.set_status(trace.StatusCode.ERROR)
        root.end(self._ns(exchange.end))

    def _sample(self, one: Served, context: Any) -> None:
        phases = one.phases
        where = {"queue": "", "prefill": "", "transfer": "", "decode": ""}
        if phases is not None:
            decode = phases.decode or phases.prefill
            where = {"queue": phases.prefill, "prefill": phases.prefill, "transfer": decode, "decode": decode}
        common = {"gen_ai.response.id": one.id, "gen_ai.response.finish_reasons": [one.finish]}
        usage = {"gen_ai.usage.input_tokens": one.prompt_tokens, "gen_ai.usage.output_tokens": one.output_tokens}
        for name, (begin, end) in one.times().items():
            attributes = {
                **common,
                **usage,
                "jdserve.instance": where[name],
                "jdserve.runs": phases.runs if phases else 0,
            }
            span = self._tracer.start_span(name, context=context, start_time=self._ns(begin), attributes=attributes)
            span.end(self._ns(max(end, begin)))

    def close(self) -> None:
        """Send what is still to be sent."""
        self._provider.shutdown()

    def _ns(self, monotonic_s: float) -> int:
        return self._wall_ns + int(monotonic_s * 1e9)


def otlp_tracing(endpoint: str) -> Tracing:
    """Traces that go to a collector.

    Args:
        endpoint: where it takes OTLP over HTTP, such as ``http://127.0.0.1:4318/v1/traces``.

    Raises:
        ValueError: OpenTelemetry is not installed.
    """
    try:
        # The checks run without the extra.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # pyright: ignore[reportMissingImports]
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(f"--otlp-endpoint needs the extra otel (pip install 'jdserve[otel]'): {error}") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "jdserve"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)
