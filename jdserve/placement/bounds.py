"""What no schedule can beat: bounds that prune candidates before anything is simulated.

Two kinds. *Alone*: a request that misses the SLO on an idle instance misses it always. *Capacity*: the requests that
meet the SLO need their device time before their deadlines; without any queueing, and at the best batching, it must fit
into the time that there is. Both hold for the very requests that are simulated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np

from jdserve.core.plan import ColocatedInstance, DecodeInstance, PrefillInstance
from jdserve.core.steptime import StepFeatures
from jdserve.cost.stepcost import FS, Coefficients, Linear, Phased, Roofline, StepCost, Switched
from jdserve.placement.candidates import Part, Unit
from jdserve.placement.evaluate import FASTEST, LOWEST
from jdserve.placement.job import Floats, Job, Scope
from jdserve.placement.sizing import Sized, Sizer
from jdserve.sim.attainment import needed

MARGIN = 1.02
"""Bounds are raised by this: sums over tokens are taken in closed form."""

DEADLINES = 12
"""Moments at which the capacity is checked."""

NEAR = 0.9
"""Share of its full rate that a decode instance is guessed to reach within the SLO."""


def floors(cost: StepCost) -> tuple[Coefficients, ...]:
    """Linear costs of one stage that no step of ``cost`` falls below; none where its kind is not known."""
    match cost:
        case Linear():
            return (cost.later,)
        case Roofline():
            return (cost.compute.plus(cost.other), cost.memory.plus(cost.other))
        case Switched():
            return tuple(_least(a, b) for a in floors(cost.below) for b in floors(cost.above))
        case Phased():
            # a mixed step costs no less than each of its phases would with the smaller coefficients
            prefill, decode, mixed = (floors(one) for one in (cost.prefill, cost.decode, cost.mixed))
            return tuple(
                Coefficients(
                    min(p.base, d.base, m.base),
                    min(p.new_token, m.new_token),
                    min(p.new_pair, m.new_pair),
                    min(p.prefix_pair, m.prefix_pair),
                    min(d.decode_seq, m.decode_seq),
                    min(d.context_token, m.context_token),
                )
                for p in prefill
                for d in decode
                for m in mixed
            )
        case _:
            return ()


def _least(a: Coefficients, b: Coefficients) -> Coefficients:
    return Coefficients(*(min(x, y) for x, y in zip(a, b, strict=True)))


def prefill_alone(job: Job, sized: Sized) -> Floats:
    """Seconds to prefill each prompt on an idle instance, with all in its cache that could be. Shape [requests]."""
    sample = job.sample
    pairs = zip(sample.inputs, sample.fresh, strict=True)
    return np.array([sum(sized.cost.stages(StepFeatures.of([(int(i - f), int(f))]))) for i, f in pairs]) / FS


def decode_alone(job: Job, sized: Sized) -> Floats:
    """Mean seconds per token after the first of each request on an idle instance. Shape [requests]."""
    sample, cost = job.sample, sized.cost
    pairs = zip(sample.inputs, sample.outputs, strict=True)
    return (
        np.array(
            [
                cost.run(StepFeatures(decode_seqs=1, decode_context=int(i) + 1), int(o) - 1) / (o - 1) if o > 1 else 0.0
                for i, o in pairs
            ]
        )
        / FS
    )


def prefill_work(job: Job, sized: Sized) -> Floats:
    """Least seconds of one stage that each prompt costs. Shape [requests]."""
    instance, sample = sized.instance, job.sample
    lm = instance.lm_tokens if isinstance(instance, PrefillInstance) else math.inf
    best = np.zeros(len(sample.fresh))
    cached = sample.inputs - sample.fresh
    for c in floors(sized.cost):
        marginal = c.new_token * sample.fresh + c.new_pair * sample.fresh**2 + c.prefix_pair * sample.fresh * cached
        # a step has at most L_m tokens, or one prompt
        best = np.maximum(best, np.maximum(marginal + c.base * np.minimum(1.0, sample.fresh / lm), 0.0))
    return best / FS


def decode_work(job: Job, sized: Sized) -> Floats:
    """Least seconds of one stage that the tokens after the first of each request cost. Shape [requests].

    The steps of requests that meet the TPOT are short on average. With step times a + x, where x is the sum of the
    marginal costs c of the sequences in it, W tokens in all, K steps and S the sum of sqrt(c) over tokens, the SLO asks
    that the sum of (sequences times step time) be at most TPOT W; it is at least a W + S^2 / K. So K >= S^2 / ((TPOT -
    a) W), which is at least 2 l S - l^2 W over (TPOT - a) for every l: linear in the requests. K is also at least W
    over the largest batch, and the tokens of context over the pages.
    """
    instance, sample, pp = sized.instance, job.sample, sized.instance.pp
    tokens = np.maximum(sample.outputs - 1, 0)
    most = instance.max_num_seqs if isinstance(instance, DecodeInstance | ColocatedInstance) else math.inf
    room = instance.pages * job.page_size
    best = np.zeros(len(tokens))
    for c in floors(sized.cost):
        base = pp * c.base
        first = pp * (c.decode_seq + c.context_token * (sample.inputs + 1))
        last = pp * (c.decode_seq + c.context_token * (sample.inputs + tokens))
        marginal = tokens * (first + last) / 2
        roots = tokens * (np.sqrt(first) + np.sqrt(last)) / 2
        slack = job.slo.tpot_s * FS * MARGIN - base
        steps = np.maximum(tokens / most, tokens * sample.inputs / room)
        if slack > 0 and tokens.sum():
            mean = roots.sum() / tokens.sum()
            steps = np.maximum(steps, (2 * mean * roots - mean**2 * tokens) / slack)
        elif slack <= 0:
            steps = np.where(tokens > 0, np.inf, steps)
        best = np.maximum(best, np.nan_to_num(steps * base, posinf=np.inf) + marginal)
    return best / pp / FS


class Phase(NamedTuple):
    """One phase on some instances, as far as their capacity goes.

    Attributes:
        work: least seconds that each request costs. Shape [requests].
        servers: instances.
        patience: seconds after its arrival by which a request that meets the SLO is through. Shape [requests].
        scope: what the runs are about that it bounds.
    """

    work: Floats
    servers: int
    patience: Floats
    scope: Scope = "both"


class Alone(NamedTuple):
    """Requests that never meet another one.

    Attributes:
        share: of them that meet the SLO.
        ttft_s, tpot_s: median.
    """

    share: float
    ttft_s: float
    tpot_s: float


class Bounds:
    """Bounds of the units of a job; each figure is taken once.

    Args:
        job: see there.
        sizer: of the job; every part asked about fits.
    """

    def __init__(self, job: Job, sizer: Sizer) -> None:
        self._job = job
        self._sizer = sizer
        self._times: dict[tuple[Part, str], Floats] = {}
        self._capacities: dict[tuple[Part, str, Scope], float] = {}
        self._guesses: dict[tuple[Part, str], float] = {}

    def alone(self, unit: Unit) -> Alone:
        """How requests fare alone on the instances of ``unit``."""
        slo = self._job.slo
        first, last = self._ends(unit)
        ttft, tpot = self._time(first, "prefill"), self._time(last, "decode")
        least = self._job.sample.least
        met = (ttft[:least] <= slo.ttft_s * MARGIN) & (tpot[:least] <= slo.tpot_s * MARGIN)
        return Alone(float(met.mean()), float(np.median(ttft)), float(np.median(tpot)))

    def capacity(self, unit: Unit) -> float:
        """A rate that ``unit`` cannot carry beyond; infinite where nothing bounds it."""
        first, last = self._ends(unit)
        return min(self._capacity(first, "prefill"), self._capacity(last, "decode"))

    def guess(self, unit: Unit) -> float:
        """About the goodput of ``unit``: good enough to begin with, and no bound."""
        first, last = self._ends(unit)
        prefill, decode = self._guess(first, "prefill"), self._guess(last, "decode")
        if unit.family != "colocated":
            return min(prefill, decode)
        return prefill * decode / (prefill + decode) if prefill + decode else 0.0

    def part_guess(self, part: Part) -> float:
        """As :meth:`guess`, of one phase."""
        return self._guess(part, "prefill" if part.role == "prefill" else "decode")

    def part_alone(self, part: Part) -> float:
        """Share of requests that meet the latency of the phase of ``part`` alone."""
        slo = self._job.slo
        kind, limit = ("prefill", slo.ttft_s) if part.role == "prefill" else ("decode", slo.tpot_s)
        return float((self._time(part, kind)[: self._job.sample.least] <= limit * MARGIN).mean())

    def part_capacity(self, part: Part) -> float:
        """As :meth:`capacity`, of one phase."""
        scope: Scope = "prefill" if part.role == "prefill" else "decode"
        return self._capacity(part, scope, scope)

    def _guess(self, part: Part, kind: str) -> float:
        if (part, kind) not in self._guesses:
            each = self._queue(part) if kind == "prefill" else self._full(part)
            self._guesses[part, kind] = min(self._capacity(part, kind), part.count * each)
        return self._guesses[part, kind]

    def _full(self, part: Part) -> float:
        """The rate of an instance whose decode batch is always as large as pages, limits and TPOT allow."""
        job, sized = self._job, self._sized(part)
        instance, sample = sized.instance, job.sample
        assert isinstance(instance, DecodeInstance | ColocatedInstance)
        fit = instance.pages * job.page_size / (sample.mean_input + sample.mean_output / 2)
        batch = max(min(fit, instance.max_num_seqs), 1.0)
        each = max(round(batch / instance.pp), 1)
        step = StepFeatures(decode_seqs=each, decode_context=round(each * sample.mean_context))
        return NEAR * batch * FS / (max(sample.mean_output - 1, 1.0) * max(sum(sized.cost.stages(step)), 1))

    def _queue(self, part: Part) -> float:
        """The rate at which enough prompts meet the TTFT in an M/G/1 queue of one prompt per batch."""
        slo, pp = self._job.slo, part.pp
        times = self._time(part, "prefill")
        slack = np.maximum(slo.ttft_s - times, 0.0)
        first, second = times.mean() / pp, (times**2).mean() / pp**2
        low, high = 0.0, 1 / first
        for _ in range(20):
            rate = (low + high) / 2
            load = rate * first
            wait = rate * second / 2 / (1 - load)
            # the wait of those that wait is taken as exponential
            met = np.where(slack > 0, 1 - load * np.exp(-slack * load / wait), 0.0).mean() if rate else 1.0
            low, high = (rate, high) if met >= slo.attainment else (low, rate)
        return float(low)

    def _ends(self, unit: Unit) -> tuple[Part, Part]:
        return unit.parts[0], unit.parts[-1]

    def _sized(self, part: Part) -> Sized:
        sized = self._sizer.size(part)
        assert isinstance(sized, Sized), sized
        return sized

    def _time(self, part: Part, kind: str) -> Floats:
        key = (msgspec.structs.replace(part, count=1), kind)
        if key not in self._times:
            measure = prefill_alone if kind == "prefill" else decode_alone
            self._times[key] = measure(self._job, self._sized(part))
        return self._times[key]

    def _capacity(self, part: Part, kind: str, scope: Scope = "both") -> float:
        key = (part, kind, scope)
        if key not in self._capacities:
            job, sized = self._job, self._sized(part)
            outputs = np.maximum(job.sample.outputs - 1, 0) if kind == "decode" else np.zeros(len(job.sample.outputs))
            work = prefill_work(job, sized) if kind == "prefill" else decode_work(job, sized)
            # where decode is alone, its requests do not wait for a first token
            wait = 0.0 if scope == "decode" else job.slo.ttft_s
            self._capacities[key] = capacity(job, Phase(work, part.count, wait + job.slo.tpot_s * outputs, scope))
        return self._capacities[key]


def capacity(job: Job, phase: Phase) -> float:
    """A rate that ``phase`` cannot carry beyond; infinite where nothing bounds it."""
    if _could(job, phase, FASTEST):
        return math.inf
    low, high = LOWEST, FASTEST
    if not _could(job, phase, low):
        return low
    while high > low * 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _could(job, phase, middle) else (low, middle)
    return high * MARGIN


def _could(job: Job, phase: Phase, rate: float) -> bool:
    """Whether the work that must be done by each of a few moments fits before it."""
    count = min(job.count(rate, phase.scope), len(phase.work))
    arrivals = job.sample.arrivals_s[:count] / rate
    due = arrivals + phase.patience[:count]
    spare = count - needed(job.slo.attainment, count)  # so many may miss: the ones that would cost most
    ordered = np.sort(due)
    for moment in ordered[np.linspace(count // DEADLINES, count - 1, DEADLINES).astype(int)]:
        work = np.sort(phase.work[:count][due <= moment])
        least = work[: max(len(work) - spare, 0)].sum()
        if not least <= phase.servers * (moment - arrivals[0]):
            return False
    return True
