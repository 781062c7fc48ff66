"""A server as an operator runs it: flags from a file, keys, JSON logs, a request log, and the metrics page of it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.harness import START_S, Server, free_port, until
from jdserve.cli import main
from jdserve.sim.traces import load_trace


@pytest.mark.slow
def test_an_operated_server(start: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, log, port = tmp_path / "keys", tmp_path / "requests.jsonl", free_port()
    assert main(["key", "alice", "--file", str(keys)]) == 0
    assert main(["key", "root", "--admin", "--file", str(keys)]) == 0
    alice, root = capsys.readouterr().out.split()
    config = tmp_path / "server.toml"
    config.write_text(
        f'port = {port}\napi-key-file = "{keys}"\nadmin-routes = true\nrequest-log = "{log}"\nlog-format = "json"\n'
        'log-level = "info"\nmax-num-seqs = 3\n'
    )
    server = start("--config", str(config), "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    until(lambda: "ready on" in server.said or server.process.poll() is not None, "ready", START_S)
    assert server.process.poll() is None, server.said

    def ask(method: str, path: str, key: str | None, **more: object) -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}", "X-Request-Id": "mine"}
        return httpx.request(method, url + path, headers=headers, timeout=60, **more)  # type: ignore[arg-type]

    body = {"model": "tiny", "prompt": "The harbour", "max_tokens": 9, "ignore_eos": True}
    assert ask("GET", "/health", None).status_code == 200
    assert ask("POST", "/v1/completions", None, json=body).status_code == 401
    assert ask("POST", "/v1/completions", alice, json=body).status_code == 200
    assert ask("POST", "/v1/completions", alice, json=body | {"n": 2, "stream": True}).status_code == 200
    assert ask("POST", "/admin/instances/d0/drain", alice).status_code == 403
    refused = ask("POST", "/admin/instances/d0/drain", root)
    assert (refused.status_code, "last live instance" in refused.text) == (409, True)

    state = ask("GET", "/state", alice).json()
    assert [one["name"] for one in state["instances"]] == ["p0", "d0"]
    assert state["instances"][1]["largest"] == 3
    page = ask("GET", "/metrics", alice).text
    seen = {sample.name: sample.value for f in text_string_to_metric_families(page) for sample in f.samples}
    assert seen["vllm:request_queue_time_seconds_count"] == seen["jdserve:request_transfer_time_seconds_count"] == 3
    assert seen["vllm:request_prefill_time_seconds_sum"] > 0
    assert seen["jdserve:pages_lost"] == seen["jdserve:recompilations_total"] == 0
    assert seen["vllm:inter_token_latency_seconds_count"] == 24

    server.send(signal.SIGTERM)
    assert server.code() == 0
    lines = [json.loads(line) for line in server.said.splitlines()]
    access = [line for line in lines if line["logger"] == "jdserve.access"]
    served = [sample for line in access for sample in line.get("samples", [])]
    assert [line["status"] for line in access][:3] == [401, 200, 200]
    assert {line["key"] for line in access} == {None, "alice", "root"}
    assert all((one["prefill"], one["decode"], one["output_tokens"]) == ("p0", "d0", 9) for one in served)
    for one in served:
        parts = [one[f"{name}_s"] for name in ("queue", "prefill", "transfer", "decode")]
        assert all(part >= 0 for part in parts)
        assert one["prefill_s"] <= one["ttft_s"] + 0.001
    trace = load_trace(log)
    assert trace.outputs == (9, 9, 9)
    assert trace.arrivals_s is not None
