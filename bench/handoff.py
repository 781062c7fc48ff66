"""The hand-off of a request's KV through the real server: from the end of its prefill step to its landing.

1 prefill + 1 decode worker of the built-in model, each on its core; front door and client on the prefill core. A prompt
of 512 tokens is sent again and again, so that prefill finds it in its cache and decode has to pull all of it. The time
is read from the logs of both schedulers, which share a clock: from the StepDone that parks the KV until KVLanded at the
decode instance. So the copy out of the pool (what of it is not done by then), both ways through the control channel,
the pull and the launch of the insert are in it; the insert itself runs behind the decode step in flight, if any, and
before the next one. *Idle*: nothing else goes on. *Loaded*: a few other streams decode.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from isolation import STREAMS, background, decode_always, pin_front, stream, tokens
from servers import running, write_plan

PLAN = Path(__file__).parent.parent / "plans" / "quickstart.json"
PROMPT_TOKENS = 512
BOUNDS_MS = {"shm": 25.0, "pull": 40.0}
"""Most milliseconds of a hand-off, p95, idle; loaded one decode step is added."""


def events(log: Path) -> list[tuple[float, Mapping[str, Any], list[Mapping[str, Any]]]]:
    """(seconds, event, commands) of each entry of a scheduler's log."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line]
    return [(entry["now"] / 1e9, entry["event"], entry["commands"]) for entry in lines if "event" in entry]


def handoffs(record: Path) -> list[float]:
    """Seconds of each hand-off, in order."""
    parked = {
        command["request_id"]: now
        for now, _, commands in events(record / "p0.jsonl")
        for command in commands
        if command["command"] == "Emit" and command.get("parked")
    }
    landed = [
        (event["request_id"], now) for now, event, _ in events(record / "d0.jsonl") if event["event"] == "KVLanded"
    ]
    return [now - parked[request_id] for request_id, now in landed]


def step_s(record: Path) -> float:
    """Median seconds of a decode step."""
    launched, times = 0.0, []
    for now, event, commands in events(record / "d0.jsonl"):
        if event["event"] == "StepDone":
            times.append(now - launched)
        if any(command["command"] == "RunStep" for command in commands):
            launched = now
    return median(times)


async def run(url: str, record: Path, count: int) -> dict[str, float]:
    """Hand-offs idle, then loaded."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        prompt = tokens(5, PROMPT_TOKENS)
        for _ in range(3):
            await stream(client, prompt, 2)
        before = len(handoffs(record))
        for _ in range(count):
            await stream(client, prompt, 2)
        idle = handoffs(record)[before:]
        async with background(*(decode_always(client, seed) for seed in range(STREAMS))):
            while len(handoffs(record)) < before + count + STREAMS:
                await asyncio.sleep(0.2)
            for _ in range(count):
                await stream(client, prompt, 2)
            loaded = handoffs(record)[before + count + STREAMS :]
    return {
        "idle_p50_ms": 1e3 * median(idle),
        "idle_p95_ms": 1e3 * float(np.percentile(idle, 95)),
        "loaded_p50_ms": 1e3 * median(loaded),
        "loaded_p95_ms": 1e3 * float(np.percentile(loaded, 95)),
        "decode_step_ms": 1e3 * step_s(record),
        "handoffs": len(idle),
    }


def measure(transport: str, count: int) -> dict[str, float]:
    """Hand-off times by ``transport``."""
    with tempfile.TemporaryDirectory(prefix="jdserve-handoff-") as name:
        folder = Path(name)
        plan = write_plan(folder, {**json.loads(PLAN.read_text()), "transport": transport})
        with running(plan, ["--record", str(folder / "record")], folder / "server.log") as server:
            cores = os.sched_getaffinity(0)
            pin_front(server.pid)
            try:
                figures = asyncio.run(run(server.url, folder / "record", count))
            finally:
                os.sched_setaffinity(0, cores)
            server.stop()
    return figures


def check(transport: str, figures: Mapping[str, float]) -> str:
    """``holds``, or which bound does not."""
    bounds = {"idle": BOUNDS_MS[transport], "loaded": BOUNDS_MS[transport] + figures["decode_step_ms"]}
    broken = [
        f"{state} p95 {figures[f'{state}_p95_ms']:.1f} ms, more than {most:.1f}"
        for state, most in bounds.items()
        if figures[f"{state}_p95_ms"] > most
    ]
    return "; ".join(broken) or "holds"
