"""Workers with addresses of their own: two network namespaces of this machine stand in for two hosts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from e2e.harness import Server, small_plan, until
from jdserve.core.plan import Plan, Worker
from jdserve.runtime.channel import new_secret

pytestmark = pytest.mark.slow

HERE, THERE = "10.77.31.1", "10.77.31.2"
CONTROL_PORT, HTTP_PORT = 7411, 8411
BYTES, SECONDS = "jdserve:kv_transfer_bytes_total", "jdserve:kv_transfer_seconds_total"

ASK = """
import json, sys, httpx
from prometheus_client.parser import text_string_to_metric_families
url, prompts = sys.argv[1], json.loads(sys.argv[2])
body = {"model": "tiny", "prompt": prompts, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
answer = httpx.post(url + "/v1/completions", json=body, timeout=120).json()
page = httpx.get(url + "/metrics").text
numbers = {s.name: s.value for f in text_string_to_metric_families(page) for s in f.samples if not s.labels}
print(json.dumps({"texts": [c["text"] for c in answer["choices"]], "numbers": numbers}))
"""
"""A client inside the first namespace."""


def sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that are joined by a cable."""
    if not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need the programs ip and tc")
    one, two = f"jdserve-{os.getpid()}-1", f"jdserve-{os.getpid()}-2"
    with contextlib.ExitStack() as stack:
        try:
            for name in (one, two):
                sh("ip", "netns", "add", name)
                stack.callback(sh, "ip", "netns", "del", name)
                sh("ip", "-n", name, "link", "set", "lo", "up")
            sh("ip", "link", "add", "jdcable", "netns", one, "type", "veth", "peer", "name", "jdcable", "netns", two)
            for name, address in ((one, HERE), (two, THERE)):
                sh("ip", "-n", name, "address", "add", f"{address}/24", "dev", "jdcable")
                sh("ip", "-n", name, "link", "set", "jdcable", "up")
        except OSError as error:
            pytest.skip(f"this kernel or user may not make network namespaces: {error}")
        yield one, two


def inside(namespace: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command]


@pytest.fixture
def two_hosts(tmp_path: Path, checkpoint: Path) -> Path:
    """A plan with prefill on one host and decode on the other; the secret is beside it."""
    small = small_plan(str(checkpoint))
    workers = tuple(
        Worker(worker.name, worker.stages, host) for worker, host in zip(small.workers, (HERE, THERE), strict=True)
    )
    path = tmp_path / "plan.json"
    path.write_bytes(
        Plan(model=small.model, max_model_len=small.max_model_len, instances=small.instances, workers=workers).to_json()
    )
    path.with_name("secret").write_text(new_secret())
    return path


@contextlib.contextmanager
def process(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as file:
        running = subprocess.Popen(command, env=os.environ | environment, stdout=file, stderr=file, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def test_prefill_and_decode_on_two_hosts_and_a_slow_link(
    hosts: tuple[str, str], two_hosts: Path, environment: dict[str, str], tmp_path: Path, server: Server
) -> None:
    here, there = hosts
    common = ["--plan", str(two_hosts), "--secret-file", str(two_hosts.with_name("secret")), "--oversubscribe"]
    join = ["-m", "jdserve.worker", *common, "--name", "d0", "--join", f"{HERE}:{CONTROL_PORT}"]
    serve = ["-m", "jdserve.server", *common, "--control", f"{HERE}:{CONTROL_PORT}", "--port", str(HTTP_PORT)]
    log, url = tmp_path / "front.log", f"http://127.0.0.1:{HTTP_PORT}"
    prompts = [[7 + i for i in range(90 + j)] for j in range(4)]

    def ask(at: str = url, namespace: str | None = here) -> dict:
        command = [sys.executable, "-c", ASK, at, json.dumps(prompts)]
        done = subprocess.run(
            inside(namespace, *command) if namespace else command, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    front = inside(here, sys.executable, *serve, "--served-model-name", "tiny", "--heartbeat-timeout", "5")
    with process(front, environment, log) as running:
        with process(inside(there, sys.executable, *join), environment, tmp_path / "d0.log") as worker:
            until(lambda: running.poll() is not None or "curl " in log.read_text(), "ready", 240)
            assert running.poll() is None, log.read_text() + (tmp_path / "d0.log").read_text()
            assert b"glibc.malloc.hugetlb=1" in Path(f"/proc/{worker.pid}/environ").read_bytes(), (
                "as local workers have"
            )
            fast = ask()
            assert fast["texts"] == ask(server.url, None)["texts"]
            assert fast["numbers"]["jdserve:kv_transfers_total"] == 4
            sh(
                *inside(
                    here,
                    *[
                        "tc",
                        "qdisc",
                        "add",
                        "dev",
                        "jdcable",
                        "root",
                        "tbf",
                        "rate",
                        "2mbit",
                        "burst",
                        "16k",
                        "latency",
                        "2s",
                    ],
                )
            )
            prompts.append([9] * 100)  # nothing of what is pulled now is in a cache of the other host
            slow = ask()
            assert slow["texts"][:4] == fast["texts"]
            moved, took = (slow["numbers"][name] - fast["numbers"][name] for name in (BYTES, SECONDS))
            before = fast["numbers"][SECONDS] / fast["numbers"][BYTES]
            print(f"KV: {1 / before / 2**20:.1f} MiB/s over a free cable, {moved / took / 2**20:.2f} at 2 Mbit/s")
            # pulls share the cable, so each of them is at least as slow as the cable is
            assert moved / took <= 2e6 / 8 * 1.3
            assert took / moved > before
            sh(*inside(here, *["tc", "qdisc", "del", "dev", "jdcable", "root"]))
            worker.kill()
            worker.wait()
            until(lambda: "worker d0 is lost" in log.read_text(), "the loss is noticed", 30)
        with process(inside(there, sys.executable, *join), environment, tmp_path / "d0-again.log"):
            assert ask()["texts"][:4] == fast["texts"]  # the requests wait until it has joined again
        running.terminate()
        assert running.wait(30) == 0, log.read_text()


def test_a_stranger_cannot_join(two_hosts: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("short")
    command = [
        sys.executable,
        "-m",
        "jdserve.worker",
        "--plan",
        str(two_hosts),
        "--name",
        "d0",
        "--join",
        "127.0.0.1:9",
    ]
    done = subprocess.run([*command, "--secret-file", str(wrong), "--oversubscribe"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "at least 16 characters" in done.stderr
    done = subprocess.run([*command[:-1], "nowhere", "--secret-file", str(wrong)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--join takes HOST:PORT" in done.stderr
