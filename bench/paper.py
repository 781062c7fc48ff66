"""The evaluation of the DistServe paper, rebuilt: its applications, its units, and how far each of them goes.

Units are made of our own instances: pulls overlap with steps, and every pipeline stage has a micro-batch. Step times
are those that the paper's authors measured on A100s, KV capacities those that their engine found. As in the paper, a
run has a fixed number of requests per device, so it may end before an overload has shown in full; a figure here is the
mean over several such runs, which differ by their seed and are the same for every unit and rate.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from a100 import COPY_TOKEN_S, NO_LIMIT, PAGE, Copies, plan_of, vllm_instance
from conclusion import BenchFailed

from jdserve.core.plan import DecodeInstance, Plan, PrefillInstance
from jdserve.core.request import SLO
from jdserve.cost.a100 import A100Profile, a100_kv_tokens
from jdserve.cost.latency import Unmeasured
from jdserve.cost.models import model as known_model
from jdserve.cost.stepcost import NOTHING, Linear, StepCost
from jdserve.placement.candidates import degrees
from jdserve.sim.goodput import find_rate, slo_scale
from jdserve.sim.lengths import FromTrace
from jdserve.sim.result import SimResult
from jdserve.sim.simulate import simulate
from jdserve.sim.traces import Trace, load_trace
from jdserve.sim.workload import Source

FACTS = "paper_facts.json"

SEEDS = tuple(range(5))

PER_NODE = 8


class App(NamedTuple):
    """An application of Table 1.

    Attributes:
        name: of the row.
        model: which OPT.
        data: where the lengths come from.
        slo: with the 90 % of the paper.
        prefill, decode: (tp, pp) of Table 3.
        vllm: tensor parallelism of the baseline.
        requests: per run.
        rate_key, slo_key: curves of Figs 8 and 9.
        fixed: rate per device of the curve over SLO scale.
    """

    name: str
    model: str
    data: str
    slo: SLO
    prefill: tuple[int, int]
    decode: tuple[int, int]
    vllm: int
    requests: int
    rate_key: str
    slo_key: str
    fixed: float

    @property
    def devices(self) -> int:
        """Of the unit of Table 3."""
        return size(self.prefill) + size(self.decode)


APPS = (
    App("13b", "opt-13b", "sharegpt", SLO(0.25, 0.1), (2, 1), (1, 1), 1, 300, "fig8a_rate_13b", "fig8a_slo_13b", 1.5),
    App("66b", "opt-66b", "sharegpt", SLO(2.5, 0.15), (4, 1), (2, 2), 4, 200, "fig8b_rate_66b", "fig8b_slo_66b", 0.75),
    App(
        "175b",
        "opt-175b",
        "sharegpt",
        SLO(4.0, 0.2),
        (3, 3),
        (4, 3),
        8,
        525,
        "fig8c_rate_175b",
        "fig8c_slo_175b",
        0.125,
    ),
    App(
        "humaneval",
        "opt-66b",
        "humaneval",
        SLO(0.125, 0.2),
        (4, 1),
        (2, 2),
        4,
        400,
        "fig9a_rate_humaneval",
        "fig9a_slo_humaneval",
        0.875,
    ),
    App(
        "longbench",
        "opt-66b",
        "LongBench",
        SLO(15.0, 0.15),
        (4, 1),
        (2, 2),
        4,
        200,
        "fig9b_rate_longbench",
        "fig9b_slo_longbench",
        0.375,
    ),
)


def size(degree: tuple[int, int]) -> int:
    """Devices of an instance."""
    return degree[0] * degree[1]


def facts(data: Path) -> Mapping[str, Any]:
    """Figures and tables of the paper.

    Raises:
        BenchFailed: the file is not there.
    """
    file = data / FACTS
    if not file.is_file():
        raise BenchFailed(f"--data: there is no {FACTS} in {data}")
    return json.loads(file.read_bytes())


class Unit(NamedTuple):
    """What is provisioned together: one prefill and one decode instance, or one colocated instance.

    Attributes:
        model: which OPT.
        prefill, decode: degrees; the same twice where ``colocated``.
        colocated: vLLM as it was.
    """

    model: str
    prefill: tuple[int, int]
    decode: tuple[int, int]
    colocated: bool = False

    @property
    def devices(self) -> int:
        """In all."""
        return size(self.prefill) if self.colocated else size(self.prefill) + size(self.decode)

    @property
    def label(self) -> str:
        """For people."""
        if self.colocated:
            return f"vLLM tp{self.prefill[0]}"
        (tp, pp), (tp2, pp2) = self.prefill, self.decode
        return f"prefill tp{tp} pp{pp} + decode tp{tp2} pp{pp2}"


def run(unit: Unit, source: Source, rate: float, requests: int) -> SimResult:
    """One run of a unit."""
    work = source.at(rate, requests)
    tokens = a100_kv_tokens(unit.model)
    if unit.colocated:
        tp = unit.prefill[0]
        cost = A100Profile(unit.model, "vllm").cost("colocated", tp, 1)
        return simulate(plan_of(vllm_instance(unit.model, tp), model=unit.model), work, costs={"vllm": cost})
    times = A100Profile(unit.model)
    (tp, pp), (tp2, pp2) = unit.prefill, unit.decode
    plan = plan_of(
        PrefillInstance(
            name="prefill",
            tp=tp,
            pp=pp,
            pages=tokens[tp, pp] // PAGE,
            lm_tokens=2048,
            max_batch=128,
            prefix_cache=False,
            lease_s=1e9,
        ),
        DecodeInstance(name="decode", tp=tp2, pp=pp2, pages=tokens[tp2, pp2] // PAGE, max_num_seqs=1024),
        model=unit.model,
    )
    costs = {"prefill": times.cost("prefill", tp, pp), "decode": times.cost("decode", tp2, pp2)}
    share = known_model(unit.model).kv_bytes_per_token("float16") / known_model("opt-13b").kv_bytes_per_token("float16")
    return simulate(plan, work, costs=costs, network=Copies(COPY_TOKEN_S * share / max(tp2 * pp2, 1)))


def one_device(name: str) -> tuple[Plan, dict[str, StepCost]]:
    """OPT-13B on devices of their own: ``colocated``, ``prefill_only``, ``decode_only`` (prompts come prefilled), or
    ``2P1D``."""
    if name == "colocated":
        vllm = A100Profile("opt-13b", "vllm").cost("colocated", 1, 1)
        return plan_of(vllm_instance("opt-13b", 1)), {"vllm": vllm}
    times = A100Profile("opt-13b")
    pages = a100_kv_tokens("opt-13b")[1, 1] // PAGE
    prefill = PrefillInstance(name="prefill", pages=pages, lm_tokens=2048, max_batch=128, lease_s=1e9)
    cost: StepCost = times.cost("prefill", 1, 1)
    if name == "decode_only":
        prefill = msgspec.structs.replace(prefill, batching="kv_capacity", pages=NO_LIMIT // PAGE, max_batch=NO_LIMIT)
        cost = Linear(NOTHING)
    prefills = [msgspec.structs.replace(prefill, name=f"prefill{n}") for n in range(2 if name == "2P1D" else 1)]
    decode = DecodeInstance(name="decode", pages=pages, max_num_seqs=1024)
    costs = {one.name: cost for one in prefills} | {"decode": times.cost("decode", 1, 1)}
    return plan_of(*prefills, decode), costs


def lengths(app_data: str, paper: Mapping[str, Any]) -> Trace:
    """Prompt and answer lengths of an application; LongBench's are drawn from the histograms of Fig 7."""
    return _histogram(app_data, paper["fig7_hist"][app_data]) if app_data == "LongBench" else load_trace(app_data)


