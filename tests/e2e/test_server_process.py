"""The server as a process: what it says, how it starts, drains and stops, and how it refuses to start."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from e2e.harness import START_S, Api, Server, free_port, small_plan, until

STREAMS, SAMPLES = 16, 8
"""32 batches: the last ones still wait when the signal comes, and are being decoded for some time after it."""

LENGTH = 100


class Stream(threading.Thread):
    """A client that reads a long stream to its end."""

    def __init__(self, url: str, samples: int = 1) -> None:
        super().__init__()
        self._url = url
        self._samples = samples
        self.begun = threading.Event()
        self.lines: list[str] = []

    def run(self) -> None:
        body = {"model": "tiny", "prompt": "The harbour", "max_tokens": LENGTH, "ignore_eos": True, "stream": True}
        body |= {"n": self._samples, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                self.lines.append(line)
                self.begun.set()

    def check(self) -> None:
        """Every token has come, and the end mark."""
        data = [line.removeprefix("data: ") for line in self.lines if line]
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["usage"]["completion_tokens"] == LENGTH * self._samples


def refused(url: str) -> bool:
    """Whether a new request is turned away: with 503, or by a closed socket."""
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=10)
    except httpx.TransportError:
        return True
    assert answer.status_code in (200, 503)
    if answer.status_code == 503:
        assert answer.json()["error"]["code"] == "unavailable"
        assert int(answer.headers["retry-after"]) > 0
    return answer.status_code == 503


def drained_by(server: Server, number: signal.Signals) -> None:
    """Signal a server with open streams: they end whole, nothing new is taken, the exit code is 0."""
    streams = [Stream(server.url, SAMPLES) for _ in range(STREAMS)]
    for stream in streams:
        stream.start()
    assert streams[0].begun.wait(30)
    api = Api(server.url)
    until(lambda: sum(api.metric(f"requests_{what}") for what in ("running", "waiting", "parked")) > 1, "all have come")
    server.send(number)
    until(lambda: "draining" in server.said or server.process.poll() is not None, "the drain")
    assert refused(server.url)
    for stream in streams:
        stream.join(60)
        stream.check()
    assert server.code() == 0
    assert "draining, " in server.said
    assert "Traceback" not in server.said


def stages_until_ready(server: Server, url: str) -> list[tuple[str, float | None]]:
    """What ``/health`` tells from the first moment on; each answer before the last must be 503."""
    told: list[tuple[str, float | None]] = []

    def ready() -> bool:
        assert server.process.poll() is None, server.said
        try:
            answer = httpx.get(f"{url}/health", timeout=10)
        except httpx.TransportError:
            return False
        if answer.status_code == 200:
            assert answer.json() == {"status": "ok"}
            return True
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        health = answer.json()
        assert health["status"] == "starting"
        told.append((health["stage"], health["progress"]))
        if len(told) == 1:
            assert refused(url)
        return False

    until(ready, "200 from /health", START_S)
    return told


def replay(*logs: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jdserve.cli", "replay", *map(str, logs)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_ops_01_a_life(start: Callable[..., Server], tmp_path: Path) -> None:
    """Start, the curl line, streams, SIGTERM, and the recorded logs."""
    port, record = free_port(), tmp_path / "record"
    server = start("--port", str(port), "--record", str(record))
    told = stages_until_ready(server, f"http://127.0.0.1:{port}")
    assert "compile" in {stage for stage, _ in told}
    assert all(done is None or 0 <= done <= 1 for _, done in told)
    assert server.wait_ready().url == f"http://127.0.0.1:{port}"
    for line in ("load the weights: 100%", "compile the step programs: 100%", "ready on"):
        assert f"jdserve: {line}" in server.said

    if shutil.which("curl"):
        answer = json.loads(subprocess.check_output(["bash", "-c", f"{server.curl} -s"], timeout=60))
    else:
        body = server.curl[server.curl.index("{") : server.curl.rindex("}") + 1]
        answer = httpx.post(f"{server.url}/v1/completions", json=json.loads(body)).json()
    assert answer["usage"]["completion_tokens"] > 0
    assert answer["choices"][0]["text"]

    drained_by(server, signal.SIGTERM)

    logs = sorted(record.iterdir())
    assert [log.name for log in logs] == ["d0.jsonl", "p0.jsonl", "router.jsonl"]
    same = replay(*logs)
    assert same.returncode == 0, same.stdout + same.stderr
    assert same.stdout.count("identical") == 3
    lines = logs[0].read_text().splitlines()
    changed = next(index for index, line in enumerate(lines) if index and json.loads(line)["commands"])
    lines[changed] = json.dumps(json.loads(lines[changed]) | {"commands": []})
    logs[0].write_text("\n".join(lines) + "\n")
    other = replay(*logs)
    assert other.returncode == 1
    assert f"event {changed - 1} differs" in other.stdout
    assert other.stdout.count("identical") == 2


def test_an_interrupt_drains_too(start: Callable[..., Server]) -> None:
    drained_by(start().wait_ready(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_start(start: Callable[..., Server], number: signal.Signals) -> None:
    port = free_port()
    server = start("--port", str(port))

    def starting() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 503
        except httpx.TransportError:
            return False

    until(starting, "the gate answers", START_S)
    server.send(number)
    assert server.code(10) == 130
    assert "stopped during start-up" in server.said
    assert "Traceback" not in server.said


def test_a_wrong_flag_is_told_with_the_usage(start: Callable[..., Server]) -> None:
    server = start("--prot", "8000")
    assert server.code() == 2
    assert server.said.startswith("usage: python -m jdserve.server")
    assert "--prot" in server.said.splitlines()[-1]


def altered_plan(folder: Path, change: Callable[[dict], object]) -> str:
    plan = json.loads(small_plan().to_json())
    change(plan)
    path = folder / "altered.json"
    path.write_text(json.dumps(plan))
    return str(path)


def three_devices(plan: dict) -> None:
    plan["instances"][0]["tp"] = 3
    plan["workers"][0]["stages"][0]["devices"] = [0, 2, 3]


BAD_STARTS: dict[str, tuple[Callable[[Path], list[str]], int, str]] = {
    "unknown key": (
        lambda folder: ["--plan", altered_plan(folder, lambda plan: plan["instances"][1].update(max_seqs=4))],
        2,
        r"$.instances[1]",
    ),
    "absent plan": (lambda folder: ["--plan", str(folder / "absent.json")], 2, "absent.json"),
    "TP does not divide": (lambda folder: ["--plan", altered_plan(folder, three_devices)], 1, "$.instances[0].tp"),
    "too few pages": (lambda _: ["--max-model-len", "2048"], 2, "$.instances[0].pages"),
    "context too long": (lambda _: ["--max-model-len", "512"], 1, "$.max_model_len"),
    "absent model": (lambda folder: ["--model", str(folder / "absent")], 1, "absent"),
    "absent template": (lambda folder: ["--chat-template", str(folder / "absent.jinja")], 2, "absent.jinja"),
}


@pytest.mark.parametrize("name", BAD_STARTS)
def test_a_start_that_cannot_be_is_one_line(name: str, start: Callable[..., Server], tmp_path: Path) -> None:
    more, code, named = BAD_STARTS[name]
    begun = time.monotonic()
    server = start(*more(tmp_path))
    assert server.code() == code, server.said
    assert time.monotonic() - begun < 30
    (line,) = (line for line in server.said.splitlines() if "convert" not in line)  # the first start of all converts
    assert line.startswith("jdserve: ")
    assert named in line


def test_a_taken_port_is_told(start: Callable[..., Server]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start("--port", str(port))
        assert server.code() == 2
    (line,) = server.said.splitlines()
    assert line.startswith(f"jdserve: cannot listen on 127.0.0.1:{port} (--host, --port)")
