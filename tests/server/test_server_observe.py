"""What is kept of requests: metrics and their other names, attainment, access lines, the request log, traces."""

from __future__ import annotations

import io
import json
import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, Service, events, tiny_plan
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from jdserve.core.logs import JsonFormatter
from jdserve.core.request import SLO
from jdserve.placement.commands.replan import history
from jdserve.runtime.outputs import Phases
from jdserve.server.attainment import WINDOW_S, Window
from jdserve.server.keys import Key, KeyRing
from jdserve.server.operations import Operations
from jdserve.server.requestlog import RequestLog
from jdserve.server.tracing import Tracing
from jdserve.server.watch import Served
from jdserve.sim.traces import load_trace

KEY = "client-key-0123456789"

SCRAPED = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_params_max_tokens": "histogram",
}
"""What inference-perf and aiperf look for, of what a server without adapters and images has."""


def phases() -> Phases:
    """Half a second of queue, a quarter of prefill, an eighth of transfer, ending now."""
    now = time.monotonic()
    return Phases(now - 1, now - 1, now - 0.5, now - 0.25, now - 0.25, now - 0.125, "p0", "d0", 1)


def served(**changes: Any) -> Served:
    base = Served(
        id="a-0",
        arrival=0.0,
        end=5.0,
        first=1.0,
        prompt_tokens=4,
        cached_tokens=0,
        output_tokens=5,
        max_tokens=5,
        finish="stop",
        phases=None,
    )
    return msgspec.structs.replace(base, **changes)


def samples(service: Service) -> dict[str, float]:
    page = service.call("GET", "/metrics").text
    families = text_string_to_metric_families(page)
    return {
        s.name + "".join(f"[{v}]" for k, v in sorted(s.labels.items()) if k not in ("model_name", "le")): s.value
        for family in families
        for s in family.samples
        if s.labels.get("le", "+Inf") == "+Inf"
    }


def test_the_names_that_other_tools_scrape() -> None:
    service = Service()
    service.engine.phases = phases()
    service.complete("hello", max_tokens=5)
    service.complete("hello", max_tokens=3, stop=["h", "e"], n=2)
    families = {f.name: f for f in text_string_to_metric_families(service.call("GET", "/metrics").text)}
    assert {name: families[name].type for name in SCRAPED} == SCRAPED
    assert all(s.labels["model_name"] == "tiny" for name in SCRAPED for s in families[name].samples)
    seen = samples(service)
    assert seen["vllm:request_success_total[length]"] == 1
    assert seen["vllm:request_success_total[stop]"] == 2
    assert seen["vllm:generation_tokens_total"] == seen["jdserve:generation_tokens_total"] == 7
    assert seen["vllm:inter_token_latency_seconds_count"] == 4
    assert seen["vllm:request_time_per_output_token_seconds_count"] == 1
    assert seen["vllm:request_queue_time_seconds_sum"] == pytest.approx(1.5)
    assert seen["vllm:request_prefill_time_seconds_sum"] == pytest.approx(0.75)
    assert seen["jdserve:request_transfer_time_seconds_sum"] == pytest.approx(0.375)
    assert seen["vllm:request_params_max_tokens_sum"] == 11
    assert seen["jdserve:pages_lost[p0][prefill]"] == 0
    assert seen["jdserve:kv_transfer_queue"] == 0
    assert seen["jdserve:slo_attainment[both]"] == 1
    assert seen["jdserve:slo_seconds[ttft]"] == 60


def test_ends_are_counted_by_what_they_were() -> None:
    service = Service()
    service.engine.fail_after = 2
    events(service.complete("hello", stream=True))
    service.complete("hello", temperature=9)
    seen = samples(service)
    assert seen["vllm:request_success_total[error]"] == 1
    assert sum(value for name, value in seen.items() if name.startswith("vllm:request_success_total")) == 1
    assert seen["jdserve:slo_attainment[both]"] == 0, "a request that failed has met nothing"


def test_attainment_over_a_sliding_window() -> None:
    now = 0.0
    window = Window(SLO(ttft_s=1.0, tpot_s=1.0), lambda: now)
    assert window.now() is None
    for one in (
        served(),
        served(first=2.0, end=6.0),  # late
        served(end=5.1),  # slow
        served(finish="error"),
        served(finish="abort"),
        served(output_tokens=1, end=1.0),
        served(first=None, output_tokens=0, finish="length"),
    ):
        window.add(one)
    attained = window.now()
    assert attained is not None
    assert (attained.requests, attained.ttft, attained.tpot, attained.both) == (5, 0.6, 0.6, 0.4)
    now = WINDOW_S + 1
    assert window.now() is None


def test_a_plan_without_an_objective_has_no_attainment() -> None:
    engine = FakeEngine()
    engine.plan = msgspec.structs.replace(tiny_plan(), slo=None)
    service = Service(engine)
    service.complete("a", max_tokens=1)
    assert "slo" not in service.call("GET", "/metrics").text


