"""Real server processes and what the tests ask them over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from jdserve.core.plan import DecodeInstance, HostedStage, Plan, PrefillInstance, Worker

CONTEXT = 128
"""``max_model_len`` of the plan that is served."""

START_S = 240.0
"""Deadline of a start: nothing is in the compilation cache at first, and the machine may be busy."""

T = TypeVar("T")


def small_plan(model: str = "tiny") -> Plan:
    """One prefill and one decode instance, with few programs."""
    return Plan(
        model=model,
        max_model_len=CONTEXT,
        instances=(
            PrefillInstance(name="p0", pages=64, lm_tokens=64, max_batch=4),
            DecodeInstance(name="d0", pages=64, max_num_seqs=4),
        ),
        workers=(Worker("p0", (HostedStage("p0", (0,)),)), Worker("d0", (HostedStage("d0", (1,)),))),
        transfer_checksums=True,
    )


def until(ask: Callable[[], T], what: str, timeout_s: float = 30.0) -> T:
    """The first true answer of ``ask``: another process has no event to wait for, so it is polled."""
    deadline = time.monotonic() + timeout_s
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s: {what}"
        time.sleep(0.02)
    return answer


def free_port() -> int:
    """A port that was free a moment ago, for a server that must be found before it says where it is."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server process.

    Args:
        flags: of ``python -m jdserve.server``.
        environment: of the process, besides this one's.
        log: file for what it writes to stderr.
    """

    def __init__(self, flags: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        command = [sys.executable, "-m", "jdserve.server", *flags]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=file, text=True
            )
        self._family: list[psutil.Process] = []

    @property
    def said(self) -> str:
        """What it has written to stderr so far."""
        return self._log.read_text()

    @property
    def url(self) -> str:
        """Where it is, once it has said so."""
        found = re.search(r"ready on (http://\S+)", self.said)
        assert found, self.said
        return found[1]

    @property
    def curl(self) -> str:
        """The command that it offers for a try."""
        return self.said[self.said.index("curl ") :].strip()

    def wait_ready(self) -> Server:
        """Wait until it has said where it is and is healthy there."""
        until(lambda: self.process.poll() is not None or "curl " in self.said, "ready", START_S)
        assert self.process.poll() is None, self.said
        assert httpx.get(f"{self.url}/health").json() == {"status": "ok"}
        return self

    def send(self, number: signal.Signals) -> None:
        """Signal it, and note its children, which must not outlive it."""
        self._family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(number)

    def code(self, timeout_s: float = 30.0) -> int:
        """Exit code, after the end of the process and of its children."""
        code = self.process.wait(timeout_s)
        _, alive = psutil.wait_procs(self._family, timeout=1)
        assert not alive
        return code


@contextmanager
def running(flags: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[Server]:
    """A server that does not outlive the block."""
    server = Server(flags, environment, log)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


class Api:
    """Asks one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None))

    def complete(self, prompt: Any, **params: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **params})

    def chat(self, text: str, **params: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **params})

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of ``jdserve:name`` that have ``labels``."""
        page = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [sample for family in page for sample in family.samples if sample.name == f"jdserve:{name}"]
        assert samples, name
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def idle(self) -> bool:
        """Nothing waits, runs or is parked, and no page has an owner."""
        gauges = ("requests_waiting", "requests_running", "requests_parked", "pages_owned")
        return all(self.metric(name) == 0 for name in gauges)

    def settle(self) -> None:
        """Wait until it is idle; then every page of both instances is free or cached."""
        until(self.idle, "idle, no page owned")
        for instance in ("p0", "d0"):
            free, cached = (self.metric(f"pages_{kind}", instance=instance) for kind in ("free", "cached"))
            assert free + cached == self.metric("pages_total", instance=instance)

    @contextmanager
    def counting(self, name: str, expected: float, **labels: str) -> Iterator[None]:
        """Check by how much a metric grows within the block."""
        before = self.metric(name, **labels)
        yield
        assert self.metric(name, **labels) - before == expected, name


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a whole stream, which must end with the end mark."""
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    parts = answer.text.removesuffix("\n\n").split("\n\n")[:-1]
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def text_of(choice: dict[str, Any]) -> str:
    """Text of a choice of either endpoint, whole or a chunk's."""
    if "text" in choice:
        return choice["text"]
    return (choice.get("message") or choice["delta"])["content"]


def joined(chunks: Sequence[dict[str, Any]]) -> dict[int, str]:
    """Text of each choice of a stream, by index."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + text_of(choice)
    return texts


def ids(length: int, salt: int) -> list[int]:
    """A prompt of ``length`` tokens; another salt gives another one from its first token on."""
    return [(31 * salt + 17 * index + index * index) % 1000 + 3 for index in range(length)]


def refusal(answer: httpx.Response, param: str | None = None) -> str:
    """The message of a refusal in OpenAI's shape."""
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    return error["message"]
