"""Isolation: how much a decode step suffers from a busy prefill instance and from KV that arrives.

    python bench/isolation.py [--quick] [--check]

The built-in model, 1 prefill + 1 decode, as ``plans/quickstart.json`` says: decode on core 1, prefill on core 0, and
the front door and the client on core 0 too, because a machine of two cores has no other place. A few streams decode all
the time. Three conditions take turns: alone; beside a prefill instance that is never idle (prompts of one token of
output, so that nothing is transferred); and with 512-token KV caches pulled, one every four steps (the prompt is in the
prefill instance's cache; the sequence then takes part in one step). The same in one process, for contrast.

A step's time is read from the event log of the decode scheduler: from RunStep to its StepDone. So what the control
channel costs per step is not in it; that is measured apart: the host's time between a StepDone and the next RunStep.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
import numpy as np
from conclusion import save
from machine import describe
from rich.console import Console
from rich.table import Table
from servers import Server, running

HERE = Path(__file__).parent
PLAN = HERE.parent / "plans" / "quickstart.json"
RESULTS = HERE / "results" / "isolation.json"

MODEL = "smollm2-135m-instruct"
STREAMS = 5
"""Sequences that decode all the time; together with those that were pulled they stay in the program for 8."""

PULLED_TOKENS = 512
STEPS_PER_PULL, MOST_STEPS_PER_PULL = 4, 5
FRONT_CORE = 0
MEAN_BOUND, P95_BOUND = 1.15, 1.5
CONDITIONS = ("alone", "saturated prefill", "pulls")


class Steps:
    """Reads the decode scheduler's log as it grows."""

    def __init__(self, log: Path) -> None:
        self._file = log.open()
        self._launched = 0
        self._done = 0
        self.times: list[float] = []
        self.gaps: list[float] = []
        self.pulls = 0

    def clear(self) -> None:
        """Forget everything up to now."""
        self._read()
        self.times, self.gaps, self.pulls = [], [], 0

    def read(self) -> tuple[list[float], list[float], int]:
        """Seconds of each step, seconds between steps, and pulls that landed, since :meth:`clear`."""
        self._read()
        return self.times, self.gaps, self.pulls

    def _read(self) -> None:
        while True:
            at = self._file.tell()
            line = self._file.readline()
            if not line.endswith("\n"):
                self._file.seek(at)
                return
            entry = json.loads(line)
            if "event" not in entry:
                continue
            kind, now = entry["event"]["event"], entry["now"] / 1e9
            self.pulls += kind == "KVLanded"
            if kind == "StepDone":
                self.times.append(now - self._launched)
                self._done = now
            if any(command["command"] == "RunStep" for command in entry["commands"]):
                if self._done:
                    self.gaps.append(now - self._done)
                self._launched, self._done = now, 0


def pin_front(pid: int) -> None:
    """Keep the front door and this client on one core; the workers have pinned themselves."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {FRONT_CORE})
    os.sched_setaffinity(0, {FRONT_CORE})


async def stream(client: httpx.AsyncClient, prompt: list[int], tokens: int) -> None:
    """One completion, read to its end."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


def tokens(seed: int, count: int) -> list[int]:
    """A prompt nobody has seen."""
    return np.random.default_rng(seed).integers(1000, 40000, count).tolist()


