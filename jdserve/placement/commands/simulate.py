"""``jdserve simulate``: a plan under a workload."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from jdserve.core import jsonio
from jdserve.core.errors import InvalidWorkload
from jdserve.core.plan import Plan, role_of
from jdserve.core.request import SLO
from jdserve.cost.models import MODELS
from jdserve.cost.models import model as known_model
from jdserve.cost.network import Network
from jdserve.placement.commands.hardware import columns
from jdserve.placement.commands.inputs import (
    EXIT_CODES,
    FOUND,
    Machines,
    add_machines,
    add_slo,
    add_workload,
    number,
    slo_of,
    source_of,
    told,
    whole,
    writable,
)
from jdserve.sim.attainment import Attainment, attainment
from jdserve.sim.links import Wired
from jdserve.sim.result import Floats, SimResult, Usage
from jdserve.sim.simulate import simulate

SHOWN = (50, 90, 99)


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles in seconds; None where some request never got so far."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Floats) -> Spread:
        """That of ``seconds``."""
        values = [float(np.mean(seconds)), *(float(np.percentile(seconds, p, method="inverted_cdf")) for p in SHOWN)]
        return cls(*(value if math.isfinite(value) else None for value in values))


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run.

    Attributes:
        requests: simulated.
        rate: of their arrivals, per second.
        seconds: simulated.
        slo: objective, where there is one.
        attainment: share of requests that meet it.
        ttft, tpot, latency: of all requests.
        rejected: requests that were refused.
        instances: what each one did.
        links: share of the time that each link carried KV.
    """

    requests: int
    rate: float
    seconds: float
    slo: SLO | None
    attainment: Attainment | None
    ttft: Spread
    tpot: Spread
    latency: Spread
    rejected: int
    instances: tuple[Usage, ...]
    links: dict[str, float]

    @classmethod
    def of(cls, result: SimResult, slo: SLO | None, rate: float) -> Summary:
        """That of ``result``."""
        seconds = result.duration / 1e15
        return cls(
            requests=len(result),
            rate=rate,
            seconds=seconds,
            slo=slo,
            attainment=None if slo is None else attainment(result.met(slo).tolist()),
            ttft=Spread.of(result.ttft_s()),
            tpot=Spread.of(result.tpot_s()),
            latency=Spread.of(result.latency_s()),
            rejected=len(result.rejected),
            instances=result.instances,
            links={link: busy / seconds for link, busy in sorted(result.links.items())} if seconds else {},
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.epilog = EXIT_CODES
    add = parser.add_argument
    add("--plan", required=True, type=Path, metavar="FILE", help="plan.json")
    add("--rate", type=number(0, above=True), required=True, metavar="R", help="requests per second")
    add("--requests", type=whole(1), default=2000, metavar="N", help="to simulate (default: %(default)s)")
    add("--model", help="name or checkpoint that --cluster's step times are for (default: that of the plan)")
    add("--json", type=Path, metavar="FILE", help="write the figures here")
    add_machines(parser, required=False, more=" (default: the step times in the plan, and KV that moves in no time)")
    add_workload(parser)
    add_slo(parser, required=False)


@told
def run(args: argparse.Namespace) -> int:
    """Simulate, and print the figures."""
    writable("--json", args.json)
    plan = Plan.load(args.plan)
    work = source_of(args).at(args.rate, args.requests)
    slo = slo_of(args, plan.slo)
    longest = max(i + o for i, o in zip(work.inputs, work.outputs, strict=True))
    costs = network = None
    if args.cluster is not None:
        name = args.model or plan.model
        spec = known_model(name)
        plan.check(spec)
        machines = Machines(args, name, spec, plan.dtype, plan.weights)
        missing = sorted({worker.host for worker in plan.workers} - set(machines.cluster.names))
        if missing:
            raise InvalidWorkload(f"--cluster: has no {', '.join(missing)}, where the plan has workers")
        costs = {i.name: machines.latency.cost(role_of(i), i.tp, i.pp) for i in plan.instances}
        network = Wired(plan, Network(machines.cluster.device), spec.kv_bytes_per_token(plan.dtype))
    elif args.model is not None:
        raise InvalidWorkload(f"--model: goes with --cluster; known models: {', '.join(MODELS)}")
    summary = Summary.of(simulate(plan, work, costs=costs, network=network), slo, args.rate)
    for line in _lines(summary):
        print(line)
    if longest > plan.max_model_len:
        print(f"note: the longest request has {longest} tokens, the plan admits {plan.max_model_len}")
    if args.json is not None:
        args.json.write_bytes(jsonio.encode(summary))
    return FOUND


def _lines(summary: Summary) -> Iterator[str]:
    yield f"{summary.requests} requests at {summary.rate:.4g} req/s, {summary.seconds:.1f} s"
    if summary.slo is not None and summary.attainment is not None:
        seen = summary.attainment
        yield (
            f"{seen.share:.2%} ({seen.low:.2%} to {seen.high:.2%}) meet TTFT {summary.slo.ttft_s:g} s and TPOT "
            f"{summary.slo.tpot_s:g} s"
        )
    spreads = {"TTFT": summary.ttft, "TPOT": summary.tpot, "end to end": summary.latency}
    rows = [(name, *(_ms(value) for value in msgspec.structs.astuple(spread))) for name, spread in spreads.items()]
    yield columns([("ms", "mean", "p50", "p90", "p99"), *rows])
    yield columns(
        [
            ("instance", "busy", "steps", "tokens", "preemptions"),
            *(
                (
                    one.name,
                    f"{sum(one.busy_s) / len(one.busy_s) / summary.seconds if summary.seconds else 0:.1%}",
                    f"{one.steps}",
                    f"{one.tokens}",
                    f"{one.preemptions}",
                )
                for one in summary.instances
            ),
        ]
    )
    if summary.links:
        link = max(summary.links, key=summary.links.__getitem__)
        yield f"busiest link: {link}, {summary.links[link]:.1%} of the time"
    if summary.rejected:
        yield f"note: {summary.rejected} requests were refused"


def _ms(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds * 1e3:.1f}"
