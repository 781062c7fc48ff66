"""Servers of a tiny model in processes of their own, for benches that kill, stop and measure them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

START_S = 300.0
"""Longest start: everything may have to be compiled."""

STOP_S = 60.0


class ServerFailed(Exception):
    """A server did not start, or did not end; the message holds what it said."""


class Server:
    """A running server.

    Attributes:
        url: of its API.
        pid: of its front door.
    """

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self._process = process
        self.url = url
        self.pid = process.pid

    def workers(self) -> Mapping[str, int]:
        """Pid of each worker process that runs now, by name."""
        found: dict[str, int] = {}
        for child in psutil.Process(self.pid).children():
            try:
                line = child.cmdline()
            except psutil.Error:
                continue
            if "--name" in line:
                found[line[line.index("--name") + 1]] = child.pid
        return found

    def metrics(self) -> Mapping[tuple[str, str], float]:
        """(metric without prefix, instance or "") -> value."""
        page = httpx.get(f"{self.url}/metrics", timeout=30).text
        return {
            (sample.name.removeprefix("jdserve:"), sample.labels.get("instance", "")): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if "le" not in sample.labels and "outcome" not in sample.labels
        }

    def healthy(self) -> bool:
        """Whether every role has a live instance."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> int:
        """SIGTERM; gives the exit code.

        Raises:
            ServerFailed: it does not end.
        """
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"the server did not end within {STOP_S} s of SIGTERM") from None


@contextmanager
def running(plan: Path, flags: Sequence[str], log: Path) -> Iterator[Server]:
    """A server of ``plan`` on a free port that is ready, and does not outlive the block.

    Raises:
        ServerFailed: it did not start.
    """
    command = [sys.executable, "-m", "jdserve.server", "--plan", str(plan), "--port", "0", *flags]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, text=True)
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"ready on (http://\S+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"the server did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.05)
        yield Server(process, found[1])
    finally:
        process.kill()
        process.wait()


def write_plan(folder: Path, plan: Mapping[str, object]) -> Path:
    """``plan.json`` in ``folder``."""
    path = folder / "plan.json"
    path.write_text(json.dumps(plan, indent=1))
    return path


def pin(cores: Sequence[int]) -> None:
    """Keep this process, and what it starts from now on, on ``cores``."""
    os.sched_setaffinity(0, cores)
