"""The engine's numbers as metrics, read at each scrape; and ours under the names that vLLM's have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from jdserve.runtime.outputs import EngineStats
from jdserve.server.attainment import Window
from jdserve.server.engine_api import TextEngine

GAUGES = {
    "requests_waiting": "Requests that wait for a step",
    "requests_running": "Requests in the running batch",
    "requests_parked": "Prefilled requests whose KV waits for a pull",
    "requests_pulling": "Requests whose KV is on its way to the instance",
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
    "prefix_queries": "Prompt tokens that were looked up in the prefix cache",
    "prefix_hits": "Prompt tokens that the prefix cache had",
    "pipeline_bubble_seconds": "Stage seconds idle while another stage ran",
}
"""Numbers of an instance that only grow."""

FIELDS = {"step_seconds": "busy_s", "pipeline_bubble_seconds": "bubble_s"}
"""Where a number has another name in the stats."""

SAME = {
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prompt_tokens_cached": "prompt_tokens_cached",
    "request_success": "request_success",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "time_per_output_token_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_queue_time_seconds": "request_queue_time_seconds",
    "request_prefill_time_seconds": "request_prefill_time_seconds",
    "request_decode_time_seconds": "request_decode_time_seconds",
    "request_inference_time_seconds": "request_inference_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
    "request_params_max_tokens": "request_params_max_tokens",
}
"""vLLM's metrics that are one of ours. Theirs of a token's time is the gap before each, not a request's mean."""

MetricFamily = TypeVar("MetricFamily", GaugeMetricFamily, CounterMetricFamily)


class EngineCollector(Collector):
    """Reads the engine's stats when the page is asked for.

    Args:
        engine: to ask.
        window: of recent requests, None where the plan has no objective.
    """

    def __init__(self, engine: TextEngine, window: Window | None) -> None:
        self._engine = engine
        self._window = window

    def describe(self) -> Iterator[Metric]:
        """Nothing: else the registry would collect, and so ask an engine that may not have started."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All families."""
        stats = self._engine.stats()
        labels = ["instance", "role"]
        for name, help in GAUGES.items():
            yield _filled(GaugeMetricFamily(f"jdserve:{name}", help, labels=labels), stats, name)
        for name, help in COUNTERS.items():
            yield _filled(CounterMetricFamily(f"jdserve:{name}", help, labels=labels), stats, name)
        lost = GaugeMetricFamily(
            "jdserve:pages_lost", "Pages that are nowhere; anything but 0 is a fault", labels=labels
        )
        for one in stats.instances:
            held = one.pages_free + one.pages_owned + one.pages_cached
            lost.add_metric([one.name, one.role], one.pages_total - held)
        yield lost
        yield from self._whole(stats)
        if self._window is not None:
            yield from _attained(self._window)

    def _whole(self, stats: EngineStats) -> Iterator[Metric]:
        transfers = stats.transfers
        queue = sum(one.waiting + one.pulling for one in stats.instances if one.role == "decode")
        ready = float(self._engine.ready and not self._engine.draining)
        for name, help, value in (
            ("kv_transfers", "KV caches pulled", transfers.count),
            ("kv_transfer_bytes", "Bytes of KV pulled", transfers.bytes),
            ("kv_transfer_seconds", "Seconds that pulls took", transfers.seconds),
            ("recompilations", "Compilations after the engine was ready", stats.recompilations),
            ("restarts", "Instances that came back after they had died", stats.restarts),
            ("retries", "Runs of requests that had to begin anew", stats.retries),
        ):
            yield CounterMetricFamily(f"jdserve:{name}", help, value=value)
        yield GaugeMetricFamily(
            "jdserve:kv_transfer_queue",
            "KV caches that wait for pages of a decode instance, or are on their way",
            queue,
        )
        yield GaugeMetricFamily("jdserve:ready", "1 when new requests are taken", value=ready)


def _attained(window: Window) -> Iterator[Metric]:
    now = window.now()
    shares = GaugeMetricFamily(
        "jdserve:slo_attainment", "Share of the last minute's requests within the objective", labels=["objective"]
    )
    for objective in ("ttft", "tpot", "both") if now is not None else ():
        shares.add_metric([objective], getattr(now, objective))
    yield shares
    yield GaugeMetricFamily("jdserve:slo_requests", "Requests of the last minute", 0 if now is None else now.requests)
    bounds = GaugeMetricFamily("jdserve:slo_seconds", "The objective", labels=["objective"])
    bounds.add_metric(["ttft"], window.slo.ttft_s)
    bounds.add_metric(["tpot"], window.slo.tpot_s)
    yield bounds
    yield GaugeMetricFamily("jdserve:slo_target", "Share that is aimed at", window.slo.attainment)


def _filled(family: MetricFamily, stats: EngineStats, name: str) -> MetricFamily:
    """One sample per instance."""
    for instance in stats.instances:
        up = float(instance.name not in stats.dead)
        value = up if name == "instance_up" else getattr(instance, FIELDS.get(name, name.removeprefix("requests_")))
        family.add_metric([instance.name, instance.role], value)
    return family


class AliasCollector(Collector):
    """The same numbers once more, as ``vllm:*`` with a label ``model_name``: what existing tools scrape.

    Args:
        ours: gives our families.
        engine: to ask for the rest.
        model: its name.
    """

    def __init__(self, ours: Callable[[], Iterable[Metric]], engine: TextEngine, model: str) -> None:
        self._ours = ours
        self._engine = engine
        self._model = model

    def describe(self) -> Iterator[Metric]:
        """Nothing; see :class:`EngineCollector`."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All families."""
        families = {family.name: family for family in self._ours()}
        for theirs, ours in SAME.items():
            yield self._renamed(families[f"jdserve:{ours}"], f"vllm:{theirs}")
        stats = self._engine.stats().instances
        pages = sum(one.pages_total for one in stats)
        used = sum(one.pages_owned for one in stats) / pages if pages else 0.0
        for name, help, value in (
            ("num_requests_running", "Requests in running batches", sum(one.running for one in stats)),
            ("num_requests_waiting", "Requests that wait for a step", sum(one.waiting for one in stats)),
            ("kv_cache_usage_perc", "Share of pages that requests hold, in [0, 1]", used),
            ("gpu_cache_usage_perc", "The same under its old name", used),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", help, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, help, value in (
            ("num_preemptions", "Requests sent back to the queue", sum(one.preemptions for one in stats)),
            ("prefix_cache_queries", "Prompt tokens looked up", sum(one.prefix_queries for one in stats)),
            ("prefix_cache_hits", "Prompt tokens found", sum(one.prefix_hits for one in stats)),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", help, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter

    def _renamed(self, family: Metric, name: str) -> Metric:
        alias = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                suffix = sample.name.removeprefix(family.name)
                alias.samples.append(Sample(name + suffix, {"model_name": self._model, **sample.labels}, sample.value))
        return alias
