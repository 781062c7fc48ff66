"""The simulator and the search beside those of the reference, on the same arrivals, latencies and placements.

    python bench/sim_speed.py [--quick] [--check] [--data PATH] [--reference CHECKOUT [--reference-python PATH]]

What the reference (simdistserve of LLMServe/DistServe) said and how long it took is in ``simdistserve_reference.json``;
what it said of each request, in the columns ``ref_*`` of the table of real runs. Its policy is a matter of plan fields:
prefill takes what is queued, decode takes all that is there, KV moves in no time, and a request decodes as many steps
as it has output tokens, one more than here.

- *runs*: one simulation each. Times to first token must agree to a microsecond for every request of every run, times
  per output token for every request of the runs in which decode never holds more than the 50,000 tokens that the
  reference puts into a step at most (what does not fit takes turns there; here a step takes all). CPU seconds are the
  least of a few repetitions, beside the reference's for a whole run and for its event loop alone. With a checkout of
  the reference, and an interpreter that has simpy and pandas, it does the same run now, in a process of its own.
- *searches*: its search spaces (a prefill and a decode instance on one node), its 300 requests, and its criterion: the
  90th percentiles of TTFT and TPOT within 0.2 and 0.1 s, each on its own, bisected over the rate per device. No time to
  first token depends on decode here, so a rate at which prefill fails alone needs no other look.
- *large*: our own search for 32 devices, on two processes, the joint criterion, seconds on the wall.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from a100 import DATA, Run, load, plan_of
from conclusion import HOLDS, BenchFailed, conclude, save
from machine import describe
from rich.console import Console
from rich.table import Table

from jdserve.core.errors import JdserveError
from jdserve.core.plan import DecodeInstance, Plan, PrefillInstance
from jdserve.core.request import SLO
from jdserve.cost.a100 import A100Profile, Overhead, a100_kv_tokens
from jdserve.cost.cluster import Cluster
from jdserve.cost.stepcost import StepCost
from jdserve.placement import search
from jdserve.sim.lengths import FromTrace
from jdserve.sim.result import SimResult
from jdserve.sim.simulate import simulate
from jdserve.sim.traces import load_trace
from jdserve.sim.workload import Source, Workload

RESULTS = Path(__file__).parent / "results" / "sim_speed.json"

PLENTY = 1 << 40
SLO_S = SLO(0.2, 0.1, 0.9)
REQUESTS = 300
STEP_TOKENS = 50_000
"""Most tokens of context in a decode step of the reference."""

FASTER = 50
LIMITS = {"readme_13b_1x4_low": 2.0, "13b_1x8_low": 8.0}
"""CPU seconds of the searches."""

LARGE_S = 60.0

PREFILL = A100Profile("opt-13b")
DECODE = A100Profile("opt-13b", overhead=Overhead(stage_s=0.0))
"""The reference adds its milliseconds per stage to prefill alone."""


def placed(tp_prefill: int, pp_prefill: int, tp_decode: int, pp_decode: int) -> tuple[Plan, dict[str, StepCost]]:
    """A prefill and a decode instance as the reference simulates them."""
    prefill = PrefillInstance(
        name="prefill",
        tp=tp_prefill,
        pp=pp_prefill,
        pages=PLENTY,
        batching="kv_capacity",
        lm_tokens=1,
        max_batch=PLENTY,
        prefix_cache=False,
        lease_s=1e9,
    )
    decode = DecodeInstance(name="decode", tp=tp_decode, pp=pp_decode, pages=PLENTY, max_num_seqs=PLENTY, watermark=0.0)
    costs = {
        "prefill": PREFILL.cost("prefill", tp_prefill, pp_prefill),
        "decode": DECODE.cost("decode", tp_decode, pp_decode),
    }
    return plan_of(prefill, decode), costs


def one_more(workload: Workload) -> Workload:
    """The workload with a decode step more for each request: TPOT then is that of the reference."""
    return msgspec.structs.replace(workload, outputs=tuple(tokens + 1 for tokens in workload.outputs))


# runs


@dataclass(frozen=True)
class Compared:
    """One run. Milliseconds between ours and the reference's are the largest of all requests.

    Attributes:
        cpu_s: ours.
        whole_s: CPU seconds of the reference for a whole run: now, with a checkout, else as recorded; None if neither.
        loop_s: as recorded, of its event loop alone; None if unmeasured.
        ttft_ms, tpot_ms: largest difference.
        most_tokens: most tokens of context that decode held.
        attainment, theirs: percent of requests that meet 0.2 and 0.1 s.
    """

    name: str
    cpu_s: float
    whole_s: float | None
    loop_s: float | None
    ttft_ms: float
    tpot_ms: float
    most_tokens: int
    attainment: float
    theirs: float


def compare(run: Run, timing: Mapping[str, Any] | None, repetitions: int, checkout: Checkout | None) -> Compared:
    """Simulate a run of the reference."""
    plan, costs = placed(2, 1, 1, run.pp)
    workload = one_more(run.workload)
    result, cpu_s = timed(lambda: simulate(plan, workload, costs=costs), repetitions)
    assert run.reference is not None
    ttft, tpot = result.ttft_s() * 1e3, result.tpot_s() * 1e3
    met = (ttft <= 200) & (tpot <= 100)
    return Compared(
        name=run.name,
        cpu_s=cpu_s,
        whole_s=checkout.cpu_s(run) if checkout else timing["run_experiment_cpu_s"] if timing else None,
        loop_s=timing["env_run_cpu_s"] if timing else None,
        ttft_ms=float(np.abs(ttft - run.reference.ttft_ms).max()),
        tpot_ms=float(np.abs(tpot - run.reference.tpot_ms).max()),
        most_tokens=held(result, workload),
        attainment=float(100 * met.mean()),
        theirs=run.reference.met(SLO_S),
    )


class Checkout:
    """The reference, run where it lies.

    Args:
        path: of the checkout.
        python: interpreter that has its dependencies.
    """

    DRIVER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from simdistserve.benchmarks import simulate_dist
args = simulate_dist.parse_args(sys.argv[2:])
run = getattr(simulate_dist, "run_experiment", simulate_dist.main)
started = time.process_time()
run(args)
print(time.process_time() - started)
"""

    def __init__(self, path: Path, python: str) -> None:
        self._path = path
        self._python = python

    def cpu_s(self, run: Run) -> float:
        """CPU seconds that the reference takes for a run, its imports not counted.

        Raises:
            BenchFailed: it did not end well.
        """
        work = run.workload
        rows = [
            {"start_time": at / 1e12, "prompt_len": prompt, "output_len": output}
            for at, prompt, output in zip(work.arrivals, work.inputs, work.outputs, strict=True)
        ]
        placement = ("--tp-prefill", "2", "--pp-prefill", "1", "--tp-decode", "1", "--pp-decode", str(run.pp))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "workload.json"
            file.write_text(json.dumps(rows))
            what = (
                "--backend",
                "distserve",
                "--model",
                "facebook/opt-13b",
                "--N",
                str(len(rows)),
                "--arrival",
                "custom",
            )
            done = subprocess.run(
                [self._python, "-c", self.DRIVER, self._path, *what, "--workload", file, *placement],
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            raise BenchFailed(f"--reference: {run.name} failed: {done.stderr.strip().splitlines()[-1:]}")
        return float(done.stdout.strip().splitlines()[-1])


def timed(work: Callable[[], SimResult], repetitions: int) -> tuple[SimResult, float]:
    """What ``work`` gives, and the least CPU seconds that it took."""
    seconds: list[float] = []
    for _ in range(repetitions):
        started = time.process_time()
        result = work()
        seconds.append(time.process_time() - started)
    return result, min(seconds)


def held(result: SimResult, workload: Workload) -> int:
    """Most tokens that decode held at a time, all of a request's tokens counted from its first to its last one."""
    changes: list[tuple[int, int]] = []
    for index, tokens in enumerate(workload.inputs):
        changes += ((result.first[index], tokens), (result.ends[index], -tokens - workload.outputs[index]))
        changes.append((result.first[index], workload.outputs[index]))
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


# searches


@dataclass(frozen=True)
class Searched:
    """One search space.

    Attributes:
        cpu_s, theirs_s: CPU seconds.
        simulations: ours; those of prefill alone are counted too.
        best, their_best: (prefill TP, PP, decode TP, PP).
        rate, their_rate: requests per second and device.
        apart: configurations whose rate differs by more than one step of the bisection.
        configurations: that both could judge.
    """

    name: str
    cpu_s: float
    theirs_s: float
    simulations: int
    best: tuple[int, ...]
    their_best: tuple[int, ...]
    rate: float
    their_rate: float
    apart: tuple[str, ...]
    configurations: int


class Space:
    """Rates of placements by the criterion of the reference, and what was simulated for them."""

    def __init__(self, lengths: Sequence[tuple[int, int]]) -> None:
        self.simulations = 0
        self._lengths = lengths
        self._prefill = cache(self._prefill_alone)

    def highest(self, config: tuple[int, int, int, int], most: float, step: float) -> float:
        """Requests per second and device, from a bisection of 0 to ``most`` down to ``step``."""
        devices = config[0] * config[1] + config[2] * config[3]
        low, high = 0.0, most
        while high - low > step:
            middle = (low + high) / 2
            if self._passes(config, middle * devices):
                low = middle
            else:
                high = middle
        return low

    def _passes(self, config: tuple[int, int, int, int], rate: float) -> bool:
        if not self._prefill(config[:2], rate):
            return False
        plan, costs = placed(*config)
        result = simulate(plan, one_more(self._workload(rate)), costs=costs)
        self.simulations += 1
        return bool(np.percentile(result.tpot_s(), 90) < SLO_S.tpot_s)

    def _prefill_alone(self, prefill: tuple[int, int], rate: float) -> bool:
        plan, costs = placed(*prefill, 1, 1)
        workload = self._workload(rate)
        result = simulate(plan, msgspec.structs.replace(workload, outputs=(1,) * len(workload)), costs=costs)
        self.simulations += 1
        return bool(np.percentile(result.ttft_s(), 90) < SLO_S.ttft_s)

    def _workload(self, rate: float) -> Workload:
        gaps = np.random.RandomState(0).gamma(1, 1 / rate, size=len(self._lengths) - 1)
        inputs, outputs = zip(*self._lengths, strict=True)
        return Workload.of([0.0, *np.cumsum(gaps).tolist()], inputs, outputs)


def sample(data: Path) -> list[tuple[int, int]]:
    """The requests of the reference's searches."""
    with (data / "sharegpt_opt_1600.csv").open(newline="") as file:
        rows = [(int(row["input_len"]), int(row["output_len"])) for row in csv.DictReader(file)]
    return random.Random(0).sample(rows, REQUESTS)


def search_like(name: str, theirs: Mapping[str, Any], lengths: Sequence[tuple[int, int]]) -> Searched:
    """Search a space of the reference by its criterion."""
    started = time.process_time()
    space = Space(lengths)
    rates: dict[tuple[int, int, int, int], float] = {}
    given: dict[tuple[int, int, int, int], float] = {}
    for row in theirs["results"]:
        if row["per_gpu_rate"] is None:
            continue  # does not run: the heads cannot be divided so
        _, tp_prefill, pp_prefill, tp_decode, pp_decode = row["config"]
        config = (tp_prefill, pp_prefill, tp_decode, pp_decode)
        given[config] = row["per_gpu_rate"]
        rates[config] = space.highest(config, theirs["max_per_gpu_rate"], theirs["esp"])
    cpu_s = time.process_time() - started
    best = max(rates, key=lambda config: rates[config])
    their_best = tuple(theirs["best"]["config"][1:])
    step = theirs["max_per_gpu_rate"]
    while step > theirs["esp"]:
        step /= 2
    apart = [config for config, rate in rates.items() if abs(rate - given[config]) > step + 1e-9]
    return Searched(
        name=name,
        cpu_s=cpu_s,
        theirs_s=theirs["cpu_s"],
        simulations=space.simulations,
        best=best,
        their_best=their_best,
        rate=rates[best],
        their_rate=theirs["best"]["per_gpu_rate"],
        apart=tuple(f"{config}: {rates[config]} instead of {given[config]}" for config in apart),
        configurations=len(rates),
    )


@dataclass(frozen=True)
class Large:
    """Our search for 32 devices."""

    model: str
    affinity: str
    wall_s: float
    answer: str


def large(model: str, affinity: Any, slo: SLO, checkpoint_tokens: Any) -> Large:
    """Search four nodes of eight A100s, as the paper's Fig 12 does."""
    source = Source(lengths=FromTrace(load_trace("sharegpt")))
    started = time.perf_counter()
    found = search(
        model,
        Cluster(hardware="a100-80g", nodes=4, devices_per_node=8),
        source,
        slo,
        latency=A100Profile(model),
        kv_tokens=checkpoint_tokens,
        dtype="float16",
        affinity=affinity,
        wide=False,
        workers=2,
    )
    return Large(model, affinity, time.perf_counter() - started, found.option.label if found.option else found.reason)


# the report


def verdicts(runs: Sequence[Compared], searches: Sequence[Searched], larges: Sequence[Large]) -> dict[str, str]:
    """What is asked of the figures: ``HOLDS``, or what does not."""
    fits = [run for run in runs if run.most_tokens <= STEP_TOKENS and "c21d11" in run.name]
    checks = {
        "ttft": [run.name for run in runs if run.ttft_ms > 1e-3],
        "tpot": [run.name for run in fits if run.tpot_ms > 1e-3] or ([] if fits else ["no run to compare"]),
        "speed": [
            f"{run.name}: {run.whole_s / run.cpu_s:.0f} times"
            for run in runs
            if run.whole_s is not None and run.whole_s < FASTER * run.cpu_s
        ],
        "search_time": [f"{one.name}: {one.cpu_s:.2f} s" for one in searches if one.cpu_s > LIMITS[one.name]],
        "search_answer": [one.name for one in searches if one.best != one.their_best or one.rate != one.their_rate],
        "large": [f"{one.model} {one.affinity}: {one.wall_s:.0f} s" for one in larges if one.wall_s > LARGE_S],
    }
    return {name: "; ".join(broken) or HOLDS for name, broken in checks.items()}


def show(
    runs: Sequence[Compared], searches: Sequence[Searched], larges: Sequence[Large], checks: Mapping[str, str]
) -> None:
    """Print the tables and the checks."""
    console = Console(width=140)
    table = Table(title="runs: CPU seconds, and the largest difference of a request")
    for column in ("run", "ours s", "theirs s", "times", "loop s", "times", "TTFT ms", "TPOT ms", "ours %", "theirs %"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run in runs:
        whole = ("", "") if run.whole_s is None else (f"{run.whole_s:.2f}", f"{run.whole_s / run.cpu_s:.0f}")
        loop = ("", "") if run.loop_s is None else (f"{run.loop_s:.2f}", f"{run.loop_s / run.cpu_s:.0f}")
        differences = (f"{run.ttft_ms:.4f}", f"{run.tpot_ms:.4f}", f"{run.attainment:.1f}", f"{run.theirs:.1f}")
        table.add_row(run.name, f"{run.cpu_s:.3f}", *whole, *loop, *differences)
    console.print(table)
    for one in searches:
        console.print(
            f"{one.name}: {one.cpu_s:.2f} CPU-s (reference {one.theirs_s:.0f}), {one.simulations} simulations; best"
            f" {one.best} at {one.rate} (reference {one.their_best} at {one.their_rate}); {len(one.apart)} of"
            f" {one.configurations} configurations more than a step apart {'; '.join(one.apart)}",
            highlight=False,
        )
    for one in larges:
        console.print(f"32 devices, {one.model}, {one.affinity}: {one.wall_s:.1f} s, {one.answer}", highlight=False)
    for name, said in checks.items():
        console.print(f"{name}: {said}", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="The simulator and the search beside those of the reference.")
    parser.add_argument("--quick", action="store_true", help="one repetition, no search for 32 devices")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless everything asked of the figures holds")
    parser.add_argument("--data", type=Path, default=DATA, metavar="PATH", help="folder with the reference's figures")
    parser.add_argument("--reference", type=Path, metavar="CHECKOUT", help="of LLMServe/DistServe, to be run as well")
    parser.add_argument(
        "--reference-python", default=sys.executable, metavar="PATH", help="interpreter for it (default: this one)"
    )
    options = parser.parse_args()
    checkout = Checkout(options.reference, options.reference_python) if options.reference else None
    try:
        reference = json.loads((options.data / "simdistserve_reference.json").read_text())
        lengths = sample(options.data)
        every = [run for run in load(options.data) if run.family in ("aligned", "pp2")]
    except (OSError, BenchFailed) as error:
        print(error, file=sys.stderr)
        return 1
    timing = {row["run"]: row for row in reference["timing_cpu"]}
    try:
        simulate(*placed(1, 1, 1, 1)[:1], every[0].workload, costs=placed(1, 1, 1, 1)[1])  # warm
        runs = [compare(run, timing.get(run.name), 1 if options.quick else 5, checkout) for run in every]
        searches = [search_like(name, reference["searches"][name], lengths) for name in LIMITS]
        larges: list[Large] = []
        if not options.quick:
            for model, slo in (("opt-13b", SLO_S), ("opt-66b", SLO(2.5, 0.15))):
                larges += (large(model, affinity, slo, a100_kv_tokens(model)) for affinity in ("low", "high"))
    except (BenchFailed, JdserveError) as error:
        print(error, file=sys.stderr)
        return 1
    checks = verdicts(runs, searches, larges)
    report = {
        "machine": describe(),
        "python": sys.version.split()[0],
        "runs": [asdict(run) for run in runs],
        "searches": [asdict(one) for one in searches],
        "large": [asdict(one) for one in larges],
        "checks": checks,
    }
    save(report, RESULTS, options.quick)
    show(runs, searches, larges, checks)
    return conclude(report, options.check)


if __name__ == "__main__":
    sys.exit(main())
