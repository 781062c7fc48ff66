"""``jdserve convert``: make the folder that instances restore from."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jdserve.core.errors import JdserveError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Convert a model, so that a later start restores it. A conversion that was killed or interrupted goes on where"
        " it was when the same command is given again."
    )
    add = parser.add_argument
    add("model", help="as `jdserve serve --model` takes it; not a folder that was converted before")
    add("-o", "--output", type=Path, help="folder to make (default: in the user's cache, where a start looks for it)")
    add("--weights", choices=("int8",), help="store matrices as 8-bit integers with a scale per output channel")
    add("--model-plugin", metavar="MODULE:CLASS", help="class from outside jdserve that computes the model")


def run(args: argparse.Namespace) -> int:
    """Convert; the folder's path is what goes to standard output. Returns the exit code."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from jdserve.models.checkpoint import is_converted
    from jdserve.models.convert import Conversion, convert
    from jdserve.models.load import find

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def show(stage: str, share: float | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=None if share is None else 1.0)
            bars.update(tasks[stage], completed=share or 0.0)

        try:
            name, source = find(args.model, show)
            if is_converted(source):
                print(f"jdserve: {source} is converted already", file=sys.stderr)
                return 1
            output = args.output.absolute() if args.output is not None else None
            model = convert(Conversion(source, name, args.weights, args.model_plugin, output), show)
        except JdserveError as error:
            bars.stop()
            print(f"jdserve: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            bars.stop()
            print("jdserve: interrupted; the same command goes on from here", file=sys.stderr)
            return 130
    print(model.folder)
    return 0
