"""Soak: mixed load for a long time, clients that leave, and nothing may be left over.

    python bench/soak.py [--quick] [--check] [--minutes 20]

One prefill and one decode worker of a tiny random model. A constant number of clients send completions and chats of all
lengths: streamed and whole, greedy and sampled, with log-probabilities, several choices, guides, stops, and wrong ones
that are refused; one in ten leaves in the middle. Afterwards, and beside the figures of an idle server after a first
minute of the same load (a quarter of the time with ``--quick``): every page is free, nothing runs or waits, no process
has more open files or threads, and memory has not grown by more than 5 % or 32 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from conclusion import HOLDS, conclude, save, show_checks
from machine import describe
from rich.console import Console
from rich.table import Table
from servers import Server, ServerFailed, running, write_plan

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "soak.json"
sys.path.insert(0, str(HERE.parent / "tests"))

CLIENTS = 24
LEAVES = 0.1
MOST_S = 120.0
"""A request that takes longer hangs."""

SETTLE_S = 30.0
GROWTH, SLACK_BYTES = 0.05, 32 << 20
"""Growth of a process's memory that is fine: the larger of the two."""

PLAN: Mapping[str, Any] = {
    "version": 1,
    "max_model_len": 192,
    "instances": [
        {"role": "prefill", "name": "p0", "pages": 160, "lm_tokens": 128, "max_batch": 8},
        {"role": "decode", "name": "d0", "pages": 200, "max_num_seqs": 16},
    ],
    "workers": [
        {"name": "p0", "stages": [{"instance": "p0", "devices": [0]}]},
        {"name": "d0", "stages": [{"instance": "d0", "devices": [1]}]},
    ],
}

EXTRAS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 1.0, "logprobs": 2},
    {"n": 3, "temperature": 1.0, "seed": 1},
    {"echo": True, "logprobs": 1, "temperature": 0},
    {"stop": ["e", "the"], "presence_penalty": 0.5},
    {"guided_regex": "[a-z ]{1,12}", "temperature": 1.0},
    {"max_tokens": 0},
    {"temperature": -1},
    {"prompt": "x " * 4000},
)


async def request(client: httpx.AsyncClient, draw: random.Random) -> str:
    """Send one request of some kind; gives how it ended."""
    prompt = [draw.randrange(3, 1000) for _ in range(draw.randrange(1, 100))]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": draw.randrange(1, 60), **draw.choice(EXTRAS)}
    path, streamed = "/v1/completions", draw.random() < 0.6
    if draw.random() < 0.2:
        path = "/v1/chat/completions"
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me more"}], "max_tokens": 20}
    leaves = draw.random() < LEAVES
    async with client.stream("POST", path, json=body | {"stream": streamed}) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return str(answer.status_code)
        seen = 0
        async for _ in answer.aiter_raw():
            seen += 1
            if leaves and seen > draw.randrange(4):
                return "left"
    return "done"


async def load(server: Server, seconds: float, seed: int) -> Counter[str]:
    """Keep ``CLIENTS`` requests open for a while; gives how many ended how."""
    ends: Counter[str] = Counter()
    until = time.monotonic() + seconds
    # A kept connection may be closed by the server in the moment in which it is used again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)

    async def one(number: int) -> None:
        draw = random.Random(seed * 1000 + number)
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(MOST_S):
                    ends[await request(client, draw)] += 1
            except TimeoutError:
                ends["hung"] += 1
            except httpx.HTTPError as error:
                ends[type(error).__name__] += 1

    async with httpx.AsyncClient(base_url=server.url, timeout=MOST_S, limits=limits) as client:
        await asyncio.gather(*(one(number) for number in range(CLIENTS)))
    return ends


