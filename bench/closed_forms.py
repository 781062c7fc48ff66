"""The simulator beside queueing theory: one prefill instance, prompts alike, no batches.

    python bench/closed_forms.py [--quick] [--check] [--arrivals N]

Prompts of one length come at random (Poisson) to one prefill instance that takes them one at a time: M/D/1. The mean
time to first token is known (DistServe, OSDI'24, section 3.1, equations 1 to 3): for one device, for two pipeline
stages, and for two-way tensor parallelism with speed-up K = 1.6, D being 0.15 s. Each is run at loads 0.3, 0.6 and 0.9
of its slowest stage, for 2 million arrivals (20 thousand where it must be quick), and must agree within three standard
errors and within 2 % (or 10 %, where it must be quick). The error is that of the means of stretches of 10,000 arrivals
(500), which are long beside the time that the queue remembers.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from conclusion import save
from machine import describe
from rich.console import Console
from rich.table import Table

from jdserve.core.plan import DecodeInstance, HostedStage, Plan, PrefillInstance, Worker
from jdserve.core.steptime import StepTime
from jdserve.sim.lengths import Uniform
from jdserve.sim.simulate import simulate
from jdserve.sim.workload import Source

RESULTS = Path(__file__).parent / "results" / "closed_forms.json"

D = 0.15
K = 1.6
LOADS = (0.3, 0.6, 0.9)


@dataclass(frozen=True)
class Size:
    """How long the runs are.

    Attributes:
        arrivals: in all, of each case.
        run: arrivals of one seed.
        stretch: arrivals that give one mean.
        within: share by which theory may be missed.
    """

    arrivals: int = 2_000_000
    run: int = 500_000
    stretch: int = 10_000
    within: float = 0.02


QUICK = Size(20_000, 20_000, 500, 0.1)


@dataclass(frozen=True)
class Case:
    """One equation: prefill of ``seconds`` on ``pp`` stages."""

    name: str
    seconds: float
    pp: int

    def mean_ttft(self, rate: float) -> float:
        """D_s + R D_m^2 / (2 (1 - R D_m)), D_m being the slowest stage."""
        slowest = self.seconds / self.pp
        return self.seconds + rate * slowest**2 / (2 * (1 - rate * slowest))

    def rate(self, load: float) -> float:
        """Arrivals per second at ``load``."""
        return load * self.pp / self.seconds

    def plan(self) -> Plan:
        """One prefill instance, and a decode instance that nothing reaches."""
        prefill = PrefillInstance(
            name="p", pp=self.pp, pages=64, lm_tokens=1, max_batch=1, steptime=StepTime(base=self.seconds)
        )
        decode = DecodeInstance(name="d", pages=64, max_num_seqs=1, steptime=StepTime(base=1.0))
        stages = tuple(HostedStage("p", (stage,), stage) for stage in range(self.pp))
        return Plan(
            model="any",
            max_model_len=1024,
            max_open_requests=10**9,
            instances=(prefill, decode),
            workers=(Worker("w", (*stages, HostedStage("d", (self.pp,)))),),
        )


CASES = (
    Case("Eq 1: one device", D, 1),
    Case("Eq 2: two stages", D, 2),
    Case("Eq 3: tensor parallel", D / K, 1),
)


@dataclass(frozen=True)
class Found:
    """One case at one load; seconds."""

    case: str
    load: float
    rate: float
    theory: float
    simulated: float
    standard_error: float
    arrivals: int

    @property
    def off(self) -> float:
        """Share by which theory is missed."""
        return self.simulated / self.theory - 1

    @property
    def errors(self) -> float:
        """Standard errors by which theory is missed."""
        return (self.simulated - self.theory) / self.standard_error


def run(case: Case, load: float, size: Size) -> Found:
    """Simulate one case."""
    rate, means = case.rate(load), []
    # every case has arrivals of its own, so that they are wrong by chance for reasons of their own
    first = 1000 * (len(LOADS) * CASES.index(case) + LOADS.index(load))
    for seed in range(first, first + size.arrivals // size.run):
        source = Source(lengths=Uniform(512, 1), seed=seed)
        ttft = simulate(case.plan(), source.at(rate, size.run)).ttft_s()
        means.append(ttft.reshape(-1, size.stretch).mean(axis=1))
    stretches = np.concatenate(means)
    error = float(stretches.std(ddof=1) / np.sqrt(len(stretches)))
    return Found(case.name, load, rate, case.mean_ttft(rate), float(stretches.mean()), error, size.arrivals)


def show(found: list[Found], console: Console) -> None:
    """Print the table."""
    table = Table(title="mean time to first token, M/D/1")
    for column in ("case", "load", "rate /s", "theory s", "simulated s", "off", "standard errors"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for one in found:
        table.add_row(
            one.case,
            f"{one.load}",
            f"{one.rate:.2f}",
            f"{one.theory:.5f}",
            f"{one.simulated:.5f}",
            f"{one.off:+.2%}",
            f"{one.errors:+.2f}",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="The simulator beside queueing theory.")
    parser.add_argument("--quick", action="store_true", help="short runs")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every case agrees")
    parser.add_argument("--arrivals", type=int, metavar="N", help="arrivals of each case (default: 2,000,000)")
    options = parser.parse_args()
    size = QUICK if options.quick else Size()
    if options.arrivals is not None:
        if options.arrivals < size.stretch * 2:
            parser.error(f"--arrivals: must be at least {size.stretch * 2}, got {options.arrivals}")
        length = min(size.run, options.arrivals // size.stretch * size.stretch)
        size = Size(options.arrivals // length * length, length, size.stretch, size.within)
    started = time.process_time()
    found: list[Found] = []
    for case in CASES:
        for load in LOADS:
            found.append(run(case, load, size))
            print(f"{case.name} at {load}: {found[-1].off:+.2%}, {found[-1].errors:+.2f} errors", file=sys.stderr)
    broken = [f"{one.case} at {one.load}" for one in found if abs(one.off) > size.within or abs(one.errors) > 3]
    report: dict[str, Any] = {
        "machine": describe(),
        "python": sys.version.split()[0],
        "size": asdict(size),
        "cpu_s": round(time.process_time() - started, 1),
        "cases": [asdict(one) | {"off": one.off, "errors": one.errors} for one in found],
        "holds": not broken,
    }
    save(report, RESULTS, options.quick)
    show(found, Console())
    print(msgspec.json.encode(report).decode())
    if options.check and broken:
        print(f"does not hold: {', '.join(broken)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
