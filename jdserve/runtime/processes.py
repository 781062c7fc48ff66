"""Worker processes of this machine: starting, watching, killing, and when to start one again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

from jdserve.core.plan import Plan, Worker

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
STEADY_S = 60.0
"""A worker that lived this long has its next death forgiven: the back-off begins anew."""


class Process:
    """One worker process at a time, again and again.

    Attributes:
        worker: which one.
        due: monotonic seconds at which it is to be started; None while it runs, or for good.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.due: float | None = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._backoff = FIRST_BACKOFF_S

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return None if self._process is None else self._process.pid

    def start(self, folder: Path, address: str, options: Seq[str]) -> None:
        """Run the worker with the plan and the secret in ``folder``; it connects to ``address``."""
        command = [sys.executable, "-m", "jdserve.worker", "--name", self.worker.name, "--join", address]
        command += ["--plan", str(plan_file(folder)), "--secret-file", str(secret_file(folder)), *options]
        # It ends when its standard input does: a front door that was killed leaves no process behind. A session of its
        # own keeps Ctrl-C from it, since a worker must outlive the drain.
        self._process = subprocess.Popen(
            [*command, "--supervised"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **allocator(os.environ)},
        )
        self._started = time.monotonic()
        self.due = None

    def ended(self) -> str | None:
        """How the process ended since the last call, None if it did not."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._forget()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def restart_later(self) -> float:
        """Set ``due``; gives the seconds until then."""
        now = time.monotonic()
        if now - self._started > STEADY_S:
            self._backoff = FIRST_BACKOFF_S
        wait, self._backoff = self._backoff, min(2 * self._backoff, LONGEST_BACKOFF_S)
        self.due = now + wait
        return wait

    def kill(self) -> None:
        """End it at once, stopped or not."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    def join(self, timeout_s: float) -> None:
        """Wait for its end; kill it when that takes longer."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
            self.kill()

    def _forget(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None


def allocator(environment: Mapping[str, str]) -> Mapping[str, str]:
    """What is added to ``environment`` for a worker: large pages for what malloc takes from the system.

    Each step, copy and landing takes fresh memory; page faults of 4 KiB cost more than the copy itself: with large
    pages 128 MiB of KV are pulled in 0.55 of the time. Elsewhere than with glibc, which reads it, it means nothing; a
    setting of the user stays.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" in tunables:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, (tunables, "glibc.malloc.hugetlb=1")))}


def plan_file(folder: Path) -> Path:
    """The plan that workers of this machine start from."""
    return folder / "plan.json"


def secret_file(folder: Path) -> Path:
    """The secret that they share with the front door."""
    return folder / "secret"


def write_files(folder: Path, plan: Plan, secret: str) -> None:
    """Write both, for nobody else to read."""
    for path, content in ((plan_file(folder), plan.to_json()), (secret_file(folder), secret.encode())):
        path.touch(mode=0o600)
        path.write_bytes(content)
