"""Simulated answers about a plan: does it pass at a rate, and how far does it go.

Rates lie on a geometric grid, so that a goodput does not depend on where its search began: candidates that are compared
closely, and those that are only asked whether they beat the best so far, give the same answers. Every run of the same
number of requests has the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from jdserve.core.request import SLO
from jdserve.placement.compose import Composed
from jdserve.placement.job import Job, Scope
from jdserve.sim.attainment import Attainment, attainment, needed
from jdserve.sim.result import SimResult
from jdserve.sim.simulate import simulate
from jdserve.sim.verdict import Verdict

LOWEST, FASTEST = 1e-6, 1e9
"""Requests per second below which a plan is said to carry none, and above which no rate is tried."""


STRIDE = 8
"""First stride of a search for a goodput, in grid steps."""


class Evaluator:
    """Runs plans for a job.

    Attributes:
        runs: simulations so far.

    Args:
        job: see there.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._base = 1 + job.tolerance
        self.runs = 0

    # the grid

    def rate(self, step: int) -> float:
        """The rate of a grid step, in requests per second."""
        return self._base**step

    @property
    def lowest(self) -> int:
        """The lowest step."""
        return self.below(LOWEST)

    @property
    def highest_step(self) -> int:
        """No step above this one is tried."""
        return self.below(FASTEST)

    def below(self, rate: float) -> int:
        """The highest grid step whose rate is at most ``rate``."""
        step = math.floor(math.log(rate) / math.log(self._base))
        return step + (self.rate(step + 1) <= rate) - (self.rate(step) > rate)

    # runs

    def run(
        self, what: Composed, rate: float, scope: Scope = "both", *, certain: bool = False, times: int = 1
    ) -> SimResult:
        """Simulate ``what`` at ``rate``.

        Args:
            what: the plan.
            rate: requests per second.
            scope: of a single phase only its own latency counts.
            certain: stop when it is certain whether enough requests meet the SLO.
            times: so many times the requests.
        """
        job = self._job
        count = job.count(rate, scope) * times
        work = job.source.at(rate, count)
        if scope == "prefill":
            work = msgspec.structs.replace(work, outputs=(1,) * len(work))
        elif scope == "decode":
            work = msgspec.structs.replace(work, blocks=())  # nobody computes these prompts
        spare = count - needed(job.slo.attainment, count)
        verdict = Verdict(self.slo(scope), spare) if certain else None
        self.runs += 1
        return simulate(what.plan, work, costs=what.costs, network=what.network, verdict=verdict)

    def slo(self, scope: Scope) -> SLO:
        """What counts in ``scope``."""
        slo = self._job.slo
        if scope == "prefill":
            return SLO(slo.ttft_s, 1e9, slo.attainment)
        return SLO(1e9, slo.tpot_s, slo.attainment) if scope == "decode" else slo

    def passes(self, what: Composed, rate: float, scope: Scope = "both", times: int = 1) -> bool:
        """Whether enough requests meet the SLO at ``rate``."""
        result = self.run(what, rate, scope, certain=True, times=times)
        return int(result.met(self.slo(scope)).sum()) >= needed(self._job.slo.attainment, len(result))

    def attainment(self, what: Composed, rate: float, times: int = 1) -> Attainment:
        """Joint attainment at ``rate``, with its interval."""
        return attainment(self.run(what, rate, times=times).met(self._job.slo).tolist())

    def highest(
        self, what: Composed, scope: Scope, low: int | None, limit: float, start: int | None = None, times: int = 1
    ) -> int | None:
        """The highest grid step at which ``what`` passes, None where it passes at none.

        Args:
            what: the plan.
            scope: as for :meth:`run`.
            low: a step that is known to pass.
            limit: a rate that cannot pass; infinite where none is known.
            start: a step to begin with, where none is known to pass.
            times: as for :meth:`run`.
        """
        return highest(
            lambda step: self.passes(what, self.rate(step), scope, times),
            low,
            min(self.below(min(limit, FASTEST)), self.highest_step) + 1,
            self.lowest,
            start,
        )


def highest(
    passes: Callable[[int], bool], low: int | None, high: int, least: int, start: int | None = None
) -> int | None:
    """The highest integer that passes, when all below it pass too; None where ``least`` does not.

    Args:
        passes: whether an integer does.
        low: one that is known to pass.
        high: one that is known to fail, or that is not to be tried.
        least: smaller ones are not tried.
        start: one to begin with; by default a little below ``high``.
    """
    if low is None:
        guess = max(high - STRIDE if start is None else min(start, high - 1), least)
        stride = STRIDE
        while not passes(guess):
            if guess == least:
                return None
            high = guess
            guess = max(guess - stride, least)
            stride *= 2
        low = guess
    stride = STRIDE
    while low + stride < high:
        guess = low + stride
        if not passes(guess):
            high = guess
            break
        low = guess
        stride *= 2
    while high - low > 1:
        guess = (low + high) // 2
        low, high = (guess, high) if passes(guess) else (low, guess)
    return low
