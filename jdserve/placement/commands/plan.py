"""``jdserve plan``: from a model, machines, requests and an objective to ``plan.json``, or to the reason why not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jdserve.core.errors import InvalidWorkload
from jdserve.core.plan import Plan, role_of
from jdserve.core.request import SLO
from jdserve.core.spec import DType, WeightFormat
from jdserve.cost.models import model as known_model
from jdserve.placement import search
from jdserve.placement.commands.inputs import (
    EXIT_CODES,
    FOUND,
    INFEASIBLE,
    Machines,
    add_machines,
    add_search,
    add_slo,
    add_workload,
    number,
    slo_of,
    source_of,
    told,
    whole,
    writable,
)
from jdserve.placement.families import Progress as Told
from jdserve.placement.job import Job, model_len, within
from jdserve.placement.result import SearchResult
from jdserve.sim.lengths import FromTrace
from jdserve.sim.workload import Source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.epilog = EXIT_CODES
    add = parser.add_argument
    add("--model", required=True, help="a name of `jdserve models`, or the folder of a checkpoint")
    add("--checkpoint", metavar="PATH", help="model as the plan shall name it, where it differs")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="(default: bfloat16, on CPU float32)")
    add("--weights", choices=("int8",), help="how matrices are stored (default: in the dtype)")
    add("--max-model-len", type=whole(1), metavar="TOKENS", help="longest request (default: that of the workload)")
    add(
        "--rate",
        type=number(0),
        metavar="R",
        help="requests per second to carry with the fewest devices; 0 gives the smallest plan "
        "(default: the highest rate per device, or in all with --devices)",
    )
    add_machines(parser)
    add_workload(parser)
    add_slo(parser, required=True)
    add_search(parser)
    out = parser.add_argument_group("output")
    out.add_argument("-o", "--output", type=Path, metavar="FILE", help="write plan.json here")
    out.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="write pictures and figures here: .html for people, .json for programs; may be given twice",
    )
    out.add_argument("--log", action="store_true", help="print every candidate, and why it lost")
    out.add_argument("--quiet", action="store_true", help="no progress bar")


@told
def run(args: argparse.Namespace) -> int:
    """Search, print what was found, write what was asked for."""
    writable("--output", args.output)
    for path in args.report:
        if writable("--report", path) and path.suffix not in (".html", ".json"):
            raise InvalidWorkload(f"--report: must end in .html or .json, got {path}")
    slo = slo_of(args)
    assert slo is not None
    source = source_of(args)
    job = job_of(args, args.model, source, slo, args.rate, args.dtype, args.max_model_len, args.weights)
    with bar(args.quiet) as progress:
        result = searched(args, job, source, progress, args.checkpoint)
        study = None
        if args.report:
            from jdserve.placement.study import study as look_closer

            study = look_closer(job, result, progress)
    for line in lines(job, result):
        print(line)
    if args.log:
        print()
        for entry in result.log:
            print(f"{entry.family}: {entry.label}: {entry.reason}")
    if study is not None:
        from jdserve.placement.report import html

        for path in args.report:
            path.write_bytes(study.to_json() if path.suffix == ".json" else html(study).encode())
            print(f"report: {path}")
    if result.plan is None:
        return INFEASIBLE
    if args.output is not None:
        args.output.write_bytes(result.plan.to_json())
        print(f"plan: {args.output}")
    return FOUND


def job_of(
    args: argparse.Namespace,
    model: str,
    source: Source,
    slo: SLO,
    rate: float | None,
    dtype: DType | None,
    max_model_len: int | None = None,
    weights: WeightFormat | None = None,
) -> Job:
    """What the flags ask for, as :func:`search` understands it.

    Raises:
        InvalidPlan: the model or the cluster is refused.
        InvalidWorkload: no request is short enough for the model.
    """
    spec = known_model(model)
    machines = Machines(args, model, spec, dtype, weights)
    cluster = machines.cluster
    length = min(max_model_len or model_len(spec, source, args.requests), spec.context)
    lengths = source.lengths
    return Job(
        spec=spec,
        model=model,
        dtype=machines.dtype,
        weights=weights,
        cluster=cluster,
        source=within(source, length)[0],
        workload=lengths.trace.name if isinstance(lengths, FromTrace) else type(lengths).__name__.lower(),
        slo=slo,
        latency=machines.latency,
        rate=rate,
        devices=cluster.devices if args.devices is None else min(args.devices, cluster.devices),
        max_model_len=length,
        requests=args.requests,
        kv_tokens=machines.kv_tokens,
    )


def searched(
    args: argparse.Namespace, job: Job, source: Source, progress: Told | None, checkpoint: str | None
) -> SearchResult:
    """The answer to ``job``.

    Args:
        args: of :func:`~jdserve.placement.commands.inputs.add_search`.
        job: see there.
        source: its requests, the too long ones included.
        progress: told how far it is.
        checkpoint: model as the plan shall name it, where it differs.
    """
    return search(
        job.spec,
        job.cluster,
        source,
        job.slo,
        rate=job.rate,
        devices=args.devices,
        latency=job.latency,
        affinity=args.affinity,
        wide=not args.narrow,
        checkpoint=checkpoint or job.model,
        dtype=job.dtype,
        weights=job.weights,
        max_model_len=job.max_model_len,
        kv_tokens=job.kv_tokens,
        requests=job.requests,
        workers=args.workers,
        progress=progress,
    )


@contextmanager
def bar(quiet: bool) -> Iterator[Told | None]:
    """A progress bar on standard error, where that is a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        tasks: dict[str, int] = {}

        def progress(what: str, done: int, count: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what)
            shown.update(tasks[what], completed=done, total=count)  # pyright: ignore[reportArgumentType]

        yield progress


