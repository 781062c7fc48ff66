"""Figures 1, 4, 8, 9, 10, 11, 12 and Tables 2, 3 of the DistServe paper: ours beside theirs, with pictures.

    python bench/paper_figures.py [--quick] [--check] [--data PATH]

Units, step times and the length of a run are those of ``paper.py``. Fig 4 is the closed form against the digitised
points. Fig 11 compares our Algorithms 1 and 2; Fig 12 gives CPU-seconds of our searches in one process beside the
paper's seconds on 96 cores. Table 2 sets what the paper says of its simulator beside what ``validate_a100.py`` found of
ours, on other runs. Table 3 asks whether any unit of one instance per phase carries more
on as many devices as the paper's; devices that a smaller unit leaves idle count, since they are provisioned. Larger
units can carry more per device: for OPT-13B prefill tp 4 with decode tp 2, on six devices, carries 41 % more per device
than the paper's three in runs of 300 requests, and 8 % more in runs of 1,500.

Not drawn of ours: DeepSpeed-MII, of which there are no step times, and vLLM for OPT-175B, whose published fit with
tp 8 has no time per prompt token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from a100 import COPY_TOKEN_S, DATA, NO_LIMIT, Copies, percentiles
from conclusion import HOLDS, BenchFailed, conclude, save, show_checks
from machine import describe
from paper import APPS, SEEDS, App, Trial, Unit, best, facts, lengths, one_device, units
from rich.console import Console
from rich.table import Table

from jdserve.core.errors import JdserveError
from jdserve.core.request import SLO
from jdserve.cost import queueing
from jdserve.cost.a100 import A100Profile, a100_kv_tokens
from jdserve.cost.cluster import Cluster
from jdserve.placement.result import SearchResult
from jdserve.placement.search import search
from jdserve.sim.goodput import find_rate
from jdserve.sim.lengths import Uniform
from jdserve.sim.result import SimResult
from jdserve.sim.simulate import simulate
from jdserve.sim.traces import Trace
from jdserve.sim.workload import FS, Source

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "paper_figures.json"
VALIDATED = HERE / "results" / "validate_a100.json"
PICTURES = HERE / "results" / "paper"

CLUSTER = HERE.parent / "plans" / "clusters" / "a100x32-25g.json"


FIG11_RATE = 20.0
"""Requests per second that the plans of Fig 11 carry."""

WITHIN = 0.97
"""The paper's placement carries at least this share of our best."""

Points = list[tuple[float, float]]

Level = Literal["high", "low"]


