"""What it gains that the KV of early pipeline stages leaves while later stages still compute.

    python bench/overlap.py [--quick] [--check]

The built-in model as a prefill instance of two stages (PP 2), each on a CPU device of this process, and a prompt of 512
tokens. What is timed is from the end of its step, when the first token is there, until all its KV lies in shared memory
for a decode instance to map: *behind* with the copies asked for when the step is launched, as instances do, so that
each stage copies as soon as it has computed; *after* with the copies asked for when the step has ended. The two take
turns; medians.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import msgspec
from conclusion import save
from machine import describe
from rich.console import Console

from jdserve.core.pages import pages_for
from jdserve.core.plan import Plan
from jdserve.core.request import Request, SamplingParams
from jdserve.models.load import resolve
from jdserve.policy.commands import Chunk, RunStep
from jdserve.runtime.executor import JaxExecutor
from jdserve.runtime.launch import jax_executors
from jdserve.runtime.links import layout_of
from jdserve.runtime.progress import Progress
from jdserve.transfer.layout import KVHandle
from jdserve.transfer.segments import Reading, State
from jdserve.transfer.shm import ShmTransport

RESULTS = Path(__file__).parent / "results" / "overlap.json"
PLAN = Path(__file__).parent.parent / "plans" / "quickstart.json"
TOKENS = 512
WAYS = ("behind", "after")
LEAST_GAIN = 1.2


def pipelined() -> Plan:
    """The default plan with a prefill instance of two stages, which takes the prompt in one step."""
    raw = json.loads(PLAN.read_text())
    raw["instances"][0] |= {"pp": 2, "lm_tokens": TOKENS, "max_batch": 1}
    stages = [{"instance": "p0", "devices": [stage], "stage": stage} for stage in range(2)]
    raw["workers"] = [{"name": "w", "stages": [*stages, {"instance": "d0", "devices": [2]}]}]
    return Plan.from_json(json.dumps(raw))


def filled(handle: KVHandle) -> float:
    """Wait until the segment of an offer is filled; gives the time."""
    reading = Reading(handle.address)
    while reading.header()[1] == State.WRITING:
        time.sleep(50e-6)
    ended = time.perf_counter()
    assert reading.header() == (handle.id, State.READY)
    reading.close()
    return ended


def measure(count: int) -> dict[str, Any]:
    """Seconds of both ways, and of the step."""
    jax.config.update("jax_num_cpu_devices", 3)
    plan = pipelined()
    model = resolve(plan.model, Progress())
    instance, decode = plan.instances
    executor = jax_executors(plan, model, Progress())(instance)
    assert isinstance(executor, JaxExecutor)
    executor.warm_up(lambda _: None)
    transport = ShmTransport()
    wanted = layout_of(plan, decode, model.spec)
    pages = tuple(range(1, 1 + pages_for(TOKENS, plan.page_size)))
    seconds: dict[str, list[float]] = {way: [] for way in (*WAYS, "step")}

    def offer() -> KVHandle:
        return transport.offer("r", instance.name, executor.leaving(pages), wanted, 60.0)

    for turn in range(2 * (count + 1)):
        way = WAYS[turn % 2]
        name = f"r{turn}"
        prompt = tuple(5 + (turn + index) % 1000 for index in range(TOKENS))
        executor.admit(Request(name, prompt, SamplingParams(temperature=0.0)), pages)
        started = time.perf_counter()
        pending = executor.launch(RunStep(turn, (Chunk(name, 0, TOKENS, pages, True),)))
        handle = offer() if way == "behind" else None
        pending.result()
        ended = time.perf_counter()
        handle = handle or offer()
        done = filled(handle)
        transport.release(handle)
        executor.forget(name)
        if turn > 1:
            seconds[way].append(done - ended)
            seconds["step"].append(ended - started)
    executor.close()
    transport.close()
    return {f"{way}_ms": 1e3 * median(one) for way, one in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="KV that leaves stage by stage, against all at the end.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 unless it gains {LEAST_GAIN}")
    options = parser.parse_args()
    count = 5 if options.quick else 25
    figures = measure(count)
    gain = figures["after_ms"] / figures["behind_ms"]
    holds = gain >= LEAST_GAIN
    report = {
        "bench": "overlap",
        "setting": {"machine": describe(), "tokens": TOKENS, "pp": 2, "repetitions": count},
        **figures,
        "gain": gain,
        "checks": {"gain": "holds" if holds else f"{gain:.2f}, less than {LEAST_GAIN}"},
    }
    save(report, RESULTS, options.quick)
    console = Console()
    for way, what in (("behind", "copied stage by stage"), ("after", "copied at the end")):
        console.print(f"{what}: KV complete {figures[f'{way}_ms']:.2f} ms after the first token")
    console.print(f"gain {gain:.2f}; a step takes {figures['step_ms']:.0f} ms")
    print(msgspec.json.encode(report).decode())
    if options.check and not holds:
        print(f"gain does not hold: {report['checks']['gain']}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
