"""Flags that the planner's subcommands share, and what they mean."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path

from jdserve.core.errors import InvalidWorkload, JdserveError
from jdserve.core.profile import Profile
from jdserve.core.request import SLO
from jdserve.core.spec import DType, ModelSpec, WeightFormat
from jdserve.cost.a100 import A100Profile, a100_kv_tokens
from jdserve.cost.cluster import Cluster
from jdserve.cost.fitted import FittedModel
from jdserve.cost.latency import LatencyModel
from jdserve.cost.roofline import RooflineModel
from jdserve.sim.lengths import FromTrace, Uniform
from jdserve.sim.traces import TRACES, Trace, load_trace
from jdserve.sim.workload import Source

FOUND, REFUSED, INFEASIBLE, INTERRUPTED = 0, 2, 3, 130

EXIT_CODES = """exit codes:
  0    done
  2    the input is refused, with one line on standard error
  3    the job cannot be done: the reason and what comes nearest are printed
  130  Ctrl-C"""

Run = Callable[[argparse.Namespace], int]


def told(run: Run) -> Run:
    """``run``, with errors as one line and an exit code."""

    @wraps(run)
    def wrapped(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except (JdserveError, OSError) as error:
            print(f"jdserve {args.command}: {error}", file=sys.stderr)
            return REFUSED
        except KeyboardInterrupt:
            return INTERRUPTED

    return wrapped


def number(least: float, *, above: bool = False, most: float = math.inf) -> Callable[[str], float]:
    """A parser of finite numbers of at least (or above) ``least``, and at most ``most``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least or (above and value == least) or value > most:
            bound = f"above {least:g}" if above else f"of at least {least:g}"
            bound += f" and at most {most:g}" if math.isfinite(most) else ""
            raise argparse.ArgumentTypeError(f"must be a finite number {bound}, got {text!r}")
        return value

    return parse


def whole(least: int) -> Callable[[str], int]:
    """A parser of whole numbers of at least ``least``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return value

    return parse


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Flags that say which requests come."""
    group = parser.add_argument_group("requests")
    add = group.add_argument
    add("--trace", metavar="NAME|FILE", help=f"lengths, from a file (.csv, .jsonl, .gz) or {', '.join(TRACES)}")
    add("--input-len", type=whole(1), metavar="TOKENS", help="tokens of every prompt, in place of --trace")
    add("--output-len", type=whole(0), metavar="TOKENS", help="tokens of every answer, in place of --trace")
    add(
        "--arrivals",
        choices=("poisson", "fixed", "gamma", "trace"),
        default="poisson",
        help="gaps: random, equal, in bursts (with --cv), or those of the trace (default: %(default)s)",
    )
    add("--cv", type=number(0, above=True), metavar="X", help="coefficient of variation of gamma gaps (default: 2)")
    add("--seed", type=whole(0), default=0, help="of lengths and arrivals (default: %(default)s)")


def source_of(args: argparse.Namespace) -> Source:
    """The requests that the flags of :func:`add_workload` describe.

    Raises:
        InvalidWorkload: the trace is refused, or flags do not go together.
    """
    trace: Trace | None = None
    if args.trace is not None:
        if args.input_len is not None or args.output_len is not None:
            raise InvalidWorkload("--trace: has the lengths, so --input-len and --output-len must not be given")
        trace = load_trace(args.trace)
        lengths = FromTrace(trace)
    elif args.input_len is None or args.output_len is None:
        raise InvalidWorkload("--trace, or --input-len and --output-len: one of them must be given")
    else:
        lengths = Uniform(args.input_len, args.output_len)
    if args.arrivals == "trace" and trace is None:
        raise InvalidWorkload("--arrivals trace: needs --trace")
    if args.cv is not None and args.arrivals != "gamma":
        raise InvalidWorkload("--cv: goes with --arrivals gamma")
    cv = 1.0 if args.arrivals != "gamma" else args.cv or 2.0
    return Source(lengths=lengths, process=args.arrivals, cv=cv, trace=trace, seed=args.seed)