def _histogram(name: str, sides: Mapping[str, Any], count: int = 2000) -> Trace:
    source = random.Random(0)
    drawn: list[list[int]] = []
    for side in ("in", "out"):
        shape = sides[side]
        bins = source.choices(range(shape["n_bins"]), [max(mass, 0.0) for mass in shape["mass"]], k=count)
        drawn.append([max(1, round(shape["first_edge"] + (b + source.random()) * shape["bin_width"])) for b in bins])
    # OPT reads 2,048 tokens
    rows = [(i, o) for i, o in zip(*drawn, strict=True) if i + o <= 2048]
    return Trace(name=name, inputs=tuple(i for i, _ in rows), outputs=tuple(o for _, o in rows))


class Trial:
    """Runs of units on the requests of one application.

    Args:
        trace: lengths.
        slo: see there.
        requests: of a run.
        seeds: one run each.
    """

    def __init__(self, trace: Trace, slo: SLO, requests: int, seeds: tuple[int, ...] = SEEDS) -> None:
        self.slo = slo
        self._requests = requests
        self._sources = [Source(lengths=FromTrace(trace), seed=seed) for seed in seeds]
        self._runs: dict[tuple[Unit, float, int], SimResult] = {}

    def runs(self, unit: Unit, per_device: float, seeds: int | None = None) -> list[SimResult]:
        """Runs at a rate per device."""
        found: list[SimResult] = []
        for place, source in enumerate(self._sources[:seeds]):
            key = (unit, per_device, place)
            if key not in self._runs:
                self._runs[key] = run(unit, source, per_device * unit.devices, self._requests)
            found.append(self._runs[key])
        return found

    def attainment(self, unit: Unit, per_device: float, slo: SLO | None = None, seeds: int | None = None) -> float:
        """Percent of requests that meet the SLO at a rate per device."""
        met = [result.met(slo or self.slo) for result in self.runs(unit, per_device, seeds)]
        return float(100 * np.concatenate(met).mean())

    def slo_scale(self, unit: Unit, per_device: float) -> float:
        """The smallest factor of both SLOs with the attainment asked for, at a rate per device."""
        runs = self.runs(unit, per_device)
        return float(np.mean([slo_scale(result, self.slo, self.slo.attainment) for result in runs]))

    def goodput(self, unit: Unit, start: float, tolerance: float = 0.005, seeds: int | None = None) -> float:
        """Highest rate per device with the attainment asked for."""
        share = 100 * self.slo.attainment
        return find_rate(
            lambda rate: self.attainment(unit, rate, seeds=seeds) >= share, start, NO_LIMIT, tolerance
        ).rate


