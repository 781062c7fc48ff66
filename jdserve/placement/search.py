"""``search``: from a model, machines, a workload and an SLO to a plan, or to the reason why there is none.

DistServe's Algorithm 1 where KV may cross between nodes and Algorithm 2 where it may not; beside them, units with any
numbers of prefill and decode instances on one node, and colocated instances, so that "do not disaggregate" can win.
Every candidate is judged by the simulator, with the requests of the workload; the plan that comes out is simulated once
more as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from jdserve.core.plan import Plan, Prediction, role_of
from jdserve.core.request import SLO
from jdserve.core.spec import DType, ModelSpec
from jdserve.cost.cluster import Cluster
from jdserve.cost.latency import LatencyModel, linearised
from jdserve.cost.models import model as known_model
from jdserve.cost.network import Network
from jdserve.cost.roofline import RooflineModel
from jdserve.placement.affinity import affinity, overloaded, request_bytes
from jdserve.placement.candidates import Family, Part, Unit
from jdserve.placement.compose import Composed, compose
from jdserve.placement.families import Choice, Families, Progress, label
from jdserve.placement.job import Job, model_len, within
from jdserve.placement.layout import LinkLoad, link_loads
from jdserve.placement.result import Affinity, Entry, Nearest, SearchResult
from jdserve.placement.runner import Runner
from jdserve.sim.attainment import attainment
from jdserve.sim.goodput import slo_scale
from jdserve.sim.lengths import FromTrace
from jdserve.sim.result import SimResult
from jdserve.sim.traces import Trace, load_trace
from jdserve.sim.workload import Source

ROUGH = 0.05
"""Mean relative error of linear step times that is worth a warning."""

OPEN_STEP = 1024
"""A plan admits a multiple of this many open requests."""


def search(
    model: str | ModelSpec,
    cluster: Cluster | str | Path,
    workload: Source | Trace | str | Path,
    slo: SLO,
    *,
    rate: float | None = None,
    devices: int | None = None,
    latency: LatencyModel | None = None,
    affinity: Literal["auto", "high", "low"] = "auto",
    wide: bool = True,
    checkpoint: str | None = None,
    dtype: DType | None = None,
    max_model_len: int | None = None,
    page_size: int = 16,
    max_num_seqs: int = 256,
    kv_tokens: Mapping[tuple[int, int], int] | None = None,
    requests: int = 600,
    steady: bool = True,
    confirm: int = 4,
    tolerance: float = 0.02,
    seed: int = 0,
    workers: int | None = 1,
    exhaustive: bool = False,
    progress: Progress | None = None,
) -> SearchResult:
    """Find the placement with the highest goodput per device.

    With a ``rate`` the answer is the plan with the fewest devices that carries it; with ``devices`` alone the one that
    carries most on so many; with neither, one unit of the highest goodput per device. The same arguments give the same
    answer, whatever ``workers``.

    Args:
        model: name of the catalogue, path of a checkpoint, or a shape.
        cluster: the machines, or the JSON file that describes them.
        workload: the requests; a trace (or its name or file) gives lengths, with Poisson arrivals.
        slo: TTFT, TPOT and the share of requests that must meet both.
        rate: requests per second that the plan must carry; 0 gives the smallest plan.
        devices: most devices of the plan; by default those of the cluster.
        latency: step times; by default the roofline of the cluster's hardware.
        affinity: ``high`` lets KV cross between nodes, ``low`` does not, ``auto`` looks at the links.
        wide: search beyond Algorithms 1 and 2: mixed numbers of instances, and colocated ones.
        checkpoint: model as the plan shall name it, where it differs from ``model``.
        dtype: of weights, activations and KV; by default bfloat16, on CPU float32.
        max_model_len: longest request of the plan; by default that of the workload, rounded up.
        page_size: token positions per page.
        max_num_seqs: largest decode batch that is considered.
        kv_tokens: measured KV capacity by (tp, pp), instead of the memory model.
        requests: simulated per rate, at least.
        steady: simulate more at rates at which so many are over before an overload shows.
        confirm: the plan that is handed over is simulated with so many times the requests.
        tolerance: goodputs this close count as equal.
        seed: of lengths and arrivals of a trace.
        workers: processes; None takes one per core once the search is large. With more than one, a script must guard
            what it does by ``if __name__ == "__main__"``, since the processes load it too.
        exhaustive: measure every candidate instead of pruning; for reports and tests.
        progress: called with what is being searched, how many candidates are done, and of how many.

    Returns:
        The answer; a job that cannot be done is one (``feasible`` is False, with the reason and what comes nearest).

    Raises:
        InvalidPlan: the model or the cluster is not known, or refused.
        InvalidWorkload: the trace, a rate or another number breaks its bound.
    """
    spec = known_model(model) if isinstance(model, str) else model
    cluster = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
    name, source = _source(workload, seed)
    dtype = dtype or ("float32" if cluster.device.platform == "cpu" else "bfloat16")
    length = min(max_model_len or model_len(spec, source, requests), spec.context)
    source, left_out = within(source, length)
    warnings = (
        (f"{left_out:.2%} of the requests of {name} are longer than {length} tokens: left out",) if left_out else ()
    )
    job = Job(
        spec=spec,
        model=checkpoint or (model if isinstance(model, str) else spec.architecture),
        dtype=dtype,
        cluster=cluster,
        source=source,
        workload=name,
        slo=slo,
        latency=latency
        or RooflineModel(spec=spec, dtype=dtype, device=cluster.device, per_node=cluster.devices_per_node),
        rate=rate,
        devices=cluster.devices if devices is None else min(devices, cluster.devices),
        max_model_len=length,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        requests=requests,
        steady=steady,
        confirm=confirm,
        tolerance=tolerance,
        kv_tokens=kv_tokens,
    )
    with Runner(job, workers) as runner:
        return _Search(job, runner, devices, affinity, wide, exhaustive, progress, warnings).run()


def _source(workload: Source | Trace | str | Path, seed: int) -> tuple[str, Source]:
    if isinstance(workload, Source):
        lengths = workload.lengths
        return (lengths.trace.name if isinstance(lengths, FromTrace) else type(lengths).__name__.lower()), workload
    trace = workload if isinstance(workload, Trace) else load_trace(workload)
    return trace.name, Source(lengths=FromTrace(trace), seed=seed)


class _Search:
    """One search; see :func:`search`."""

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
            runs=self._runner.runs,
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
                again = _Search(
                    runner.tools.job, runner, job.devices, self._asked, self._wide, False, self._progress, ()
                )
                best, _ = again._choices(found)
                best = [again._confirmed(choice) for choice in best]
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
            runs=self._runner.runs,
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