def add_slo(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Flags of the latency objective."""
    group = parser.add_argument_group("latency objective")
    where = "" if required else " (default: that of the plan)"
    seconds = number(0, above=True)
    group.add_argument(
        "--ttft", type=seconds, required=required, metavar="SECONDS", help=f"bound on the time to first token{where}"
    )
    group.add_argument(
        "--tpot", type=seconds, required=required, metavar="SECONDS", help=f"bound on the time per later token{where}"
    )
    group.add_argument(
        "--attainment",
        type=number(0, above=True, most=1),
        metavar="SHARE",
        help=f"share of requests that must meet both{where or ' (default: 0.9)'}",
    )


def slo_of(args: argparse.Namespace, planned: SLO | None = None) -> SLO | None:
    """The objective of the flags, each by default that of a plan; None where a latency has no bound.

    Raises:
        InvalidWorkload: one latency has a bound and the other has none.
    """
    ttft = args.ttft if args.ttft is not None else planned and planned.ttft_s
    tpot = args.tpot if args.tpot is not None else planned and planned.tpot_s
    if ttft is None and tpot is None:
        return None
    if ttft is None or tpot is None:
        raise InvalidWorkload("--ttft and --tpot: go together")
    share = args.attainment if args.attainment is not None else planned.attainment if planned else 0.9
    return SLO(ttft, tpot, share)


def add_machines(parser: argparse.ArgumentParser, *, required: bool = True, more: str = "") -> None:
    """Flags of the cluster and of step times."""
    group = parser.add_argument_group("machines")
    group.add_argument(
        "--cluster", required=required, metavar="FILE|NAME", help=f"the machines, as JSON or by name{more}"
    )
    group.add_argument(
        "--latency",
        default="roofline",
        metavar="roofline|a100|FILE",
        help="step times: from the hardware's peaks, as measured for OPT models on A100-80G, or fitted to a profile "
        "(see `jdserve schema profile`) (default: %(default)s)",
    )


class Machines:
    """The cluster, and how long steps of a model take on it.

    Attributes:
        cluster, latency: see there.
        kv_tokens: measured KV capacities by (tp, pp), where there are some.

    Args:
        args: of :func:`add_machines`.
        model: name, for measurements.
        spec, dtype, weights: the model.

    Raises:
        InvalidPlan: a file is refused.
        Unmeasured: the model was not measured.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: str,
        spec: ModelSpec,
        dtype: DType | None,
        weights: WeightFormat | None = None,
    ) -> None:
        self.cluster = cluster = Cluster.load(args.cluster)
        self.dtype: DType = dtype or ("float32" if cluster.device.platform == "cpu" else "bfloat16")
        self.kv_tokens: Mapping[tuple[int, int], int] | None = None
        self.latency: LatencyModel
        if args.latency == "roofline":
            self.latency = RooflineModel(
                spec=spec,
                dtype=self.dtype,
                device=cluster.device,
                per_node=cluster.devices_per_node,
                weights=weights,
            )
        elif args.latency == "a100":
            self.latency, self.kv_tokens = A100Profile(model), a100_kv_tokens(model)
        else:
            profile = Profile.load(args.latency)
            if profile.model != spec:
                raise InvalidWorkload(f"--latency: {args.latency} was measured with another model than {model}")
            self.latency = FittedModel(profile)


def add_search(parser: argparse.ArgumentParser) -> None:
    """Flags that steer a search."""
    group = parser.add_argument_group("search")
    add = group.add_argument
    add("--devices", type=whole(1), metavar="N", help="most devices of the plan (default: those of the cluster)")
    add(
        "--affinity",
        choices=("auto", "high", "low"),
        default="auto",
        help="whether KV may cross between nodes; auto looks at the links (default: %(default)s)",
    )
    add("--narrow", action="store_true", help="DistServe's algorithms alone: no mixed numbers, no colocated instances")
    add("--requests", type=whole(1), default=600, metavar="N", help="simulated per rate, at least (default: 600)")
    add("--workers", type=whole(1), metavar="N", help="processes (default: one per core once the search is large)")


def writable(flag: str, path: Path | None) -> Path | None:
    """``path``, once it is certain that a file can be there.

    Raises:
        InvalidWorkload: it has no folder, or is one.
    """
    if path is not None and (not path.resolve().parent.is_dir() or path.is_dir()):
        raise InvalidWorkload(f"{flag}: {path} must be a file in a folder that exists")
    return path