@cache
def _fits(model: str) -> tuple[tuple[int, int], ...]:
    spec, tokens, times = known_model(model), a100_kv_tokens(model), A100Profile(model)
    found: list[tuple[int, int]] = []
    for tp, pp in degrees(spec, PER_NODE, 4 * PER_NODE).pairs:
        try:
            times.cost("prefill", tp, pp)
        except Unmeasured:
            continue
        if tokens.get((tp, pp), 0) >= 2048:
            found.append((tp, pp))
    return tuple(found)


def units(model: str, most: int) -> Iterator[Unit]:
    """All units of Algorithm 2 with one instance of each phase on at most ``most`` devices."""
    for prefill in _fits(model):
        for decode in _fits(model):
            total = size(prefill) + size(decode)
            spans = (span for span in range(1, 5) if prefill[1] % span == 0 and decode[1] % span == 0)
            if total <= most and any(total // span <= PER_NODE for span in spans):
                yield Unit(model, prefill, decode)


def best(trial: Trial, candidates: list[Unit], provisioned: int, start: float) -> dict[Unit, float]:
    """Goodput of the best units in requests per second, each on ``provisioned`` devices of which it may idle some.

    All are measured in one run, then those within 12 % of the best one in all runs; units that cannot be among them are
    left out.
    """
    share = 100 * trial.slo.attainment
    rough: dict[Unit, float] = {}
    for unit in candidates:
        top = max(rough.values(), default=0.0)
        if not top or trial.attainment(unit, 0.88 * top / unit.devices, seeds=1) >= share:
            rough[unit] = unit.devices * trial.goodput(unit, (top or start) / unit.devices, 0.02, seeds=1)
    top = max(rough.values())
    close = {unit: rate for unit, rate in rough.items() if rate >= 0.88 * top}
    fine = {unit: unit.devices * trial.goodput(unit, rate / unit.devices) for unit, rate in close.items()}
    assert all(unit.devices <= provisioned for unit in fine)
    return dict(sorted(fine.items(), key=lambda item: -item[1]))
