"""The metrics page: what requests met with, their latencies, and the engine's own numbers, read at each scrape."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jdserve.runtime.outputs import EngineStats
from jdserve.server.engine_api import TextEngine
from jdserve.server.text import TextDelta

Outcome = Literal["ok", "aborted", "failed", "rejected"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "aborted", "failed", "rejected")
"""Answered in full; left by the client; broken inside the service; refused before any token."""

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)

GAUGES = {
    "requests_waiting": "Requests that wait for a step",
    "requests_running": "Requests in the running batch",
    "requests_parked": "Prefilled requests whose KV waits for a pull",
    "pages_total": "Pages of the KV pool",
    "pages_free": "Pages that nobody holds",
    "pages_owned": "Pages that live requests hold",
    "pages_cached": "Pages that only the prefix cache holds",
    "instance_up": "1 when the instance takes work",
}
"""Numbers of an instance, by metric; in its stats they have the same name, without ``requests_``."""

COUNTERS = {
    "preemptions": "Requests sent back to the queue",
    "steps": "Steps launched",
    "step_seconds": "Seconds in steps",
    "prefilled_tokens": "Prompt tokens computed; on a decode instance there are none",
    "pipeline_bubble_seconds": "Stage seconds idle while another stage ran",
}
"""Numbers of an instance that only grow."""

FIELDS = {"step_seconds": "busy_s", "pipeline_bubble_seconds": "bubble_s"}
"""Where a number has another name in the stats."""

MetricFamily = TypeVar("MetricFamily", GaugeMetricFamily, CounterMetricFamily)


class Metrics:
    """Everything that one app counts, in a registry of its own."""

    def __init__(self, engine: TextEngine) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "HTTP requests for text by what they met with", "outcome")
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, once per prompt")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS)
        self._tpot = self._histogram("time_per_output_token_seconds", "Mean gap after the first token", TPOT_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end, per sample", E2E_BUCKETS)
        self._registry.register(_EngineCollector(engine))

    def count(self, outcome: Outcome) -> None:
        """Count one HTTP request."""
        self._requests.labels(outcome).inc()

    def watch(self, prompt_tokens: int) -> Watch:
        """Begin to watch one sample.

        Args:
            prompt_tokens: to count when it has begun to run; 0 where another sample of the prompt counts them.
        """
        return Watch(prompt_tokens, self._prompt_tokens, self._generation_tokens, (self._ttft, self._tpot, self._e2e))

    def render(self) -> bytes:
        """The page, in the text format of Prometheus."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"jdserve:{name}", help, labels, registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"jdserve:{name}", help, buckets=buckets, registry=self._registry)


class Watch:
    """Times one sample from its arrival to its end."""

    def __init__(
        self,
        prompt_tokens: int,
        prompts: Counter,
        generated: Counter,
        latencies: tuple[Histogram, Histogram, Histogram],
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._prompts, self._generated = prompts, generated
        self._ttft, self._tpot, self._e2e = latencies
        self._arrival = time.monotonic()
        self._first: float | None = None
        self._tokens = 0

    def saw(self, delta: TextDelta) -> None:
        """Take note of a delta; its ``finish`` ends the watch."""
        now, tokens = time.monotonic(), delta.produced
        self._prompts.inc(self._prompt_tokens)
        self._prompt_tokens = 0
        self._generated.inc(tokens - self._tokens)
        self._tokens = tokens
        if self._first is None and tokens:
            self._first = now
            self._ttft.observe(now - self._arrival)
        if delta.finish is not None:
            self._e2e.observe(now - self._arrival)
            if self._first is not None and tokens > 1:
                self._tpot.observe((now - self._first) / (tokens - 1))


class _EngineCollector(Collector):
    """Reads the engine's stats when the page is asked for."""

    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        # Without this the registry would collect, and so ask an engine that may not have started.
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        labels = ["instance", "role"]
        for name, help in GAUGES.items():
            yield _filled(GaugeMetricFamily(f"jdserve:{name}", help, labels=labels), stats, name)
        for name, help in COUNTERS.items():
            yield _filled(CounterMetricFamily(f"jdserve:{name}", help, labels=labels), stats, name)
        transfers = stats.transfers
        yield CounterMetricFamily("jdserve:kv_transfers", "KV caches pulled", value=transfers.count)
        yield CounterMetricFamily("jdserve:kv_transfer_bytes", "Bytes of KV pulled", value=transfers.bytes)
        yield CounterMetricFamily("jdserve:kv_transfer_seconds", "Seconds that pulls took", value=transfers.seconds)
        yield CounterMetricFamily(
            "jdserve:recompilations", "Compilations after the engine was ready", value=stats.recompilations
        )
        ready = float(self._engine.ready and not self._engine.draining)
        yield CounterMetricFamily(
            "jdserve:restarts", "Instances that came back after they had died", value=stats.restarts
        )
        yield CounterMetricFamily("jdserve:retries", "Runs of requests that had to begin anew", value=stats.retries)
        yield GaugeMetricFamily("jdserve:ready", "1 when new requests are taken", value=ready)


def _filled(family: MetricFamily, stats: EngineStats, name: str) -> MetricFamily:
    """One sample per instance."""
    for instance in stats.instances:
        up = float(instance.name not in stats.dead)
        value = up if name == "instance_up" else getattr(instance, FIELDS.get(name, name.removeprefix("requests_")))
        family.add_metric([instance.name, instance.role], value)
    return family