@asynccontextmanager
async def background(*loops: Any) -> AsyncIterator[None]:
    """Coroutines that run until the block is left."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def decode_always(client: httpx.AsyncClient, seed: int) -> None:
    """One sequence after the other, long ones."""
    while True:
        await stream(client, tokens(seed, 64), 1500)


async def prefill_always(client: httpx.AsyncClient, seed: int) -> None:
    """Keep the prefill instance busy, without any KV leaving it."""
    while True:
        seed += 1
        await stream(client, tokens(10_000 + seed, 256), 1)


async def pull_often(client: httpx.AsyncClient, log: Path) -> None:
    """Have the same long prompt pulled every few steps."""
    prompt = tokens(5, PULLED_TOKENS)
    steps, due = Steps(log), 0
    steps.clear()
    async with asyncio.TaskGroup() as streams:
        while True:
            if len(steps.read()[0]) >= due:
                due += STEPS_PER_PULL
                streams.create_task(stream(client, prompt, 2))
            await asyncio.sleep(0.01)


async def measure(server: Server, log: Path, seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    """Step times by condition; the conditions take turns."""
    found: dict[str, tuple[list[float], list[float], list[int]]] = {name: ([], [], [0]) for name in CONDITIONS}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        await stream(client, tokens(5, PULLED_TOKENS), 2)
        async with background(*(decode_always(client, seed) for seed in range(STREAMS))):
            steps = Steps(log)
            while len(steps.read()[0]) < 20:
                await asyncio.sleep(0.2)
            for _ in range(rounds):
                for name in CONDITIONS:
                    loops: Sequence[Any] = ()
                    if name == "saturated prefill":
                        loops = [prefill_always(client, 1000 * n) for n in range(2)]
                    if name == "pulls":
                        loops = [pull_often(client, log)]
                    async with background(*loops):
                        await asyncio.sleep(1.0)
                        steps.clear()
                        await asyncio.sleep(seconds)
                        times, gaps, pulls = steps.read()
                        found[name][0].extend(times)
                        found[name][1].extend(gaps)
                        found[name][2][0] += pulls
                    await asyncio.sleep(0.5)
    return {
        name: {
            "steps": len(times),
            "mean_ms": 1e3 * mean(times),
            "p50_ms": 1e3 * median(times),
            "p95_ms": 1e3 * float(np.percentile(times, 95)),
            "host_gap_p50_ms": 1e3 * median(gaps),
            "steps_per_pull": len(times) / pulls[0] if pulls[0] else float("inf"),
        }
        for name, (times, gaps, pulls) in found.items()
    }


def over(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Each condition over alone."""
    alone = figures["alone"]
    return {
        name: {which: figures[name][f"{which}_ms"] / alone[f"{which}_ms"] for which in ("mean", "p95")}
        for name in CONDITIONS[1:]
    }


def failures(result: dict[str, Any]) -> list[str]:
    """Every bound that does not hold for pinned workers."""
    found: list[str] = []
    for name, ratio in result["workers_over_alone"].items():
        for which, bound in (("mean", MEAN_BOUND), ("p95", P95_BOUND)):
            if ratio[which] > bound:
                found.append(f"{name}: {which} step {ratio[which]:.2f} of alone, at most {bound}")
    if result["workers"]["pulls"]["steps_per_pull"] > MOST_STEPS_PER_PULL:
        every = result["workers"]["pulls"]["steps_per_pull"]
        found.append(f"a pull only every {every:.1f} steps, {MOST_STEPS_PER_PULL} at most")
    return found


def main() -> int:
    """Run the bench; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short rounds, no contrast in one process")
    parser.add_argument("--check", action="store_true", help="exit 1 naming each bound that does not hold")
    args = parser.parse_args()
    seconds, rounds = (4.0, 1) if args.quick else (10.0, 3)
    result: dict[str, Any] = {"machine": describe(), "front_door_and_client_core": FRONT_CORE}
    modes = {"workers": []} if args.quick else {"workers": [], "one_process": ["--in-process"]}
    every_core = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="jdserve-isolation-") as name:
        for mode, flags in modes.items():
            os.sched_setaffinity(0, every_core)
            record = Path(name) / mode
            with running(PLAN, [*flags, "--record", str(record)], Path(name) / f"{mode}.log") as server:
                if mode == "workers":
                    pin_front(server.pid)
                result[mode] = asyncio.run(measure(server, record / "d0.jsonl", seconds, rounds))
                result[f"{mode}_over_alone"] = over(result[mode])
                server.stop()
    result["failures"] = failures(result)
    show(result, list(modes))
    save(result, RESULTS, args.quick)
    for failure in result["failures"]:
        print(f"does not hold: {failure}", file=sys.stderr)
    print(json.dumps(result))
    return int(args.check and bool(result["failures"]))


def show(result: dict[str, Any], modes: list[str]) -> None:
    """A table for people."""
    table = Table(title=f"decode step beside what else goes on; front door and client on core {FRONT_CORE}")
    for column in (
        "",
        "condition",
        "steps",
        "mean ms",
        "p95 ms",
        "mean / alone",
        "p95 / alone",
        "host gap ms",
        "steps / pull",
    ):
        table.add_column(column, justify="right")
    for mode in modes:
        for name in CONDITIONS:
            one, ratio = result[mode][name], result[f"{mode}_over_alone"].get(name, {"mean": 1.0, "p95": 1.0})
            figures = [f"{one[key]:.1f}" for key in ("mean_ms", "p95_ms")] + [
                f"{ratio[key]:.2f}" for key in ("mean", "p95")
            ]
            rest = [f"{one['host_gap_p50_ms']:.2f}", f"{one['steps_per_pull']:.1f}"]
            table.add_row(mode, name, str(one["steps"]), *figures, *rest)
    Console(stderr=True, width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
