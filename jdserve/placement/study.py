"""What people want to know about an answer: curves, distributions, where the time goes, what gives way first.

Everything is simulated with the requests, the step times and the links of the search, so the curves go through its
figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from jdserve.core import jsonio
from jdserve.core.plan import Plan, role_of
from jdserve.core.request import SLO
from jdserve.cost.network import Network
from jdserve.placement.candidates import Family
from jdserve.placement.compose import OPEN_REQUESTS, Composed
from jdserve.placement.evaluate import Evaluator
from jdserve.placement.job import Job
from jdserve.placement.result import SearchResult
from jdserve.sim.attainment import attainment
from jdserve.sim.goodput import slo_scale
from jdserve.sim.links import Wired
from jdserve.sim.result import Floats, SimResult
from jdserve.sim.workload import FS

RATES = (0.3, 0.5, 0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.3, 1.5, 1.75, 2.0)
"""Rates of a curve, over the goodput."""

SCALES = tuple(round(0.2 + 0.05 * n, 2) for n in range(37))
"""Factors for both latencies of the SLO."""

PERCENTILES = (*(float(percent) for percent in range(1, 100)), 99.5, 99.9)

BEYOND = 1.15
"""What gives way first is looked for at this many times the goodput."""

Progress = Callable[[str, int, int], None]


class RatePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Attainment at a rate.

    Attributes:
        rate, per_device: requests per second, in all and per device.
        joint: share of requests that meet both latencies, between ``low`` and ``high`` with a confidence of 95 %.
        ttft, tpot: share that meets one of them.
    """

    rate: float
    per_device: float
    joint: float
    low: float
    high: float
    ttft: float
    tpot: float


class ScalePoint(msgspec.Struct, frozen=True):
    """Share of requests that meet both latencies of the SLO times ``scale``."""

    scale: float
    joint: float


class System(msgspec.Struct, frozen=True, kw_only=True):
    """The curves of a plan.

    Attributes:
        family: whose best it is.
        label: its instances.
        devices: in all.
        goodput: requests per second in all; None where it was not measured.
        by_rate: attainment against the rate.
        scale_rate: rate of ``by_scale``.
        by_scale: attainment against the SLO.
        tightest: smallest scale with the attainment that is asked for; None where there is none.
    """

    family: Family
    label: str
    devices: int
    goodput: float | None
    by_rate: tuple[RatePoint, ...]
    scale_rate: float
    by_scale: tuple[ScalePoint, ...]
    tightest: float | None


class Distribution(msgspec.Struct, frozen=True):
    """Percentiles of a latency in seconds; None for requests that never got so far."""

    percent: tuple[float, ...]
    seconds: tuple[float | None, ...]

    def at(self, percent: float) -> float | None:
        """Seconds that so many percent of the requests stay within; ``percent`` is one of those here."""
        return self.seconds[self.percent.index(percent)]


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Mean seconds of a request in each part of its life.

    Attributes:
        queue: from its arrival until its prefill starts.
        prefill: until its first token.
        wait: until a decode instance pulls its KV.
        transfer: until the KV has landed.
        decode: until its last token.
    """

    queue: float
    prefill: float
    wait: float
    transfer: float
    decode: float


class InstanceUse(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance does at the rate of the plan.

    Attributes:
        name, role, tp, pp: of the plan.
        busy: share of the time that its stages work.
        tokens_per_s: that it computes or generates.
        preemptions: sequences that lost their pages.
    """

    name: str
    role: str
    tp: int
    pp: int
    busy: float
    tokens_per_s: float
    preemptions: int


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """What gives way first when the rate grows.

    Attributes:
        what: the phase or the links.
        reason: in words.
        rate: at which it was looked at.
        miss_ttft, miss_tpot: share of requests that miss the latency there.
        busy: share of the time that the instances of each role work there, the busiest of them.
    """

    what: Literal["prefill", "decode", "colocated", "links"]
    reason: str
    rate: float
    miss_ttft: float
    miss_tpot: float
    busy: dict[str, float]


