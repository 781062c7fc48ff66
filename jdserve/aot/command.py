"""``jdserve dryrun``: what a plan costs on devices that are not here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from jdserve.aot.report import Program
from jdserve.aot.run import dryrun
from jdserve.aot.targets import TARGETS
from jdserve.core.errors import InvalidPlan, JdserveError
from jdserve.core.plan import Plan
from jdserve.cost.models import model as known_model

DONE, REFUSED, TOO_LARGE, INTERRUPTED = 0, 2, 3, 130

EXIT_CODES = """exit codes:
  0    done, and every stage fits
  2    the input is refused, or the compiler of the target is missing or fails, with the reason on standard error
  3    done, and some stage does not fit its devices
  130  Ctrl-C"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.epilog = EXIT_CODES
    add = parser.add_argument
    add("--plan", required=True, type=Path, metavar="FILE", help="plan.json")
    add("--target", required=True, metavar="NAME", help=f"devices to compile for: {', '.join(TARGETS)}")
    add("--model", help="name or checkpoint whose shapes are compiled (default: that of the plan)")
    add(
        "--bucket",
        action="append",
        default=[],
        metavar="NAME",
        help="compile this program only, such as decode-64, 'prefill-*' or gather-8; may be given again (default: all)",
    )
    add(
        "--rules",
        default="tensor",
        metavar="PRESET",
        help="tensor, sequence, expert or replicated, or by role as in prefill=sequence,decode=tensor"
        " (default: %(default)s)",
    )
    add(
        "--extrapolate",
        action="store_true",
        help="compile stages of one and two layers and extend the figures: quicker for deep models",
    )
    add("--json", type=Path, metavar="FILE", help="write the report here")
    add("--hlo", type=Path, metavar="DIR", help="write the optimized HLO of each program into this folder")


def run(args: argparse.Namespace) -> int:
    """Compile, and print the report."""
    try:
        return _run(args)
    except (JdserveError, OSError) as error:
        print(f"jdserve dryrun: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    if args.json is not None and (not args.json.resolve().parent.is_dir() or args.json.is_dir()):
        raise InvalidPlan("--json", f"{args.json} must be a file in a folder that exists")
    news = Console(stderr=True)

    def compiled(program: Program) -> None:
        if news.is_terminal:
            news.print(f"[dim]{program.instance} {program.name}: {program.seconds:.0f} s[/]", highlight=False)

    report = dryrun(
        Plan.load(args.plan),
        args.target,
        spec=None if args.model is None else known_model(args.model),
        rules=args.rules,
        buckets=args.bucket,
        extrapolate=args.extrapolate,
        hlo=args.hlo,
        progress=compiled,
    )
    console = Console()
    # A pipe is no narrow terminal.
    console = console if console.is_terminal else Console(width=200)
    console.print(report, highlight=False)
    if args.json is not None:
        report.save(args.json)
    return DONE if all(fit.fits for fit in report.fits) else TOO_LARGE