class Paper:
    """Everything that is computed.

    Args:
        paper: figures of the paper.
        seeds: runs per point.
    """

    def __init__(self, paper: Mapping[str, Any], seeds: Sequence[int]) -> None:
        self._paper = paper
        self._traces: dict[str, Trace] = {app.data: lengths(app.data, paper) for app in APPS}
        self._trials = {app.name: Trial(self._traces[app.data], app.slo, app.requests, tuple(seeds)) for app in APPS}

    def theirs(self, key: str) -> dict[str, Points]:
        """Curves of a figure."""
        return {name: [(x, y) for x, y in points] for name, points in self._paper["curves"][key].items()}

    def fig1(self, requests: int = 2000) -> dict[str, Any]:
        """OPT-13B on one A100, 512 tokens in and 64 out: together, and each phase by itself."""
        source = Source(lengths=Uniform(512, 64))
        prompts = Source(lengths=Uniform(512, 1))
        slo = SLO(**{key: self._paper["eval_settings"]["fig1_slo"][key] for key in ("ttft_s", "tpot_s")})
        ttft, tpot = self.theirs("fig1_ttft_p90_s"), self.theirs("fig1_tpot_p90_s")

        def kind(name: str, rate: float) -> SimResult:
            work = (prompts if name == "prefill_only" else source).at(rate, requests)
            plan, costs = one_device(name)
            return simulate(plan, work, costs=costs, network=Copies(COPY_TOKEN_S))

        def p90(values: Any) -> float:
            return round(float(np.percentile(values, 90)), 4)

        goodputs: dict[str, float] = {}
        for name, devices in (("colocated", 1), ("prefill_only", 1), ("decode_only", 1), ("2P1D", 3)):
            goodputs[name] = find_rate(
                lambda rate, name=name: kind(name, rate).attainment(slo) >= 0.9, 2.0, NO_LIMIT, 0.01
            ).rate
            goodputs[name] = round(goodputs[name] / devices, 3)
        return {
            "goodput_per_gpu": {
                "ours": goodputs,
                "theirs": {"colocated": 1.6, "prefill_only": 5.6, "decode_only": 10.0, "2P1D": 3.3},
            },
            "ttft_p90_s": {
                "theirs": ttft,
                "ours": {
                    "colocated": [(x, p90(kind("colocated", x).ttft_s())) for x, _ in ttft["existing_vLLM"]],
                    "prefill_only": [(x, p90(kind("prefill_only", x).ttft_s())) for x, _ in ttft["prefill_only"]],
                },
            },
            "tpot_p90_s": {
                "theirs": tpot,
                "ours": {
                    "colocated": [(x, p90(kind("colocated", x).tpot_s())) for x, _ in tpot["existing_vLLM"]],
                    "decode_only": [(x, p90(kind("decode_only", x).tpot_s())) for x, _ in tpot["decode_only"]],
                },
            },
        }

    def fig4(self) -> dict[str, Any]:
        """Mean TTFT of two devices: Eqs 2 and 3 with D = 0.2 s, rate per device."""
        ours: dict[str, dict[str, Points]] = {}
        gap = 0.0
        theirs = {key: self.theirs(key) for key in ("fig4a_avg_ttft_s", "fig4b_avg_ttft_s")}
        for key, curves in theirs.items():
            ours[key] = {}
            for name, points in curves.items():
                speedup = 1.7 if name == "intra_op" else float(name.removeprefix("intra_K")) if "K" in name else 0.0
                ours[key][name] = [
                    (x, queueing.two_shards(2 * x, 0.2, speedup) if speedup else queueing.two_stages(2 * x, 0.2))
                    for x, _ in points
                ]
                gaps = [abs(a / b - 1) for (_, a), (_, b) in zip(ours[key][name], points, strict=True)]
                gap = max(gap, *gaps)
        return {"ours": ours, "theirs": theirs, "largest_relative_gap": round(gap, 5)}

    def curves(self, app: App) -> dict[str, Any]:
        """Attainment against rate and against SLO scale: one row of Figs 8 and 9."""
        trial = self._trials[app.name]
        sides = {"DistServe": Unit(app.model, app.prefill, app.decode)}
        if app.model != "opt-175b":
            sides["vLLM"] = Unit(app.model, (app.vllm, 1), (app.vllm, 1), colocated=True)
        rates, scales = self.theirs(app.rate_key), self.theirs(app.slo_key)
        ours_rate = {
            name: [(x, round(trial.attainment(unit, x), 2)) for x, _ in rates[name]] for name, unit in sides.items()
        }
        ours_scale = {
            name: [
                (
                    x,
                    round(trial.attainment(unit, app.fixed, SLO(app.slo.ttft_s * x, app.slo.tpot_s * x)), 2),
                )
                for x, _ in scales[name]
            ]
            for name, unit in sides.items()
        }
        goodputs = {name: round(trial.goodput(unit, 0.5), 4) for name, unit in sides.items()}
        theirs = self._paper["crossings"][app.rate_key]["at90"]
        return {
            "rate": {"ours": ours_rate, "theirs": rates},
            "scale": {"ours": ours_scale, "theirs": scales},
            "goodput_per_gpu": {"ours": goodputs, "theirs": theirs},
            "slo_scale": {
                "ours": {name: round(trial.slo_scale(unit, app.fixed), 4) for name, unit in sides.items()},
                "theirs": self._paper["crossings"][app.slo_key]["at90"],
            },
        }

    def fig10(self) -> dict[str, Any]:
        """Where the time goes (OPT-175B, ShareGPT), and how long KV takes to move."""
        app = next(app for app in APPS if app.name == "175b")
        unit = Unit(app.model, app.prefill, app.decode)
        parts: dict[str, dict[str, float]] = {}
        for rate in self._paper["fig10_left_pct"]:
            parts[rate] = _breakdown(self._trials[app.name].runs(unit, float(rate)))
        moved: dict[str, Any] = {}
        for name, model in (("13b", "OPT-13B"), ("66b", "OPT-66B"), ("175b", "OPT-175B")):
            app = next(app for app in APPS if app.name == name)
            runs = self._trials[name].runs(Unit(app.model, app.prefill, app.decode), app.fixed)
            moved[model] = percentiles(np.concatenate([_moving_ms(run) for run in runs]), (50, 90, 95, 99))
        theirs = {
            name: [round(1e3 * cdf[key], 1) for key in ("p50_s", "p90_s", "p95_s", "p99_s")]
            for name, cdf in self._paper["fig10_right_cdf"].items()
        }
        return {
            "percent": {"ours": parts, "theirs": self._paper["fig10_left_pct"]},
            "moving_ms_p50_p90_p95_p99": {"ours": moved, "theirs": theirs},
        }

    def fig11(self) -> dict[str, Any]:
        """OPT-66B on ShareGPT, the fewest devices for a rate: our Algorithm 2 on the paper's cluster, and Algorithm 1
        where nodes are linked as well as devices are."""
        low = Cluster.load(CLUSTER)
        high = msgspec.structs.replace(low, across=low.device.inside, nic_share=1)
        cases: dict[str, tuple[Level, Cluster]] = {"DistServe-High": ("high", high), "DistServe-Low": ("low", low)}
        ours: dict[str, Any] = {}
        for name, (level, cluster) in cases.items():
            found = _search("opt-66b", cluster, self._traces["sharegpt"], APPS[1].slo, level, 600, FIG11_RATE)
            if found.option is None:
                raise BenchFailed(f"fig 11, {name}: {found.reason}")
            ours[name] = {
                "goodput_per_gpu": round(FIG11_RATE / found.option.devices, 4),
                "devices": found.option.devices,
                "placement": found.option.label,
            }
        theirs = self._paper["crossings"]["fig11_rate_66b"]["at90"]
        return {"ours": ours, "theirs_goodput_per_gpu": theirs, "theirs": self.theirs("fig11_rate_66b")}

    def fig12(self, quick: bool) -> dict[str, Any]:
        """CPU-seconds of a search for OPT-13B on 2 to 32 devices, in one process."""
        levels: dict[str, Level] = {"DistServe-Low": "low", "DistServe-High": "high"}
        ours: dict[str, dict[str, float]] = {name: {} for name in levels}
        for devices in (2, 4, 8) if quick else (2, 4, 8, 16, 32):
            nodes = max(devices // 8, 1)
            cluster = Cluster(hardware="a100-80g", nodes=nodes, devices_per_node=devices // nodes)
            for name, level in levels.items():
                started = time.process_time()
                _search("opt-13b", cluster, self._traces["sharegpt"], SLO(0.2, 0.1), level, 300)
                ours[name][str(devices)] = round(time.process_time() - started, 2)
        return {"cpu_s": ours, "theirs_s_on_96_cores": self._paper["fig12_runtime_s"]}

    def table2(self) -> dict[str, Any]:
        """Largest and mean errors of attainment: the paper's simulator, and ours on the runs that are published."""
        rows = self._paper["table2"]["rows"]
        theirs = {
            "vLLM": [abs(real - simulated) for _, real, simulated, _, _ in rows],
            "DistServe-Low": [abs(real - simulated) for _, _, _, real, simulated in rows],
        }
        report: dict[str, Any] = {
            "theirs": {name: {"mean": round(float(np.mean(e)), 2), "worst": max(e)} for name, e in theirs.items()},
            "rows": rows,
        }
        if VALIDATED.is_file():
            families = json.loads(VALIDATED.read_bytes())["families"]
            report["ours"] = {
                families[family]["what"]: families[family]["errors"][how]["all"]
                for family, how in (("aligned", "left_out"), ("pp2", "left_out"), ("vllm", "two_states"))
                if how in families[family]["errors"]
            }
        return report

    def table3(self, app: App) -> dict[str, Any]:
        """What the paper's placement carries, and the best that we find on as many devices."""
        trial, unit = self._trials[app.name], Unit(app.model, app.prefill, app.decode)
        rate = unit.devices * trial.goodput(unit, 0.5)
        found = best(trial, [unit, *(one for one in units(app.model, app.devices) if one != unit)], app.devices, rate)
        top = max(found.values())
        return {
            "devices": app.devices,
            "paper": {"placement": unit.label, "req_per_s": round(rate, 3), "per_gpu": round(rate / app.devices, 4)},
            "best": [
                {"placement": one.label, "devices": one.devices, "req_per_s": round(carried, 3)}
                for one, carried in list(found.items())[:5]
            ],
            "share_of_best": round(rate / max(top, rate), 4),
        }


def _search(
    model: str, cluster: Cluster, trace: Trace, slo: SLO, level: Level, requests: int, rate: float | None = None
) -> SearchResult:
    """A search over Algorithm 1 or 2 with the measured step times and capacities."""
    return search(
        model,
        cluster,
        trace,
        slo,
        latency=A100Profile(model),
        kv_tokens=a100_kv_tokens(model),
        dtype="float16",
        affinity=level,
        rate=rate,
        wide=False,
        requests=requests,
        steady=rate is not None,
        confirm=1,
        workers=1,
    )


def _breakdown(runs: Sequence[SimResult]) -> dict[str, float]:
    """Percent of the latency of all requests that moved."""
    sums = np.zeros(5)
    for run in runs:
        points = np.array([run.arrivals, run.started, run.first, run.pulled, run.landed, run.ends], dtype=float)
        points = points[:, points[4] >= 0]
        sums += np.diff(points, axis=0).sum(axis=1)
    names = ("prefill_queue", "prefill_exec", "decode_queue", "transmission", "decode_exec")
    return {name: round(float(100 * part / sums.sum()), 2) for name, part in zip(names, sums, strict=True)}


def _moving_ms(run: SimResult) -> Any:
    points = np.array([run.pulled, run.landed], dtype=float)
    points = points[:, points[1] >= 0]
    return (points[1] - points[0]) / FS * 1e3


def bench(data: Path, quick: bool, console: Console) -> dict[str, Any]:
    """All figures and tables.

    Raises:
        BenchFailed: the figures of the paper are not there.
    """
    paper = Paper(facts(data), SEEDS[:1] if quick else SEEDS)
    report: dict[str, Any] = {"bench": "paper_figures", "quick": quick, "setting": {"machine": describe()}}
    started = time.process_time()
    steps: dict[str, Any] = {
        "fig1": lambda: paper.fig1(500 if quick else 2000),
        "fig4": paper.fig4,
        "fig8_9": lambda: {app.name: paper.curves(app) for app in APPS},
        "fig10": paper.fig10,
        "fig11": paper.fig11,
        "fig12": lambda: paper.fig12(quick),
        "table2": paper.table2,
        "table3": lambda: {app.name: paper.table3(app) for app in (APPS[:2] if quick else APPS)},
    }
    for name, step in steps.items():
        report[name] = step()
        console.print(f"{name}: {time.process_time() - started:.1f} CPU-s so far", highlight=False)
    report["cpu_s"] = round(time.process_time() - started, 1)
    report["checks"] = {
        f"table 3, {name}: the paper's placement is within 3 % of our best": HOLDS
        if row["share_of_best"] >= WITHIN
        else f"{row['share_of_best']:.1%} of {row['best'][0]['placement']}"
        for name, row in report["table3"].items()
    } | {
        "fig 4: every point within 0.5 %": HOLDS
        if report["fig4"]["largest_relative_gap"] <= 0.005
        else f"{report['fig4']['largest_relative_gap']:.3%}"
    }
    return report


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print what is short: goodputs, Table 3 and the checks."""
    table = Table(title="Goodput per GPU at 90 % (req/s), and SLO scale: ours | theirs")
    for heading in ("", "DistServe", "vLLM", "SLO scale", "vLLM"):
        table.add_column(heading)
    for name, row in report["fig8_9"].items():
        cells = [
            f"{row[key]['ours'].get(side, '-')} | {row[key]['theirs'].get(side, '-')}"
            for key in ("goodput_per_gpu", "slo_scale")
            for side in ("DistServe", "vLLM")
        ]
        table.add_row(name, *cells)
    console.print(table)
    table = Table(title="Table 3")
    for heading in ("", "paper's placement", "req/s", "our best on as many devices", "req/s", "share"):
        table.add_column(heading)
    for name, row in report["table3"].items():
        top = row["best"][0]
        table.add_row(
            name,
            row["paper"]["placement"],
            f"{row['paper']['req_per_s']}",
            top["placement"],
            f"{top['req_per_s']}",
            f"{row['share_of_best']:.1%}",
        )
    console.print(table)
    for name in ("fig11", "fig12", "table2"):
        console.print(name, msgspec.json.encode({k: v for k, v in report[name].items() if k != "theirs"}).decode())
    show_checks(report["checks"], console)


def main() -> int:
    parser = argparse.ArgumentParser(description="The DistServe paper's figures, ours beside theirs.")
    parser.add_argument("--quick", action="store_true", help="one run per point, two rows of Table 3")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every check holds")
    parser.add_argument(
        "--data", type=Path, default=DATA, metavar="PATH", help="folder of the paper's figures (default: %(default)s)"
    )
    options = parser.parse_args()
    console = Console()
    try:
        from paper_plots import draw

        report = bench(options.data, options.quick, console)
        if not options.quick:
            PICTURES.mkdir(parents=True, exist_ok=True)
            draw(report, PICTURES)
    except (BenchFailed, JdserveError) as error:
        print(error, file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"{error}: pip install 'jdserve[bench]'", file=sys.stderr)
        return 1
    save(report, RESULTS, options.quick)
    show(report, console)
    return conclude(report, options.check)


if __name__ == "__main__":
    sys.exit(main())