class Seat(msgspec.Struct, frozen=True):
    """A device of the cluster, and what it does; ``instance`` is empty for one that is free."""

    host: str
    device: int
    instance: str = ""
    role: str = ""
    stage: int = 0
    worker: str = ""


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """An answer with its pictures' figures.

    Attributes:
        model, dtype, hardware, nodes, devices_per_node: the job.
        workload: name of the requests.
        mean_input, mean_output: tokens.
        slo: what a request must meet.
        asked: rate that the plan must carry; None for the best per device.
        result: of the search.
        seats: every device.
        systems: curves of the best plan of each family, the winner first.
        rate: of what follows.
        ttft, tpot: of the winner.
        spent: of the winner.
        instances: of the winner.
        bottleneck: of the winner.
    """

    model: str
    dtype: str
    hardware: str
    nodes: int
    devices_per_node: int
    workload: str
    mean_input: float
    mean_output: float
    slo: SLO
    asked: float | None
    result: SearchResult
    seats: tuple[Seat, ...] = ()
    systems: tuple[System, ...] = ()
    rate: float = 0.0
    ttft: Distribution | None = None
    tpot: Distribution | None = None
    spent: Spent | None = None
    instances: tuple[InstanceUse, ...] = ()
    bottleneck: Bottleneck | None = None

    def to_json(self) -> bytes:
        """Everything as indented JSON."""
        return jsonio.encode(self)


def composed(job: Job, plan: Plan) -> Composed:
    """``plan`` with the step times and the links of ``job``; nobody is refused at its door."""
    costs = {i.name: job.latency.cost(role_of(i), i.tp, i.pp) for i in plan.instances}
    network = Wired(plan, Network(job.cluster.device, job.link_share), job.spec.kv_bytes_per_token(job.dtype))
    return Composed(msgspec.structs.replace(plan, max_open_requests=OPEN_REQUESTS), costs, network)


def study(job: Job, result: SearchResult, progress: Progress | None = None) -> Study:
    """Look closer at ``result``, the answer to ``job``.

    Args:
        job: its source is that of the search.
        result: with a plan or without.
        progress: called with what is being done, how many runs are over, and of how many.
    """
    cluster = job.cluster
    found = Study(
        model=job.model,
        dtype=job.dtype,
        hardware=cluster.device.name,
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        workload=job.workload,
        mean_input=job.sample.mean_input,
        mean_output=job.sample.mean_output,
        slo=job.slo,
        asked=job.rate,
        result=result,
        seats=_seats(job, result.plan),
    )
    if result.plan is None or result.option is None:
        return found
    return _Closer(job, result, result.plan, progress).add_to(found)


class _Closer:
    """The runs of a study."""

    def __init__(self, job: Job, result: SearchResult, plan: Plan, progress: Progress | None) -> None:
        assert result.option is not None
        self._job = job
        self._evaluator = Evaluator(job)
        self._option = result.option
        self._plan = plan
        self._best = composed(job, plan)
        self._others = [(o, o.plan) for o in result.options[1:]]
        self._progress = progress
        self._done, self._all = 0, (len(RATES) + 1) * (1 + len(self._others)) + 2

    def _run(self, what: Composed, rate: float) -> SimResult:
        """Of the winner as long as the runs that confirmed it."""
        result = self._evaluator.run(what, rate, times=self._job.confirm if what is self._best else 1)
        self._done += 1
        if self._progress is not None:
            self._progress("report", self._done, self._all)
        return result

    def add_to(self, found: Study) -> Study:
        """``found`` with everything that must be simulated."""
        option, job = self._option, self._job
        shown = self._run(self._best, option.rate)
        systems = [self._system(option.family, option.label, self._best, option.goodput, option.rate)]
        for other, plan in self._others:
            what = composed(job, plan)
            rate = job.rate or option.rate / option.devices * what.devices
            systems.append(self._system(other.family, other.label, what, other.goodput, rate))
        beyond = (option.goodput or option.rate) * BEYOND
        return msgspec.structs.replace(
            found,
            systems=tuple(systems),
            rate=option.rate,
            ttft=_distribution(shown.ttft_s()),
            tpot=_distribution(shown.tpot_s()),
            spent=_spent(shown),
            instances=_use(self._plan, shown),
            bottleneck=_bottleneck(job.slo, self._plan, self._run(self._best, beyond), beyond),
        )

    def _system(self, family: Family, label: str, what: Composed, goodput: float | None, rate: float) -> System:
        slo = self._job.slo
        # plans without a measured goodput are looked at around that of the winner, device for device
        base = goodput or (self._option.goodput or self._option.rate) / self._option.devices * what.devices
        points = [self._point(what, factor * base) for factor in RATES]
        shown = self._run(what, rate)
        factors = np.maximum(shown.ttft_s() / slo.ttft_s, shown.tpot_s() / slo.tpot_s)
        tightest = slo_scale(shown, slo)
        return System(
            family=family,
            label=label,
            devices=what.devices,
            goodput=goodput,
            by_rate=tuple(points),
            scale_rate=rate,
            by_scale=tuple(ScalePoint(scale, float(np.mean(factors <= scale))) for scale in SCALES),
            tightest=tightest if math.isfinite(tightest) else None,
        )

    def _point(self, what: Composed, rate: float) -> RatePoint:
        slo, run = self._job.slo, self._run(what, rate)
        joint = attainment(run.met(slo).tolist())
        return RatePoint(
            rate=rate,
            per_device=rate / what.devices,
            joint=joint.share,
            low=joint.low,
            high=joint.high,
            ttft=float(np.mean(run.ttft_s() <= slo.ttft_s)),
            tpot=float(np.mean(run.tpot_s() <= slo.tpot_s)),
        )


