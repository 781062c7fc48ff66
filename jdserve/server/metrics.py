"""The metrics page: what requests met with, their latencies, and the engine's own numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from jdserve.core.request import Request
from jdserve.server.attainment import Window
from jdserve.server.collector import AliasCollector, EngineCollector
from jdserve.server.engine_api import TextEngine
from jdserve.server.requestlog import RequestLog
from jdserve.server.watch import SERVED, Served, Watch

Outcome = Literal["ok", "aborted", "failed", "rejected"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "aborted", "failed", "rejected")
"""Answered in full; left by the client; broken inside the service; refused before any token."""

ENDS: dict[Outcome | None, str] = {"ok": "stop", "aborted": "abort", "failed": "error", "rejected": "rejected"}
"""How the samples ended that had no end of their own, by what the request met with; None is a refusal too."""

FINISHES = ("stop", "length", "abort", "error")

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
PHASE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
TOKEN_BUCKETS = tuple(float(2**power) for power in range(18))


class Metrics:
    """Everything that one app counts, in a registry of its own.

    Args:
        engine: to ask for its numbers.
        model: its name, for the aliases.
        log: of requests, None for none.

    Attributes:
        window: of recent requests, None where the plan has no objective.
    """

    def __init__(self, engine: TextEngine, model: str = "", log: RequestLog | None = None) -> None:
        self._registry = CollectorRegistry()
        self._log = log
        slo = engine.plan.slo
        self.window = None if slo is None else Window(slo)
        self._requests = self._counter("requests", "HTTP requests for text by what they met with", "outcome")
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._success = self._counter("request_success", "Samples by their end", "finished_reason")
        for finish in FINISHES:
            self._success.labels(finish)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, once per prompt")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens that the prefix cache had")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS)
        self._tpot = self._histogram("time_per_output_token_seconds", "Mean gap after the first token", TPOT_BUCKETS)
        self._gap = self._histogram("inter_token_latency_seconds", "Gap before each token but the first", TPOT_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end, per sample", E2E_BUCKETS)
        phases = ("queue", "prefill", "transfer", "decode", "inference")
        self._phases = {
            name: self._histogram(f"request_{name}_time_seconds", f"Time of the phase: {name}", PHASE_BUCKETS)
            for name in phases
        }
        self._prompt_lengths = self._histogram("request_prompt_tokens", "Tokens of a prompt", TOKEN_BUCKETS)
        self._lengths = self._histogram("request_generation_tokens", "Tokens of an answer", TOKEN_BUCKETS)
        self._limits = self._histogram("request_params_max_tokens", "Tokens that were asked for", TOKEN_BUCKETS)
        self._engine = CollectorRegistry()
        self._engine.register(EngineCollector(engine, self.window))
        self._engine.register(AliasCollector(self._registry.collect, engine, model))

    def count(self, outcome: Outcome) -> None:
        """Count one HTTP request."""
        self._requests.labels(outcome).inc()

    def watch(self, request: Request, scope: Any, *, first_of_prompt: bool) -> Watch:
        """Begin to watch one sample.

        Args:
            request: that the engine gets.
            scope: of the HTTP request; it collects the samples that have ended, for the access log.
            first_of_prompt: its prompt is counted with it, when it has begun to run.
        """
        entry = None if self._log is None else self._log.begin()

        def on_begin(cached: int) -> None:
            if first_of_prompt:
                self._prompt_tokens.inc(len(request.prompt))
                self._cached_tokens.inc(cached)

        def on_tokens(count: int, gap_s: float | None) -> None:
            self._generation_tokens.inc(count)
            if gap_s is not None:
                for _ in range(count):
                    self._gap.observe(gap_s / count)

        def on_end(served: Served) -> None:
            self._end(served)
            if entry is not None and self._log is not None:
                self._log.end(entry, served)
            if SERVED in scope:
                scope[SERVED].append(served)

        return Watch(request, on_begin=on_begin, on_tokens=on_tokens, on_end=on_end)

    def end(self, watches: Iterable[Watch], outcome: Outcome | None) -> None:
        """End the samples that have not ended by themselves."""
        for watch in watches:
            watch.end(ENDS[outcome or "rejected"])

    def _end(self, served: Served) -> None:
        if served.finish == "rejected":
            return
        self._success.labels(served.finish).inc()
        if self.window is not None:
            self.window.add(served)
        if served.ttft_s is not None:
            self._ttft.observe(served.ttft_s)
        if served.whole:
            self._e2e.observe(served.end - served.arrival)
            self._prompt_lengths.observe(served.prompt_tokens)
            self._lengths.observe(served.output_tokens)
            self._limits.observe(served.max_tokens)
            if served.tpot_s is not None:
                self._tpot.observe(served.tpot_s)
        times = served.times()
        for phase, (begin, end) in times.items():
            self._phases[phase].observe(max(end - begin, 0.0))
        if "prefill" in times:
            self._phases["inference"].observe(max(served.end - times["prefill"][0], 0.0))

    def render(self) -> bytes:
        """The page, in the text format of Prometheus."""
        return generate_latest(self._registry) + generate_latest(self._engine)

    def histogram(self, name: str) -> list[tuple[float, int]]:
        """(upper bound in seconds, how many lie in the bucket) of ``ttft`` or ``tpot``; the last bound is infinite."""
        family = next(iter({"ttft": self._ttft, "tpot": self._tpot}[name].collect()))
        upto = [(float(s.labels["le"]), int(s.value)) for s in family.samples if s.name.endswith("_bucket")]
        counts = [upto[0][1], *(after[1] - before[1] for before, after in itertools.pairwise(upto))]
        return [(bound, count) for (bound, _), count in zip(upto, counts, strict=True)]

    def tokens(self) -> int:
        """Generated so far."""
        return int(next(iter(self._generation_tokens.collect())).samples[0].value)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"jdserve:{name}", help, labels, registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"jdserve:{name}", help, buckets=buckets, registry=self._registry)
