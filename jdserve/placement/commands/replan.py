"""``jdserve replan``: what recent requests would change in a plan. Nothing that runs is touched."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from jdserve.core.errors import InvalidWorkload
from jdserve.core.plan import ColocatedInstance, Instance, Plan, role_of
from jdserve.cost.models import model as known_model
from jdserve.placement.commands.inputs import (
    EXIT_CODES,
    FOUND,
    INFEASIBLE,
    add_machines,
    add_search,
    add_slo,
    number,
    slo_of,
    told,
    writable,
)
from jdserve.placement.commands.plan import bar, job_of, searched
from jdserve.placement.evaluate import Evaluator
from jdserve.placement.job import Job
from jdserve.placement.result import SearchResult
from jdserve.placement.study import composed
from jdserve.policy.replan import NS, Answer, Arrival, Clock, Replan, ReplanTrigger, Traffic, TriggerConfig
from jdserve.sim.attainment import Attainment
from jdserve.sim.lengths import FromTrace
from jdserve.sim.traces import Trace, load_trace
from jdserve.sim.workload import Source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    above = number(0, above=True)
    add(
        "--from-log",
        required=True,
        type=Path,
        metavar="FILE",
        help="requests as they came: .jsonl or .csv with arrival_s, input_len, output_len",
    )
    add("--plan", required=True, type=Path, metavar="FILE", help="the present plan.json")
    add("--model", help="name or checkpoint that step times are for (default: that of the plan)")
    add("--window", type=above, default=300.0, metavar="SECONDS", help="of the trigger (default: %(default)s)")
    add("--last", type=above, metavar="SECONDS", help="history to plan for (default: since the last shift)")
    add("--until", type=number(0), metavar="SECONDS", help="end of the log, on its clock (default: its last request)")
    add("--rate", type=number(0), metavar="R", help="requests per second to carry (default: see below)")
    parser.epilog = (
        "The rate to carry is that of the history and two standard errors more, so that a smaller plan is not\n"
        f"too small the moment it is there.\n\n{EXIT_CODES}"
    )
    add_machines(parser)
    add_slo(parser, required=False)
    add_search(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the new plan here")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


class History(NamedTuple):
    """The requests to plan for.

    Attributes:
        trace: their lengths and gaps; of the whole log where there was no request.
        traffic: what they are like.
        shifts: of the whole log, with the seconds at which they were noticed.
        seconds: how long it is.
    """

    trace: Trace
    traffic: Traffic
    shifts: tuple[tuple[float, Replan], ...]
    seconds: float


def history(log: Trace, window_s: float, last_s: float | None = None, until_s: float | None = None) -> History:
    """The recent part of a log.

    Args:
        log: with arrivals.
        window_s: of the trigger.
        last_s: seconds that count as recent; by default since the last shift, else all.
        until_s: end of the log, on its own clock; by default its last request.

    Raises:
        InvalidWorkload: the log has no arrivals, takes no time, or ends after ``until_s``.
    """
    if log.arrivals_s is None:
        raise InvalidWorkload(f"{log.name}: needs arrival_s, to tell the rate")
    start, end = log.arrivals_s[0], log.arrivals_s[-1] if until_s is None else until_s
    if end < log.arrivals_s[-1] or end <= start:
        raise InvalidWorkload(f"{log.name}: must take some time: begins at {start:g} s and ends at {end:g} s")
    shifts = _replay(ReplanTrigger(TriggerConfig(window_s=window_s)), log, start, end)
    since = shifts[-1][0] - window_s if shifts else start
    since = max(start, since if last_s is None else end - last_s)
    first = next((n for n, at in enumerate(log.arrivals_s) if at >= since), len(log))
    recent = _part(log, first) if first < len(log) else log
    traffic = Traffic(seconds=end - since)
    if first < len(log):
        whole = ReplanTrigger(TriggerConfig(window_s=end - since))
        _replay(whole, recent, since, end)
        traffic = whole.traffic
    return History(recent, traffic, shifts, end - since)


def _replay(trigger: ReplanTrigger, log: Trace, start: float, end: float) -> tuple[tuple[float, Replan], ...]:
    """Feed ``log`` to ``trigger``; the last moment belongs to the last window."""
    assert log.arrivals_s is not None
    fired: list[tuple[float, Replan]] = []
    last = round((end - start) * NS)
    for at, size, answer in zip(log.arrivals_s, log.inputs, log.outputs, strict=True):
        now = min(round((at - start) * NS), last - 1)
        for event in (Arrival(size), Answer(answer)):
            fired += [(start + now / NS, command) for command in trigger.handle(event, now)]
    fired += [(end, command) for command in trigger.handle(Clock(), last)]
    return tuple(fired)


def _part(log: Trace, first: int) -> Trace:
    assert log.arrivals_s is not None
    return msgspec.structs.replace(
        log,
        inputs=log.inputs[first:],
        outputs=log.outputs[first:],
        arrivals_s=log.arrivals_s[first:],
        blocks=log.blocks[first:],
    )


@told
def run(args: argparse.Namespace) -> int:
    """Search again for the recent requests, and print what would change."""
    writable("--output", args.output)
    present = Plan.load(args.plan)
    slo = slo_of(args, present.slo)
    if slo is None:
        raise InvalidWorkload("--ttft and --tpot: the plan has no objective, so they must be given")
    log = load_trace(args.from_log)
    found = history(log, args.window, args.last, args.until)
    for line in _about(log, found):
        print(line)
    rate = found.traffic.rate_high if args.rate is None else args.rate
    name = args.model or present.model
    present.check(known_model(name))
    source = _source(found.trace)
    job = job_of(args, name, source, slo, rate, present.dtype, weights=present.weights)
    with bar(args.quiet) as progress:
        result = searched(args, job, source, progress, present.model)
    for line in changes(job, present, result):
        print(line)
    if result.plan is None:
        return INFEASIBLE
    if args.output is not None:
        args.output.write_bytes(result.plan.to_json())
        print(f"plan: {args.output}")
    return FOUND


def _source(trace: Trace) -> Source:
    """Requests like those of the history, with its gaps where they have a rate."""
    assert trace.arrivals_s is not None
    timed = trace.arrivals_s[-1] > trace.arrivals_s[0]
    return Source(lengths=FromTrace(trace), process="trace" if timed else "poisson", trace=trace if timed else None)


def _about(log: Trace, found: History) -> Iterator[str]:
    yield f"{log.name}: {len(log)} requests"
    for at, command in found.shifts:
        told = ", ".join(f"{s.quantity} {s.before:.4g} -> {s.after:.4g}" for s in command.shifts)
        yield f"  shift noticed at {at:.0f} s: {told}"
    if not found.shifts:
        yield "  no significant shift"
    now = found.traffic
    yield (
        f"history: the last {found.seconds:.0f} s, {now.rate:.4g} req/s (at most {now.rate_high:.4g}), "
        f"{now.input.value:.0f} tokens in and {now.output.value:.0f} out on average"
    )


def changes(job: Job, present: Plan, result: SearchResult) -> Iterator[str]:
    """What ``result`` would change in the present plan, for people."""
    slo, rate = job.slo, job.rate or 0.0
    seen = attained(job, present, rate)
    holds = seen is None or seen.share >= slo.attainment
    yield f"present: {_told(present)}{_share(seen, rate)}"
    if result.plan is None or result.option is None:
        yield f"infeasible: {result.reason}"
        return
    if holds and _devices(result.plan) >= _devices(present):
        yield "keep it: it meets the objective, and no plan has fewer devices"
        return
    yield f"new:     {_told(result.plan)}{_share(result.option.attainment if rate else None, rate)}"
    before, after = _kinds(present), _kinds(result.plan)
    for kind in sorted(before | after):
        more = after[kind] - before[kind]
        if more:
            yield f"  {'+' if more > 0 else '-'} {abs(more)} x {kind}"
    for warning in result.warnings:
        yield f"note: {warning}"


def attained(job: Job, plan: Plan, rate: float) -> Attainment | None:
    """Attainment of ``plan`` under the requests of ``job``; None without any."""
    return Evaluator(job).attainment(composed(job, plan), rate, job.confirm) if rate else None


def _share(seen: Attainment | None, rate: float) -> str:
    return "" if seen is None else f": {seen.share:.1%} ({seen.low:.1%} to {seen.high:.1%}) at {rate:.4g} req/s"


def _told(plan: Plan) -> str:
    kinds = ", ".join(f"{count} x {kind}" for kind, count in _kinds(plan).items())
    return f"{_devices(plan)} devices: {kinds}"


def _devices(plan: Plan) -> int:
    return sum(instance.tp * instance.pp for instance in plan.instances)


def _kinds(plan: Plan) -> Counter[str]:
    return Counter(f"{_role(one)} tp{one.tp} pp{one.pp}" for one in plan.instances)


def _role(instance: Instance) -> str:
    how = f" {instance.mode} {instance.token_budget}" if isinstance(instance, ColocatedInstance) else ""
    return role_of(instance) + how