def _distribution(seconds: Floats) -> Distribution:
    values = np.percentile(seconds, PERCENTILES, method="inverted_cdf")
    return Distribution(PERCENTILES, tuple(float(v) if math.isfinite(v) else None for v in values))


def _spent(run: SimResult) -> Spent:
    """Over the requests that ended."""
    arrivals, started, first, ends = (
        np.array(c, dtype=float) for c in (run.arrivals, run.started, run.first, run.ends)
    )
    pulled, landed = np.array(run.pulled, dtype=float), np.array(run.landed, dtype=float)
    # what was not pulled goes on where it is
    landed = np.where(landed >= 0, landed, first)
    pulled = np.where(pulled >= 0, pulled, landed)
    ended = ends >= 0
    parts = (started - arrivals, first - started, pulled - first, landed - pulled, ends - landed)
    means = [float(np.mean(part[ended])) / FS if ended.any() else 0.0 for part in parts]
    return Spent(queue=means[0], prefill=means[1], wait=means[2], transfer=means[3], decode=means[4])


def _use(plan: Plan, run: SimResult) -> tuple[InstanceUse, ...]:
    seconds = run.duration / FS
    return tuple(
        InstanceUse(
            name=one.name,
            role=role_of(one),
            tp=one.tp,
            pp=one.pp,
            busy=sum(used.busy_s) / one.pp / seconds,
            tokens_per_s=used.tokens / seconds,
            preemptions=used.preemptions,
        )
        for one, used in zip(plan.instances, run.instances, strict=True)
    )


def _bottleneck(slo: SLO, plan: Plan, run: SimResult, rate: float) -> Bottleneck:
    late, slow = run.ttft_s() > slo.ttft_s, run.tpot_s() > slo.tpot_s
    busy: dict[str, float] = {}
    for one in _use(plan, run):
        busy[one.role] = max(busy.get(one.role, 0.0), one.busy)
    carried = max(run.links.values(), default=0.0) / (run.duration / FS)
    misses = f"at {rate:.3g} req/s {np.mean(late):.1%} of the requests miss the TTFT and {np.mean(slow):.1%} the TPOT"
    worked = ", ".join(f"{role} {share:.0%}" for role, share in busy.items())
    if "colocated" in busy:
        which: Literal["prefill", "decode", "colocated", "links"] = "colocated"
        told = "prompts and answers share the instances" + (
            ", prompts wait first" if late.sum() >= slow.sum() else ", answers slow down first"
        )
    elif carried > 0.8 and slow.sum() >= late.sum():
        which, told = "links", f"the busiest link carries KV {carried:.0%} of the time"
    elif late.sum() >= slow.sum():
        which, told = "prefill", "prompts wait for prefill first"
    else:
        which, told = "decode", "decode slows down first"
    return Bottleneck(
        what=which,
        reason=f"{told}: {misses}; busy: {worked}",
        rate=rate,
        miss_ttft=float(np.mean(late)),
        miss_tpot=float(np.mean(slow)),
        busy=busy,
    )


def _seats(job: Job, plan: Plan | None) -> tuple[Seat, ...]:
    taken: dict[tuple[str, int], Seat] = {}
    if plan is not None:
        for worker in plan.workers:
            for part in worker.stages:
                role = role_of(plan.instance(part.instance))
                for device in part.devices:
                    taken[worker.host, device] = Seat(worker.host, device, part.instance, role, part.stage, worker.name)
    return tuple(
        taken.get((host, device), Seat(host, device))
        for host in job.cluster.names
        for device in range(job.cluster.devices_per_node)
    )