def lines(job: Job, result: SearchResult) -> Iterator[str]:
    """The answer for people."""
    cluster, slo, sample = job.cluster, job.slo, job.sample
    yield (
        f"{job.model} ({job.dtype}) on {cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}; "
        f"{job.workload}: {sample.mean_input:.0f} tokens in, {sample.mean_output:.0f} out on average; "
        f"{slo.attainment:.4g} of the requests within TTFT {slo.ttft_s:g} s and TPOT {slo.tpot_s:g} s"
    )
    yield f"step times: {result.latency}"
    yield f"{'found' if result.feasible else 'infeasible'}: {result.reason}"
    if result.nearest is not None:
        near = result.nearest
        scale = "" if near.slo_scale is None else f"; enough would within {near.slo_scale:.3g} times the SLO"
        yield (
            f"nearest: {near.label}: {near.attainment.share:.1%} of the requests meet the SLO at {near.rate:.3g} req/s"
            f"{scale}; median TTFT {near.ttft_s:.3g} s and TPOT {near.tpot_s:.3g} s without load"
        )
    if result.plan is not None and result.option is not None:
        yield from _found(result.plan, result)
    for warning in result.warnings:
        yield f"note: {warning}"


def _found(plan: Plan, result: SearchResult) -> Iterator[str]:
    for option in result.options:
        seen = option.attainment
        line = (
            f"  {option.family}: {option.label}: {option.devices} devices, {seen.share:.1%} ({seen.low:.1%} to "
            f"{seen.high:.1%}) at {option.rate:.3g} req/s"
        )
        if option.goodput is not None:
            line += f", goodput {option.goodput:.3g} ({option.per_device:.3g} per device)"
        yield line
    yield f"KV: {result.affinity.level} node affinity; {result.affinity.reason}"
    if result.links:
        busiest = result.links[0]
        yield f"busiest link: {busiest.link}, {busiest.utilisation:.1%} of {busiest.capacity / 1e9:.3g} GB/s"
    yield "instances:"
    for one in plan.instances:
        seats = [
            f"{worker.host} {','.join(str(device) for device in part.devices)}"
            for stage in range(one.pp)
            for worker in plan.workers
            for part in worker.stages
            if part.instance == one.name and part.stage == stage
        ]
        yield f"  {one.name}: {role_of(one)} tp{one.tp} pp{one.pp}, {one.pages} pages, on {' | '.join(seats)}"
