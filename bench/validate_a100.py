"""Our simulator beside 37 real runs on A100s, and beside the reference simulator on the same requests.

    python bench/validate_a100.py [--quick] [--check] [--data PATH]

The engines' policies are plan fields (``a100.py``). What is fitted are a few latency corrections, and for the run that
is judged always on the *other* runs of its family alone, by trying every candidate of a small grid on each of them:

- aligned: factor and constant of prefill, time per context token of decoding
- pp2: the constant of a pass through both decode stages. The reference simulator's term per context token is left
  out: the time between tokens does not show it in any of these runs, and one run is 47 points off with it
  (``nothing_fitted``). ``one_stage_constant`` takes the constant of decoding with one stage, and fits nothing
- vllm: factors and constants of both phases, time per sequence, size of the pool. Two of the eight runs were made on a
  slower server: already their first request, alone on it, decoded 18 % slower than those of the six others. Hence two
  figures: ``strict`` knows nothing of that; ``two states`` tells the state by the first request alone, which then does
  not count, and takes the factor of the slower state from the other run in it.

The unaligned runs take what was fitted on all runs of the family with the same number of decode stages. ``nothing
fitted`` are the overheads that the reference simulator has. The file of the runs is no part of the package.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from a100 import DATA, FAMILIES, Family, Latency, Run, Times, load, percentiles, replay
from conclusion import HOLDS, BenchFailed, conclude, save, show_checks
from machine import describe
from rich.console import Console
from rich.table import Table

from jdserve.core.errors import JdserveError
from jdserve.core.request import SLO
from jdserve.cost.a100 import REFERENCE, Overhead

RESULTS = Path(__file__).parent / "results" / "validate_a100.json"

TIGHT, LOOSE = SLO(ttft_s=0.2, tpot_s=0.1), SLO(ttft_s=0.25, tpot_s=0.1)


DECILES = tuple(range(10, 100, 10))

SLOWER = (1.1, 1.15, 1.2, 1.25)
"""Candidates of how much slower the second state of the vLLM server is."""

STATE = 1.1
"""A server is in the slower state when its first request decodes this much slower than that of the median run."""

NOTHING = Latency()


def two_stages(constant: float) -> Latency:
    """A pass through both decode stages takes ``constant`` seconds more than was measured."""
    return Latency(decode=Overhead(stage_s=0.0, first_s=constant, context_s=0.0))


def grid(family: Family) -> list[Latency]:
    """What a fit chooses from."""
    replace = msgspec.structs.replace
    if family == "aligned":
        return [
            Latency(replace(REFERENCE, prefill=factor, prefill_s=more), replace(REFERENCE, context_s=context))
            for factor, more, context in itertools.product((1.0, 0.97, 0.94), (0.0, 2e-3), (1e-7, 1.3e-7, 1.6e-7))
        ]
    if family == "pp2":
        return [two_stages(constant) for constant in (1e-3, 2e-3, 3e-3, 4e-3)]
    return [
        NOTHING,
        *(
            Latency(decode=replace(REFERENCE, prefill=prefill, prefill_s=more, decode=decode, seq_s=each), kv_tokens=kv)
            for prefill, more, decode, each, kv in itertools.product(
                (0.82, 0.87, 0.92), (0.0, 0.012), (0.88, 0.94), (1e-4, 2e-4, 3e-4), (47_000, 50_000)
            )
        ),
    ]


def distance(ours: Times, real: Times) -> float:
    """What a fit makes small: points of attainment, and 20 times the mean log ratio of the deciles of both times."""
    gaps = [abs(ours.met(slo) - real.met(slo)) for slo in (TIGHT, LOOSE)]
    ratios = [
        np.minimum(np.abs(np.log(np.percentile(a, DECILES) / np.maximum(np.percentile(b, DECILES), 1.0))), 0.5).mean()
        for a, b in ((np.maximum(ours.ttft_ms, 1.0), real.ttft_ms), (np.maximum(ours.tpot_ms, 1.0), real.tpot_ms))
    ]
    return float(np.mean(gaps) + 20 * np.mean(ratios))


class Study:
    """Replays, each made once.

    Args:
        progress: told of every replay that is made.
    """

    def __init__(self, progress: Callable[[], None] = lambda: None) -> None:
        self._progress = progress
        self._times: dict[tuple[str, Latency], Times] = {}

    def times(self, run: Run, latency: Latency) -> Times:
        """Our times of a run."""
        key = (run.name, latency)
        if key not in self._times:
            self._times[key] = replay(run, latency)
            self._progress()
        return self._times[key]

    def distance(self, run: Run, latency: Latency) -> float:
        """How far they are from the real ones."""
        return distance(self.times(run, latency), run.real)

    def best(self, runs: Iterable[Run], candidates: Iterable[Latency]) -> Latency:
        """The candidate that is nearest to ``runs``, on average."""
        runs = list(runs)
        return min(candidates, key=lambda one: sum(self.distance(run, one) for run in runs))

    def left_out(self, runs: Sequence[Run], candidates: Sequence[Latency]) -> dict[str, Latency]:
        """For each run, the candidate that is nearest to all others."""
        return {run.name: self.best((other for other in runs if other is not run), candidates) for run in runs}

    def two_states(self, runs: Sequence[Run], candidates: Sequence[Latency]) -> dict[str, Latency]:
        """The same where a run may be of a slower state, with its factor from the others of that state."""
        chosen: dict[str, Latency] = {}
        for run in runs:
            others = [other for other in runs if other is not run]
            slow = [other for other in others if slower(other, runs)]
            normal = [other for other in others if other not in slow]
            base = self.best(normal, candidates)
            if not slower(run, runs):
                chosen[run.name] = base
            else:
                chosen[run.name] = self.best(slow, [base.slower(factor) for factor in SLOWER])
        return chosen


def slower(run: Run, runs: Sequence[Run]) -> bool:
    """The first request of a run decoded slower than that of the median other run."""
    others = median(float(other.real.tpot_ms[0]) for other in runs if other is not run)
    return float(run.real.tpot_ms[0]) > STATE * others


def without_first(times: Times) -> Times:
    """All requests but the first one."""
    return Times(times.ttft_ms[1:], times.tpot_ms[1:])


def summary(errors: Mapping[str, float], runs: Sequence[Run]) -> dict[str, Any]:
    """Mean and largest absolute error in points, over all runs and over those with attainment between 5 and 97 %."""
    between = [run.name for run in runs if 5 <= run.real.met(TIGHT) <= 97]
    report: dict[str, Any] = {}
    for name, names in (("all", list(errors)), ("between_5_and_97", [one for one in between if one in errors])):
        sizes = [abs(errors[one]) for one in names]
        report[name] = {
            "runs": len(sizes),
            "mean": round(float(np.mean(sizes)), 2),
            "worst": round(max(sizes), 2),
            "bias": round(float(np.mean([errors[one] for one in names])), 2),
        }
    return report


def points(runs: Sequence[Run], ours: Callable[[Run], Times | None], first: bool = True) -> dict[str, float]:
    """Error of attainment of each run, in points."""
    cut = (lambda times: times) if first else without_first
    found = ((run, ours(run)) for run in runs)
    return {run.name: cut(times).met(TIGHT) - cut(run.real).met(TIGHT) for run, times in found if times is not None}


def row(run: Run, fitted: Latency, study: Study) -> dict[str, Any]:
    """All figures of one run."""
    ours = study.times(run, fitted)
    sides = {"real": run.real, "ours": ours, "nothing_fitted": study.times(run, NOTHING), "reference": run.reference}
    report: dict[str, Any] = {"run": run.name, "family": run.family, "fitted": msgspec.to_builtins(fitted)}
    for side, times in sides.items():
        report[side] = times and {
            "met_200_100": round(times.met(TIGHT), 2),
            "met_250_100": round(times.met(LOOSE), 2),
            "ttft_ms": percentiles(times.ttft_ms),
            "tpot_ms": percentiles(times.tpot_ms),
        }
    return report


def study_family(family: Family, runs: Sequence[Run], study: Study, quick: bool) -> dict[str, Any]:
    """Errors of one family, and what was chosen for each run."""
    candidates = [NOTHING] if quick else grid(family)
    chosen = study.left_out(runs, candidates)
    errors = {
        "reference": points(runs, lambda run: run.reference),
        "nothing_fitted": points(runs, lambda run: study.times(run, NOTHING)),
    }
    if family == "vllm":
        errors["strict"] = points(runs, lambda run: study.times(run, chosen[run.name]))
        if not quick:
            chosen = study.two_states(runs, candidates)
        errors["two_states"] = points(runs, lambda run: study.times(run, chosen[run.name]), first=False)
    elif family == "pp2":
        one_stage = two_stages(REFERENCE.stage_s + REFERENCE.first_s)
        errors["one_stage_constant"] = points(runs, lambda run: study.times(run, one_stage))
        chosen = dict.fromkeys(chosen, one_stage) if quick else chosen
        errors["left_out"] = points(runs, lambda run: study.times(run, chosen[run.name]))
    else:
        errors["left_out"] = points(runs, lambda run: study.times(run, chosen[run.name]))
    return {
        "what": FAMILIES[family],
        "candidates": len(candidates),
        "errors": {name: summary(each, runs) for name, each in errors.items()},
        "chosen": chosen,
    }


def bench(data: Path, quick: bool, console: Console) -> dict[str, Any]:
    """The whole report.

    Raises:
        BenchFailed: the runs are not there.
    """
    started = time.process_time()
    runs = load(data)
    made = 0

    def progress() -> None:
        nonlocal made
        made += 1
        if console.is_terminal and made % 10 == 0:
            console.print(f"{made} replays", end="\r")

    study = Study(progress)
    by_family = {family: [run for run in runs if run.family == family] for family in FAMILIES}
    families: dict[str, Any] = {}
    chosen: dict[str, Latency] = {}
    fitted: tuple[Family, ...] = ("aligned", "pp2", "vllm")
    for family in fitted:
        report = study_family(family, by_family[family], study, quick)
        chosen |= report.pop("chosen")
        families[family] = report
    for run in by_family["unaligned"]:
        alike: Family = "pp2" if run.pp == 2 else "aligned"
        known = [NOTHING] if quick and run.pp == 1 else grid(alike)
        chosen[run.name] = study.best(by_family[alike], known)
    errors = points(by_family["unaligned"], lambda run: study.times(run, chosen[run.name]))
    families["unaligned"] = {"what": FAMILIES["unaligned"], "errors": {"predicted": summary(errors, runs)}}
    return {
        "bench": "validate_a100",
        "quick": quick,
        "setting": {"machine": describe(), "slo_ms": [200, 100]},
        "families": families,
        "runs": [row(run, chosen[run.name], study) for run in runs],
        "replays": made,
        "cpu_s": round(time.process_time() - started, 1),
        "checks": checks(families, quick),
    }


def checks(families: Mapping[str, Any], quick: bool) -> dict[str, str]:
    """Every bound, and whether it holds."""
    bounds = [
        ("aligned mean <= 2.0", "aligned", "nothing_fitted", "mean", 2.0),
        ("aligned worst <= 5", "aligned", "nothing_fitted", "worst", 5.0),
        ("pp2 mean <= 4", "pp2", "one_stage_constant", "mean", 4.0),
    ]
    if not quick:
        bounds += [
            ("aligned, left out, mean <= 2.0", "aligned", "left_out", "mean", 2.0),
            ("aligned, left out, worst <= 5", "aligned", "left_out", "worst", 5.0),
            ("aligned, left out, mean <= 1.5 (aim)", "aligned", "left_out", "mean", 1.5),
            ("aligned, left out, worst <= 4 (aim)", "aligned", "left_out", "worst", 4.0),
            ("pp2, left out, mean <= 4", "pp2", "left_out", "mean", 4.0),
            ("vllm mean <= 3, two states", "vllm", "two_states", "mean", 3.0),
        ]
    found: dict[str, str] = {}
    for name, family, errors, figure, bound in bounds:
        value = families[family]["errors"][errors]["all"][figure]
        found[name] = HOLDS if value <= bound else f"{value} points"
    return found


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the figures and the checks."""
    table = Table(title="Error of attainment at 200/100 ms, in points")
    for heading in ("runs", "", "mean", "worst", "bias", "5..97 % mean", "worst"):
        table.add_column(heading, justify="left" if heading in ("runs", "") else "right")
    for family in report["families"].values():
        for name, errors in family["errors"].items():
            every, between = errors["all"], errors["between_5_and_97"]
            cells = (every["mean"], every["worst"], every["bias"], between["mean"], between["worst"])
            table.add_row(f"{every['runs']} x {family['what']}", name, *(f"{cell:.2f}" for cell in cells))
    console.print(table)
    table = Table(title="Attainment in %; p50/p90/p99 in ms: real | ours | reference")
    for heading in ("run", "attainment", "TTFT", "TPOT"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for run in report["runs"]:
        sides = [run[side] for side in ("real", "ours", "reference") if run[side]]
        table.add_row(
            run["run"],
            " | ".join(f"{side['met_200_100']:.1f}" for side in sides),
            *(
                " | ".join("/".join(f"{value:.0f}" for value in side[key]) for side in sides)
                for key in ("ttft_ms", "tpot_ms")
            ),
        )
    console.print(table)
    show_checks(report["checks"], console)


def main() -> int:
    parser = argparse.ArgumentParser(description="Our simulator beside real runs on A100s.")
    parser.add_argument("--quick", action="store_true", help="fit nothing")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every bound holds")
    parser.add_argument(
        "--data", type=Path, default=DATA, metavar="PATH", help="folder of the runs (default: %(default)s)"
    )
    options = parser.parse_args()
    console = Console()
    try:
        report = bench(options.data, options.quick, console)
    except (BenchFailed, JdserveError) as error:
        print(error, file=sys.stderr)
        return 1
    save(report, RESULTS, options.quick)
    show(report, console)
    return conclude(report, options.check)


if __name__ == "__main__":
    sys.exit(main())
