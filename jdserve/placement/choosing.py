"""Choosing among the families of candidates, and the answer: a plan, or what comes nearest to one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np

from jdserve.core.plan import Plan, Prediction, role_of
from jdserve.cost.latency import linearised
from jdserve.cost.network import Network
from jdserve.placement.affinity import affinity, overloaded, request_bytes
from jdserve.placement.candidates import Family, Part, Unit
from jdserve.placement.compose import Composed, compose, label
from jdserve.placement.families import Choice, Families, Progress
from jdserve.placement.job import Job
from jdserve.placement.layout import LinkLoad, link_loads
from jdserve.placement.result import Affinity, Entry, Nearest, SearchResult
from jdserve.placement.runner import Runner
from jdserve.sim.attainment import attainment
from jdserve.sim.goodput import slo_scale
from jdserve.sim.result import SimResult

ROUGH = 0.05
"""Mean relative error of linear step times that is worth a warning."""

OPEN_STEP = 1024
"""A plan admits a multiple of this many open requests."""


class Search:
    """One search; see :func:`jdserve.placement.search.search`."""

    def __init__(
        self,
        job: Job,
        runner: Runner,
        devices: int | None,
        asked: Literal["auto", "high", "low"],
        wide: bool,
        exhaustive: bool,
        progress: Progress | None,
        warnings: tuple[str, ...],
    ) -> None:
        self._job = job
        self._runner = runner
        self._asked: Literal["auto", "high", "low"] = asked
        self._wide = wide
        self._exhaustive = exhaustive
        self._progress = progress
        self._warnings = warnings
        self._other_runs = 0
        most = devices if job.rate is None else None
        self._families = Families(job, runner, most, exhaustive, progress)

    def run(self) -> SearchResult:
        """The answer."""
        families = self._families
        found = affinity(self._job, self._asked)
        if not (families.fits["colocated"] and self._wide) and not (
            families.fits["prefill"] and families.fits["decode"]
        ):
            for family in self._kinds(found):
                families.skipped(family)
            return self._nothing(found, self._largest_reason(), None)
        choices, found = self._choices(found)
        if not choices:
            return self._infeasible(found)
        if not self._job.rate:
            choices = [self._confirmed(choice) for choice in choices]
        choices.sort(key=self._order)
        return self._answer(found, choices)

    def _kinds(self, found: Affinity) -> tuple[Family, ...]:
        first: tuple[Family, ...] = ("high",) if found.level == "high" else ("low",)
        return tuple(dict.fromkeys((*first, "low", "mixed", "colocated"))) if self._wide else first

    def _choices(self, found: Affinity) -> tuple[list[Choice], Affinity]:
        """The best plan of each family, and the affinity in the end."""
        families, choices = self._families, []
        high: Choice | None = None
        if found.level == "high":
            families.skipped("high")
            vetoes: list[Affinity] = []

            def veto(composed: Composed, rate: float) -> bool:
                low = overloaded(found, self._loads(composed, rate)) if self._asked == "auto" else None
                if low is not None:
                    vetoes.append(low)
                    families.log.append(_lost(composed, low.reason))
                return low is not None

            high = families.algorithm_1(self._wide, veto)
            found = vetoes[0] if vetoes else found
        families.reach = "host" if found.level == "low" else "any"
        if high is not None:
            choices.append(high)
        kinds = self._kinds(found)
        if kinds == ("high",) and high is None and self._asked == "auto":
            kinds = ("low",)
        for family in kinds:
            if family == "high":
                continue  # done above
            families.skipped(family)
            choice = families.best_unit(family)
            if choice is not None:
                choices.append(choice)
        return choices, found

    def _order(self, choice: Choice) -> tuple[float, float]:
        option = choice.option
        if self._job.rate:
            return option.devices, -option.attainment.share
        goodput = option.goodput or 0.0
        if self._job.rate is not None:
            return option.devices, -goodput
        return -goodput if self._families.whole else -goodput / option.devices, option.devices

    def _loads(self, composed: Composed, rate: float) -> tuple[LinkLoad, ...]:
        network = Network(self._job.cluster.device, self._job.link_share)
        return link_loads(composed.plan, network, rate, request_bytes(self._job))

    def _answer(self, found: Affinity, choices: list[Choice]) -> SearchResult:
        job, evaluator = self._job, self._runner.tools.evaluator
        option, composed = self._confirmed(choices[0]) if job.rate else choices[0]
        rate = option.rate
        shown = evaluator.run(composed, rate, times=job.confirm)
        plan = self._finished(composed.plan, shown, rate, option.goodput)
        loads = self._loads(composed, rate)
        workers = [sum(len(stage.devices) for stage in worker.stages) for worker in plan.workers]
        return SearchResult(
            feasible=True,
            reason=self._why(option.label, option.devices, rate),
            plan=plan,
            option=option,
            options=(option, *(choice.option for choice in choices[1:])),
            affinity=found,
            links=loads,
            largest_worker=max(workers) / sum(workers),
            nearest=None,
            log=tuple(self._families.log),
            warnings=self._warnings + self._notes(plan, shown, option.goodput),
            latency=job.latency.name,
            runs=self._runner.runs + self._other_runs,
        )

    def _confirmed(self, choice: Choice) -> Choice:
        """The goodput once more, of longer runs: what a search finds is the best of many, and so a little lucky."""
        job, evaluator, option = self._job, self._runner.tools.evaluator, choice.option
        start = evaluator.below(option.goodput or option.rate)
        step = evaluator.highest(choice.composed, "both", None, math.inf, start, job.confirm)
        goodput = 0.0 if step is None else evaluator.rate(step)
        if job.rate:  # the rate itself was confirmed before, if between two steps of the grid
            return choice._replace(option=msgspec.structs.replace(option, goodput=max(goodput, option.rate)))
        rate = goodput or evaluator.rate(evaluator.lowest)
        seen = evaluator.attainment(choice.composed, rate, job.confirm)
        option = msgspec.structs.replace(option, rate=rate, goodput=goodput, attainment=seen)
        return choice._replace(option=option)

    def _why(self, label: str, devices: int, rate: float) -> str:
        if self._job.rate:
            return f"{label}: {devices} devices carry {self._job.rate:.4g} req/s, no candidate does with fewer"
        if self._job.rate is not None:
            return f"{label}: the smallest plan, {devices} devices, for a rate of 0"
        if self._families.whole:
            return f"{label}: {rate:.4g} req/s, no candidate carries more on at most {self._job.devices} devices"
        return f"{label}: {rate:.4g} req/s on {devices} devices, no candidate has more per device"

    def _finished(self, plan: Plan, shown: SimResult, rate: float, goodput: float | None) -> Plan:
        """The plan with what it predicts, checked."""
        job = self._job
        seen = attainment(shown.met(job.slo).tolist())
        open_requests = _most_open(shown)
        plan = msgspec.structs.replace(
            plan,
            instances=tuple(
                msgspec.structs.replace(i, steptime=job.latency.steptime(role_of(i), i.tp, i.pp))
                for i in plan.instances
            ),
            max_open_requests=-(-2 * open_requests // OPEN_STEP) * OPEN_STEP,
            predicted=Prediction(
                workload=job.workload,
                rate=rate,
                attainment=seen.share,
                low=seen.low,
                high=seen.high,
                goodput=goodput,
            ),
        )
        plan.check(job.spec)
        return plan

    def _notes(self, plan: Plan, shown: SimResult, goodput: float | None) -> tuple[str, ...]:
        job, notes = self._job, list[str]()
        if (
            goodput is not None
            and self._runner.tools.evaluator.below(goodput) >= self._runner.tools.evaluator.highest_step
        ):
            notes.append(f"saturated: no rate up to {goodput:.3g} req/s failed, so the goodput is at least that")
        preempted = sum(usage.preemptions for usage in shown.instances)
        worst = max(linearised(job.latency.cost(role_of(i), i.tp, i.pp), role_of(i)).error.mean for i in plan.instances)
        if worst > ROUGH:
            notes.append(
                f"the step times in the plan are linear: {worst:.0%} off on average from those it was made with"
            )
        if preempted:
            notes.append(f"{preempted} of {len(shown)} simulated requests were preempted: KV pages are short")
        if shown.rejected:
            notes.append(f"{len(shown.rejected)} of {len(shown)} simulated requests were refused")
        if len(plan.workers) == 1 and len(plan.instances) > 1:
            notes.append("all instances share one worker, so they fail together")
        return tuple(notes)

    # when there is no plan

    def _largest_reason(self) -> str:
        """Why not even the largest instances fit."""
        families = self._families
        reasons = [
            (tp * pp, why)
            for tp, pp in families.degrees.pairs
            for role in ("prefill", "decode")
            if isinstance(why := self._runner.tools.sizer.size(Part(role, tp, pp)), str)
        ]
        size, why = max(reasons, default=(0, "no degrees divide the model"), key=lambda one: one[0])
        return f"the model fits on no instance; the largest one, of {size} devices, {why}"

    def _infeasible(self, found: Affinity) -> SearchResult:
        job = self._job
        if job.rate:
            # what all the machines would carry
            with Runner(replace(job, rate=None), 1) as runner:
                again = Search(
                    runner.tools.job, runner, job.devices, self._asked, self._wide, False, self._progress, ()
                )
                best, _ = again._choices(found)
                best = [again._confirmed(choice) for choice in best]
                self._other_runs = runner.runs
            self._families.log += again._families.log
            if best:
                best.sort(key=again._order)
                option = best[0].option
                if (option.goodput or 0.0) >= job.rate:
                    # more than the fewest devices after all: what was smaller failed the longer run
                    seen = self._runner.tools.evaluator.attainment(best[0].composed, job.rate, job.confirm)
                    option = msgspec.structs.replace(option, rate=job.rate, before=seen, attainment=seen)
                    return self._answer(found, [best[0]._replace(option=option)])
                nearest = self._nearest_of(best[0].composed, job.rate, option.goodput)
                why = (
                    f"{job.rate:.4g} req/s needs more than {job.devices} devices: the best plan for them,"
                    f" {option.label}, carries {option.goodput:.4g} req/s"
                )
                return self._nothing(found, why, nearest)
        unit = self._most_alone()
        if unit is None:
            return self._nothing(found, "no unit of prefill and decode instances fits: " + self._room_reason(), None)
        if self._families.bounds.alone(unit).share >= job.slo.attainment:
            lost = [entry for entry in self._families.log if entry.devices or "composed" in entry.label]
            last = f"the last one tried, {lost[-1].label}: {lost[-1].reason}"
            why = f"no plan of at most {job.devices} devices was found; {last}"
            return self._nothing(found, why, None)
        composed = compose(job, self._runner.tools.sizer, [unit], "any")
        nearest = self._nearest_of(
            composed, self._runner.tools.evaluator.rate(self._runner.tools.evaluator.lowest), None
        )
        slo = job.slo
        why = (
            f"no configuration meets the SLO at any rate: the nearest, {unit.label}, has a median TTFT of"
            f" {nearest.ttft_s:.3g} s (SLO {slo.ttft_s:.3g}) and a median TPOT of {nearest.tpot_s:.3g} s (SLO"
            f" {slo.tpot_s:.3g}) without any load, where {nearest.attainment.share:.1%} of the requests meet both and"
            f" {slo.attainment:.0%} should"
        )
        if nearest.slo_scale is not None:
            why += f"; it would with both latencies {nearest.slo_scale:.3g} times as long"
        return self._nothing(found, why, nearest)

    def _room_reason(self) -> str:
        cluster = self._job.cluster
        return (
            f"there are {cluster.nodes} nodes of {cluster.devices_per_node} devices, at most {self._job.devices} in all"
        )

    def _most_alone(self) -> Unit | None:
        """The unit on which most requests meet the SLO when each is alone, the fastest of equal ones."""
        families, slo = self._families, self._job.slo
        best: tuple[tuple[float, float], Unit] | None = None
        for family in ("low", "colocated") if self._wide else ("low",):
            for unit in families.units(family):
                alone = families.bounds.alone(unit)
                key = (alone.share, -max(alone.ttft_s / slo.ttft_s, alone.tpot_s / slo.tpot_s))
                if best is None or key > best[0]:
                    best = key, unit
        return None if best is None else best[1]

    def _nearest_of(self, composed: Composed, rate: float, goodput: float | None) -> Nearest:
        job, evaluator = self._job, self._runner.tools.evaluator
        lone = evaluator.run(composed, evaluator.rate(evaluator.lowest))
        shown = evaluator.run(composed, rate)
        scale = slo_scale(shown, job.slo)
        return Nearest(
            label=" + ".join(f"{i.name} tp{i.tp} pp{i.pp}" for i in composed.plan.instances),
            devices=composed.devices,
            rate=rate,
            attainment=attainment(shown.met(job.slo).tolist()),
            ttft_s=float(np.median(lone.ttft_s())),
            tpot_s=float(np.median(lone.tpot_s())),
            slo_scale=scale if math.isfinite(scale) else None,
            goodput=goodput,
        )

    def _nothing(self, found: Affinity, why: str, nearest: Nearest | None) -> SearchResult:
        return SearchResult(
            feasible=False,
            reason=why,
            plan=None,
            option=None,
            options=(),
            affinity=found,
            links=(),
            largest_worker=None,
            nearest=nearest,
            log=tuple(self._families.log),
            warnings=self._warnings,
            latency=self._job.latency.name,
            runs=self._runner.runs + self._other_runs,
        )


def _lost(composed: Composed, why: str) -> Entry:
    return Entry(family="high", label=label(composed), devices=composed.devices, verdict="lost", reason=why)


def _most_open(result: SimResult) -> int:
    """Most requests that were open at a time."""
    moments = sorted([(at, 1) for at in result.arrivals] + [(end, -1) for end in result.ends if end >= 0])
    most = count = 0
    for _, change in moments:
        count += change
        most = max(most, count)
    return most
