"""The command ``jdserve bench``: open-loop load on a running server, latencies and SLO attainment.

Exit codes: 0 when at least one request was answered in full, 1 when none was, 2 for a run that cannot be made as asked
(with one line on standard error), 130 after Ctrl-C (what was done by then is still reported).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from jdserve.core import jsonio
from jdserve.loadgen import arrivals, endpoint, prompts, report
from jdserve.loadgen.client import OpenLoop, Request, completion_body
from jdserve.loadgen.errors import BenchError
from jdserve.loadgen.metrics import Slo
from jdserve.loadgen.workload import Workload

_DEFAULT_COUNT = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to ``parser``."""
    positive, count = _number(0, above=True), _integer(1)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="base URL of an OpenAI-compatible server (default: %(default)s)")
    add("--model", help="name of the model on the server (default: the one that it serves)")
    add(
        "--num-requests",
        type=count,
        metavar="N",
        help=f"requests to send (default: {_DEFAULT_COUNT}, or all rows of --trace)",
    )
    add(
        "--arrivals",
        choices=("poisson", "fixed", "trace"),
        default="poisson",
        help="when requests come: at random or evenly at --rate, or as in --trace (default: %(default)s)",
    )
    add("--rate", type=positive, metavar="R", help="requests per second, for poisson and fixed")
    add("--speed", type=positive, metavar="X", help="replay the arrivals of --trace X times as fast, 1 if not given")
    add(
        "--trace",
        metavar="FILE",
        help="lengths, and arrivals if it has them: .csv with the columns input_len, output_len[, arrival_s], "
        "or .jsonl with those keys; also .gz",
    )
    add(
        "--length-divisor",
        type=_number(1),
        metavar="D",
        help="divide the lengths of --trace by D, at least 1, and keep them at 1 token or more",
    )
    add("--input-len", type=count, metavar="TOKENS", help="tokens of every prompt, without --trace")
    add("--output-len", type=count, metavar="TOKENS", help="tokens of every answer, without --trace")
    add("--seed", type=_integer(0), default=0, help="of arrivals and prompts: equal seeds, equal runs (default: 0)")
    add(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json of the model, or its folder; without it the server's /tokenize is asked",
    )
    add("--text", metavar="FILE", help="text that prompts are cut from (default: one that comes with the package)")
    add(
        "--respect-eos",
        action="store_true",
        help="let answers end early; otherwise ignore_eos is sent and they have exactly the length asked for",
    )
    add("--slo-ttft", type=positive, metavar="SECONDS", help="bound on the time to the first token")
    add("--slo-tpot", type=positive, metavar="SECONDS", help="bound on the time per output token after the first")
    add("--max-seconds", type=positive, metavar="S", help="stop after S seconds and report what was done")
    add("--output", metavar="FILE", help="write all figures and one row per request here, as JSON")


def main(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code.

    Args:
        args: from a parser that ``add_arguments`` was called on.
    """
    try:
        return _run(args)
    except BenchError as error:
        print(f"jdserve bench: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    workload = _workload(args)
    times = _arrivals(args, workload)
    if args.output is not None and not Path(args.output).resolve().parent.is_dir():
        raise BenchError(f"--output: the folder of {args.output} must exist")
    text = prompts.read_text(args.text)
    url = endpoint.base_url(args.url)
    model = endpoint.find_model(url, args.model)
    tokens = prompts.encode(args.tokenizer, text) if args.tokenizer else endpoint.tokenize(url, model, text)
    load = OpenLoop(url, _requests(args, model, workload, times, tokens))

    console = Console()
    console.print(f"{len(times)} requests to {model} at {url}, the last after {times[-1]:.1f} s", markup=False)
    interrupted = False
    try:
        asyncio.run(load.run(args.max_seconds))
    except KeyboardInterrupt:
        interrupted = True

    # The parser's own defaults (a command name or function of the roof's) are no setting of the run.
    settings = {name: vars(args)[name] for name in _names()} | {"url": url, "model": model}
    slo = Slo(args.slo_ttft, args.slo_tpot)
    result = report.Report.of(settings, load.records, slo, unsent=len(times) - len(load.records))
    report.show(result.summary, console)
    if args.output is not None:
        try:
            Path(args.output).write_bytes(jsonio.encode(result))
        except OSError as error:
            raise BenchError(f"--output: cannot write {args.output}: {error.strerror}") from None
    if interrupted:
        return 130
    return 0 if result.summary.completed else 1


def _names() -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return list(vars(parser.parse_args([])))


def _workload(args: argparse.Namespace) -> Workload:
    lengths = {"--input-len": args.input_len, "--output-len": args.output_len}
    if args.trace is not None:
        for flag, value in lengths.items():
            if value is not None:
                raise BenchError(f"{flag}: must not be given with --trace, which has the lengths, got {value}")
        return Workload.read(args.trace, args.num_requests, args.length_divisor or 1.0)
    for flag, value in lengths.items():
        if value is None:
            raise BenchError(f"{flag}: needed without --trace")
    if args.length_divisor is not None:
        raise BenchError(f"--length-divisor: must not be given without --trace, got {args.length_divisor}")
    return Workload.uniform(args.num_requests or _DEFAULT_COUNT, args.input_len, args.output_len)


def _arrivals(args: argparse.Namespace, workload: Workload) -> list[float]:
    if args.arrivals == "trace":
        seconds = workload.arrivals()
        if seconds is None:
            raise BenchError("--arrivals trace: needs a --trace with the column arrival_s")
        if args.rate is not None:
            raise BenchError(f"--rate: must not be given with --arrivals trace (see --speed), got {args.rate}")
        return arrivals.replay(seconds, args.speed or 1.0)
    if args.rate is None:
        raise BenchError(f"--rate: needed with --arrivals {args.arrivals}")
    if args.speed is not None:
        raise BenchError(f"--speed: must not be given without --arrivals trace, got {args.speed}")
    if args.arrivals == "fixed":
        return arrivals.fixed(args.rate, len(workload.rows))
    return arrivals.poisson(args.rate, len(workload.rows), args.seed)


def _requests(
    args: argparse.Namespace, model: str, workload: Workload, times: list[float], tokens: list[int]
) -> list[Request]:
    """Every request with its body: encoding is done before the clock starts, not while requests are due."""
    cut = prompts.cut(tokens, [row.input_len for row in workload.rows], args.seed)
    return [
        Request(
            at=at,
            input_len=row.input_len,
            output_len=row.output_len,
            body=completion_body(model, prompt, row.output_len, ignore_eos=not args.respect_eos),
        )
        for at, row, prompt in zip(times, workload.rows, cut, strict=True)
    ]


def _number(bound: float, *, above: bool = False) -> Callable[[str], float]:
    said = f"must be a finite number {'above' if above else 'of at least'} {bound:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < bound or (above and value == bound):
            raise argparse.ArgumentTypeError(f"{said}, got {text!r}")
        return value

    return parse


def _integer(bound: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = bound - 1
        if value < bound:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {bound}, got {text!r}")
        return value

    return parse
