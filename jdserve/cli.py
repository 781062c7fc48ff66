"""The ``jdserve`` command: one subcommand per job, each loading only what it needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from jdserve import __version__
from jdserve.core import jsonio
from jdserve.core.errors import JdserveError
from jdserve.core.plan import Addition, Plan
from jdserve.core.profile import Profile
from jdserve.policy.record import replay

SCHEMAS = {"plan": Plan, "profile": Profile, "instance": Addition}

COMMANDS = {
    "plan": ("jdserve.placement.commands.plan", "run", "find the placement with the highest goodput per device"),
    "simulate": ("jdserve.placement.commands.simulate", "run", "run a plan under a workload, on a virtual clock"),
    "replan": ("jdserve.placement.commands.replan", "run", "say what recent requests would change in a plan"),
    "dryrun": ("jdserve.aot.command", "run", "compile a plan for devices that are not here, and say what it costs"),
    "hardware": ("jdserve.placement.commands.hardware", "run", "list the devices that are known, with their figures"),
    "models": ("jdserve.placement.commands.models", "run", "list the models that are known by name"),
    "convert": ("jdserve.models.command", "run", "convert a model once, for later starts; stores it as int8 if asked"),
    "serve": ("jdserve.server.__main__", "run", "serve a plan over HTTP (as python -m jdserve.server)"),
    "key": ("jdserve.server.key_command", "run", "make an API key for a server"),
    "top": ("jdserve.server.top", "run", "watch a server in the terminal"),
    "bench": ("jdserve.loadgen.bench", "main", "open-loop load on an OpenAI-compatible server"),
}
"""Subcommands whose module is loaded when they are named: it has ``add_arguments``, and the function that runs it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="jdserve", description="Disaggregated serving of language models on JAX.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, function, help) in COMMANDS.items():
        command = commands.add_parser(name, help=help, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in given[:1]:
            loaded = import_module(module)
            loaded.add_arguments(command)
            command.set_defaults(run=getattr(loaded, function))
            if hasattr(loaded, "expanded"):  # it takes flags from a file as well
                given = [name, *loaded.expanded(command, given[1:])]
    _add_operator(commands)
    args = parser.parse_args(given)
    return args.run(args)


def _add_operator(commands: Any) -> None:
    """Add what works on running servers, their logs and their files."""
    again = commands.add_parser("replay", help="feed recorded event logs to fresh schedulers and compare")
    again.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="file written under --record")
    again.set_defaults(run=_replay)

    drain = commands.add_parser("drain", help="empty an instance of a running server and end it, losing no request")
    drain.add_argument("instance", metavar="INSTANCE", help="its name in the plan")
    _add_server(drain)
    drain.set_defaults(run=_drain)

    grow = commands.add_parser("add", help="start one more instance on a running server")
    grow.add_argument("file", type=Path, metavar="INSTANCE_JSON", help="see `jdserve schema instance`")
    _add_server(grow)
    grow.set_defaults(run=_grow)

    schema = commands.add_parser("schema", help="print the JSON Schema of a file format")
    schema.add_argument("format", choices=sorted(SCHEMAS))
    schema.set_defaults(run=_schema)


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


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8000, help="HTTP port of a server on this machine")
    parser.add_argument(
        "--control", metavar="HOST:PORT", help="where it listens for workers, for one on another machine"
    )
    parser.add_argument("--secret-file", type=Path, help="with --control: file with its secret")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait until it is done")


def _drain(args: argparse.Namespace) -> int:
    from jdserve.runtime import wire

    return _operate(args, lambda: wire.Drain(args.instance), f"{args.instance} is drained and gone")


def _grow(args: argparse.Namespace) -> int:
    from jdserve.runtime import wire

    def message() -> wire.Add:
        addition = jsonio.read(args.file, Addition)
        return wire.Add(addition.instance, addition.worker)

    return _operate(args, message, "the instance takes work")


def _operate(args: argparse.Namespace, message: Callable[[], Any], done: str) -> int:
    from jdserve.runtime.operator import ask, find

    try:
        if (args.control is None) != (args.secret_file is None):
            raise ValueError("--control and --secret-file go together")
        if args.control is None:
            meeting = find(args.port)
            control, secret = meeting.control, meeting.secret
        else:
            control, secret = args.control, args.secret_file.read_text().strip()
        ask(control, secret, message(), args.timeout)
    except (JdserveError, OSError, ValueError) as error:
        print(f"jdserve: {error}", file=sys.stderr)
        return 1
    print(done)
    return 0


def _schema(args: argparse.Namespace) -> int:
    sys.stdout.write(jsonio.schema(SCHEMAS[args.format]).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
