"""The ``jdserve`` command: one subcommand per job, each loading only what it needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jdserve import __version__
from jdserve.core import jsonio
from jdserve.core.plan import Plan
from jdserve.core.profile import Profile
from jdserve.loadgen import bench
from jdserve.policy.record import replay
from jdserve.server import __main__ as server

SCHEMAS = {"plan": Plan, "profile": Profile}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(prog="jdserve", description="Disaggregated serving of language models on JAX.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a plan over HTTP (as python -m jdserve.server)")
    server.add_arguments(serve)
    serve.set_defaults(run=server.run)

    load = commands.add_parser("bench", help="open-loop load on an OpenAI-compatible server")
    bench.add_arguments(load)
    load.set_defaults(run=bench.main)

    again = commands.add_parser("replay", help="feed recorded event logs to fresh schedulers and compare")
    again.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="file written under --record")
    again.set_defaults(run=_replay)

    schema = commands.add_parser("schema", help="print the JSON Schema of a file format")
    schema.add_argument("format", choices=sorted(SCHEMAS))
    schema.set_defaults(run=_schema)

    args = parser.parse_args(argv)
    return args.run(args)


def _replay(args: argparse.Namespace) -> int:
    """Exit code 0 when every log replays identically, 1 when one differs, 2 when one cannot be read."""
    code = 0
    for path in args.logs:
        try:
            result = replay(path.read_text().splitlines())
        except (OSError, ValueError) as error:
            print(f"jdserve: {path}: {error}", file=sys.stderr)
            return 2
        if result.identical:
            print(f"{path}: {result.events} events, identical")
            continue
        code = 1
        print(f"{path}: event {result.differs_at} differs\n  log:    {result.recorded}\n  replay: {result.replayed}")
    return code


def _schema(args: argparse.Namespace) -> int:
    sys.stdout.write(jsonio.schema(SCHEMAS[args.format]).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