def idle(server: Server) -> dict[str, dict[str, int]]:
    """What each process holds once the server has nothing to do.

    Raises:
        ServerFailed: it does not become idle.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        numbers = server.metrics()
        busy = {
            f"{name} {instance}".strip(): int(value)
            for (name, instance), value in numbers.items()
            if name in {"pages_owned", "pages_lost", "requests_running", "requests_waiting", "requests_parked"}
            and value
        }
        if not busy:
            break
        if time.monotonic() > deadline:
            raise ServerFailed(f"not idle {SETTLE_S} s after the last request: {busy}")
        time.sleep(0.2)
    time.sleep(2.0)  # connections that clients have left are closed by and by
    found: dict[str, dict[str, int]] = {}
    for name, pid in {"front": server.pid, **server.workers()}.items():
        process = psutil.Process(pid)
        found[name] = {
            "files": process.num_fds(),
            "threads": process.num_threads(),
            "bytes": process.memory_info().rss,
        }
    return found


def check(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]], ends: Counter[str]) -> dict[str, str]:
    """Whether each bound holds."""
    checks = {"pages, requests": HOLDS}  # else the server would not have become idle
    for what in ("files", "threads"):
        more = [
            f"{name} {after[name][what]} after {held[what]}"
            for name, held in before.items()
            if after[name][what] > held[what]
        ]
        checks[what] = "; ".join(more) or HOLDS
    grown = [
        f"{name} {(after[name]['bytes'] - held['bytes']) / (1 << 20):.0f} MiB more"
        for name, held in before.items()
        if after[name]["bytes"] - held["bytes"] > max(GROWTH * held["bytes"], SLACK_BYTES)
    ]
    checks["memory"] = "; ".join(grown) or HOLDS
    bad = {how: count for how, count in ends.items() if how not in {"done", "left", "400"}}
    checks["answers"] = ", ".join(f"{count} x {how}" for how, count in bad.items()) or HOLDS
    return checks


def bench(minutes: float) -> dict[str, Any]:
    """Everything that is reported.

    Raises:
        ServerFailed: the server did not start, become idle, or end.
    """
    from tiny import write_tiny_checkpoint

    with tempfile.TemporaryDirectory(prefix="jdserve-soak-") as name:
        folder = Path(name)
        plan = write_plan(folder, {**PLAN, "model": str(write_tiny_checkpoint(folder / "tiny"))})
        flags = ["--served-model-name", "tiny", "--oversubscribe"]
        with running(plan, flags, folder / "server.log") as server:
            asyncio.run(load(server, min(60.0, 15 * minutes), 0))
            before = idle(server)
            ends = asyncio.run(load(server, 60 * minutes, 1))
            after = idle(server)
            code = server.stop()
    checks = check(before, after, ends)
    checks["exit"] = HOLDS if code == 0 else f"the server ended with code {code}"
    return {
        "bench": "soak",
        "setting": {"machine": describe(), "minutes": minutes, "clients": CLIENTS},
        "ends": dict(ends),
        "before": before,
        "after": after,
        "checks": checks,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print the figures and the checks."""
    table = Table(title=f"{report['setting']['minutes']:g} minutes: {report['ends']}")
    for column in ("", "files", "threads", "MiB"):
        table.add_column(column, justify="right" if column else "left")
    for name, held in report["before"].items():
        now = report["after"][name]
        table.add_row(
            name,
            f"{held['files']} -> {now['files']}",
            f"{held['threads']} -> {now['threads']}",
            f"{held['bytes'] >> 20} -> {now['bytes'] >> 20}",
        )
    console.print(table)
    show_checks(report["checks"], console)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed load for a long time; nothing may be left over.")
    parser.add_argument("--quick", action="store_true", help="half a minute of load")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every bound holds")
    parser.add_argument("--minutes", type=float, default=20.0, help="of load (default: %(default)g)")
    options = parser.parse_args()
    try:
        report = bench(0.5 if options.quick else options.minutes)
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    save(report, RESULTS, options.quick)
    show(report, Console())
    return conclude(report, options.check)


if __name__ == "__main__":
    sys.exit(main())