def lines_of(service: Service, monkeypatch: pytest.MonkeyPatch, formatter: logging.Formatter, call: Any) -> list[str]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.getLogger("jdserve.access")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    call()
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    return stream.getvalue().splitlines()


def test_an_access_line_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(operations=Operations(ring=KeyRing([Key.of(KEY, "client", "alice")])))
    service.engine.phases = phases()
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "mine-1"}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}

    def calls() -> None:
        answer = service.call("POST", "/v1/completions", json=body | {"n": 2}, headers=headers)
        assert answer.headers["x-request-id"] == "mine-1"
        service.call("POST", "/v1/completions", json=body | {"stream": True}, headers=headers)
        service.call("GET", "/health")
        forged = service.call("GET", "/no%0Awhere", headers={"X-Request-Id": "a\tb" * 200})
        assert len(forged.headers["x-request-id"]) == 32

    first, second, third = (json.loads(line) for line in lines_of(service, monkeypatch, JsonFormatter("front"), calls))
    assert (first["request_id"], first["status"], first["key"], first["path"]) == (
        "mine-1",
        200,
        "alice",
        "/v1/completions",
    )
    assert [one["output_tokens"] for one in first["samples"]] == [4, 4]
    sample = first["samples"][0]
    assert (sample["prefill"], sample["decode"], sample["finish"], sample["runs"]) == ("p0", "d0", "length", 1)
    assert (sample["queue_s"], sample["prefill_s"], sample["transfer_s"]) == pytest.approx((0.5, 0.25, 0.125))
    assert sample["decode_s"] > 0
    assert len(second["samples"]) == 1
    assert (third["status"], third["samples"], third["key"]) == (401, [], None)
    assert all(line["process"] == "front" and line["level"] == "info" for line in (first, second, third))
    text = lines_of(service, monkeypatch, logging.Formatter("jdserve: %(message)s"), calls)
    assert len(text) == 3, "a line is a line, whatever the path"
    assert "id=mine-1 key=alice | cmpl-" in text[0]
    assert "queue=0.5000 prefill=0.2500 transfer=0.1250" in text[0]


def test_a_request_log_is_in_the_order_of_arrivals(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    log = RequestLog(file)
    first, second, third, fourth = (log.begin() for _ in range(4))
    log.end(second, served(id="b", arrival=2.0))
    assert file.read_text() == ""
    log.end(third, served(id="c", arrival=3.0, finish="rejected"))
    log.end(first, served(id="a", arrival=1.0, prompt_tokens=7))
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == ["a", "b"]
    log.close()
    del fourth
    trace = load_trace(file)
    assert trace.inputs == (7, 4)
    assert trace.outputs == (5, 5)
    with pytest.raises(ValueError, match=r"\.jsonl"):
        RequestLog(tmp_path / "requests.csv")


def test_a_served_load_can_be_planned_for(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    operations = Operations(request_log=RequestLog(file))
    service = Service(operations=operations)
    for _ in range(3):
        service.complete(["hello", "a"], n=2, max_tokens=4)
    service.complete("hello", temperature=9)
    service.call("GET", "/health")
    operations.close()
    trace = load_trace(file)
    assert len(trace.inputs) == 12
    assert set(trace.outputs) == {4}
    found = history(trace, window_s=60.0)
    assert found.traffic.output.value == 4


def test_a_trace_of_one_request() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    service = Service(operations=Operations(tracing=Tracing(provider)))
    service.engine.phases = phases()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "stream": True}
    service.call("POST", "/v1/completions", json=body, headers={"traceparent": parent})
    service.call("GET", "/v1/models")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert list(spans) == ["queue", "prefill", "transfer", "decode", "POST /v1/completions"]
    root = spans.pop("POST /v1/completions")
    assert f"{root.context.trace_id:032x}" == parent[3:35]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == parent[36:52]
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in spans.values())
    assert [span.attributes["jdserve.instance"] for span in spans.values()] == ["p0", "p0", "d0", "d0"]
    lengths = [(span.end_time - span.start_time) / 1e9 for span in spans.values()]
    assert lengths[:3] == pytest.approx([0.5, 0.25, 0.125], abs=1e-4)
    assert spans["transfer"].end_time == spans["decode"].start_time
    assert abs(root.end_time / 1e9 - time.time()) < 60


def test_phases_of_requests_that_never_got_far() -> None:
    now = Phases(1.0)
    assert served(phases=now).times() == {}
    assert served(phases=Phases(1.0, 2.0)).times() == {"queue": (1.0, 5.0)}
    colocated = served(phases=Phases(1.0, 1.0, 2.0, 3.0, prefill="c0", runs=1)).times()
    assert colocated == {"queue": (1.0, 2.0), "prefill": (2.0, 3.0), "decode": (3.0, 5.0)}
    pulling = served(phases=Phases(1.0, 1.0, 2.0, 3.0, 3.0, prefill="p0", decode="d0", runs=1)).times()
    assert list(pulling) == ["queue", "prefill", "transfer"]
