"""What an operator does to a running server: draining and adding instances, and killing what should not be killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from e2e.harness import Api, Server, until
from e2e.test_server_process import Stream


def jdserve(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jdserve.cli", *arguments]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )


def family(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def names(server: Server) -> list[str]:
    """Of the worker processes that run."""
    lines: list[list[str]] = []
    for process in family(server):
        with contextlib.suppress(psutil.Error):  # it has just ended
            lines.append(process.cmdline())
    return sorted(line[line.index("--name") + 1] for line in lines if "--name" in line)


def test_drain_and_add_on_a_live_server(
    start: Callable[..., Server], environment: dict[str, str], tmp_path: Path
) -> None:
    server = start().wait_ready()
    port = server.url.rpartition(":")[2]
    there = ("--port", port)
    addition = {
        "instance": {"role": "decode", "name": "d1", "pages": 64, "max_num_seqs": 4},
        "worker": {"name": "d1", "stages": [{"instance": "d1", "devices": [2]}]},
    }
    file = tmp_path / "d1.json"

    last = jdserve("drain", "d0", *there, environment=environment)
    assert last.returncode == 1
    assert "d0 is the last live instance of its role" in last.stderr

    file.write_text(json.dumps(addition | {"more": 1}))
    unknown = jdserve("add", str(file), *there, environment=environment)
    assert unknown.returncode == 1
    assert "more" in unknown.stderr

    streams = [Stream(server.url) for _ in range(6)]
    for stream in streams:
        stream.start()
    assert streams[0].begun.wait(30)
    file.write_text(json.dumps(addition))
    added = jdserve("add", str(file), *there, environment=environment)
    assert (added.returncode, added.stdout) == (0, "the instance takes work\n"), added.stderr
    drained = jdserve("drain", "d0", *there, environment=environment)
    assert (drained.returncode, drained.stdout) == (0, "d0 is drained and gone\n"), drained.stderr
    for stream in streams:
        stream.join(60)
        stream.check()
    more = Stream(server.url)
    more.start()
    more.join(60)
    more.check()
    until(lambda: names(server) == ["d1", "p0"], "the worker that was drained is gone")
    server.send(signal.SIGTERM)
    assert server.code() == 0

    gone = jdserve("drain", "p0", *there, environment=environment)
    assert gone.returncode == 1
    assert f"no server with workers listens on port {port}" in gone.stderr


def test_workers_do_not_outlive_a_killed_server(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    workers = family(server)
    assert len(workers) == 2
    server.process.kill()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def test_pd_03_a_killed_prefill_instance(start: Callable[..., Server]) -> None:
    """CAN-04. Decode and the front door live, streams end whole, and the instance comes back."""
    server = start().wait_ready()
    api = Api(server.url)
    streams = [Stream(server.url) for _ in range(8)]
    for stream in streams:
        stream.start()
    assert streams[0].begun.wait(30)
    victim = next(process for process in family(server) if "p0" in process.cmdline())
    decode = next(process for process in family(server) if "d0" in process.cmdline())
    victim.kill()
    until(lambda: api.http.get("/health").status_code == 503, "the death is seen")
    health = api.http.get("/health").json()
    assert health["status"] == "failed"
    assert "p0 died: worker p0: killed by SIGKILL" in health["error"]
    waiting = api.complete("hello", max_tokens=4)  # waits for the restart
    assert waiting.status_code == 200
    for stream in streams:
        stream.join(60)
        stream.check()
    until(lambda: api.http.get("/health").status_code == 200, "p0 is back", 60)
    assert decode.is_running()
    assert api.metric("restarts_total") == 1
    api.settle()
    assert "worker p0 starts again in 0.5 s" in server.said
