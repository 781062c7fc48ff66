"""Goodput: the highest rate at which enough requests meet the SLO.

The search brackets upward (or downward) by doubling until one rate passes and one fails, and then bisects. All rates,
and all plans that are compared, see the same requests with the same unit gaps, so that they differ by what is asked
and not by luck. A run ends as soon as its verdict is certain, which changes no answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from jdserve.core.errors import InvalidWorkload
from jdserve.core.plan import Plan
from jdserve.core.request import SLO
from jdserve.cost.stepcost import StepCost
from jdserve.sim.attainment import Attainment, attainment, needed, requests_for
from jdserve.sim.links import Network
from jdserve.sim.result import SimResult
from jdserve.sim.simulate import simulate
from jdserve.sim.verdict import Verdict
from jdserve.sim.workload import Source

SPAN = 20
"""A run lasts at least this many times the TTFT SLO: a queue that grows without end must have the time to show."""

DOUBLINGS = 40
"""Steps of the bracketing, each way, before the search gives up: a factor of 10^12."""


class Probe(NamedTuple):
    """One rate that was tried: whether it passed."""

    rate: float
    passed: bool


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found.

    Attributes:
        rate: highest rate that passed, in requests per second; 0 where not even requests that never meet pass.
        fails: lowest rate that failed; infinite where none was found.
        devices: devices of the plan.
        attainment: at ``rate``; at a vanishing rate where ``rate`` is 0.
        saturated: no rate up to the limit failed, so the goodput is at least ``rate``.
        probes: all rates that were tried, in order.
    """

    rate: float
    fails: float
    devices: int
    attainment: Attainment
    saturated: bool
    probes: tuple[Probe, ...]

    @property
    def per_device(self) -> float:
        """Requests per second and device."""
        return self.rate / self.devices

    @property
    def feasible(self) -> bool:
        """Some rate passes."""
        return self.rate > 0


def goodput(
    plan: Plan,
    source: Source,
    slo: SLO,
    *,
    costs: Mapping[str, StepCost] | None = None,
    network: Network | None = None,
    target: float | None = None,
    margin: float | None = None,
    requests: int | None = None,
    start: float = 1.0,
    limit: float = math.inf,
    tolerance: float = 0.01,
) -> Goodput:
    """Highest rate at which ``plan`` serves ``source`` with an attainment of ``target``.

    Args:
        plan: as for :func:`~jdserve.sim.simulate.simulate`.
        source: the requests.
        slo: what a request must meet.
        costs: as for simulate.
        network: as for simulate.
        target: attainment asked for; that of ``slo`` by default.
        margin: how well the attainment near the target is to be known (95 % interval); sets the number of requests.
            By default a fifth of the misses that the target allows.
        requests: number of requests instead.
        start: rate that is tried first.
        limit: no higher rate is tried.
        tolerance: the search ends when the rates around the goodput differ by this share.

    Raises:
        InvalidPlan: as for simulate.
        InvalidWorkload: a rate, ``requests`` or ``tolerance`` breaks its bound.
    """
    target = slo.attainment if target is None else target
    least = requests or requests_for(target, margin or max((1 - target) / 5, 0.001))
    _check(start, limit, tolerance, least)

    def run(rate: float, certain: bool) -> SimResult:
        count = max(least, 0 if requests else math.ceil(min(rate * SPAN * slo.ttft_s, 50 * least)))
        verdict = Verdict(slo, count - needed(target, count)) if certain else None
        return simulate(plan, source.at(rate, count), costs=costs, network=network, verdict=verdict)

    found = find_rate(lambda rate: _passes(run(rate, True), slo, target), start, limit, tolerance)
    shown = run(found.rate or _vanishing(start), False)
    return Goodput(
        rate=found.rate,
        fails=found.fails,
        devices=sum(instance.tp * instance.pp for instance in plan.instances),
        attainment=attainment(shown.met(slo).tolist()),
        saturated=found.saturated,
        probes=found.probes,
    )


class Found(NamedTuple):
    """Between which rates a search ended; see :class:`Goodput`."""

    rate: float
    fails: float
    saturated: bool
    probes: tuple[Probe, ...]


def find_rate(
    passes: Callable[[float], bool], start: float = 1.0, limit: float = math.inf, tolerance: float = 0.01
) -> Found:
    """The highest rate that passes, by bracketing and bisection.

    Args:
        passes: whether a rate does; once one fails, all higher ones should.
        start: as in :func:`goodput`.
        limit: as in :func:`goodput`.
        tolerance: as in :func:`goodput`.
    """
    probes: list[Probe] = []

    def ask(rate: float) -> bool:
        probes.append(Probe(rate, passes(rate)))
        return probes[-1].passed

    low, high = 0.0, math.inf
    rate = min(start, limit)
    if ask(rate):
        low = rate
        for _ in range(DOUBLINGS):
            if low >= limit:
                return Found(low, math.inf, True, tuple(probes))
            rate = min(2 * low, limit)
            if not ask(rate):
                high = rate
                break
            low = rate
        else:
            return Found(low, math.inf, True, tuple(probes))
    else:
        high = rate
        if not ask(_vanishing(rate)):
            return Found(0.0, probes[-1].rate, False, tuple(probes))
        low = probes[-1].rate
        while high > 2 * low:
            rate = high / 2
            if ask(rate):
                low = rate
                break
            high = rate
    while high - low > tolerance * low:
        rate = (low + high) / 2
        if ask(rate):
            low = rate
        else:
            high = rate
    return Found(low, high, False, tuple(probes))


def slo_scale(result: SimResult, slo: SLO, target: float | None = None) -> float:
    """The smallest factor for both bounds of ``slo`` at which the run still has an attainment of ``target``.

    No decision looks at the SLO, so one run tells the answer exactly: the factor that request needs which is the last
    one needed. Infinite where too few requests ended.
    """
    target = slo.attainment if target is None else target
    factors = np.sort(np.maximum(result.ttft_s() / slo.ttft_s, result.tpot_s() / slo.tpot_s))
    return float(factors[needed(target, len(factors)) - 1])


def scaled(slo: SLO, factor: float) -> SLO:
    """``slo`` with both bounds times ``factor``."""
    return SLO(slo.ttft_s * factor, slo.tpot_s * factor, slo.attainment)


def _passes(result: SimResult, slo: SLO, target: float) -> bool:
    return int(result.met(slo).sum()) >= needed(target, len(result))


def _vanishing(rate: float) -> float:
    """A rate so low that requests hardly meet."""
    return rate / 2**DOUBLINGS


def _check(start: float, limit: float, tolerance: float, requests: int) -> None:
    for name, value in (("start", start), ("limit", limit), ("tolerance", tolerance)):
        if not value > 0 or (name != "limit" and math.isinf(value)):
            raise InvalidWorkload(f"{name}: must be a number above 0, got {value}")
    if requests < 1:
        raise InvalidWorkload(f"requests: must be at least 1, got {requests}")
