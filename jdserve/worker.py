"""``python -m jdserve.worker``: one worker of a plan, joined to a server that may run on another host."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jdserve.core.errors import InvalidPlan
from jdserve.core.logs import LOG_FORMATS, set_up
from jdserve.core.plan import Plan
from jdserve.runtime.hosts import claim_devices, platform_here
from jdserve.runtime.processes import allocator


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jdserve.worker", description=__doc__)
    add = parser.add_argument
    add("--plan", type=Path, required=True, help="the plan.json that the server serves")
    add("--name", required=True, help="name of this worker in the plan")
    add("--join", required=True, metavar="HOST:PORT", help="where the server listens for workers")
    add("--secret-file", type=Path, required=True, help="file with the secret that the server was started with")
    add("--oversubscribe", action="store_true", help="share the cores of this machine with other workers, unpinned")
    add("--log-format", choices=LOG_FORMATS, default="text", help="json writes one object a line (default: text)")
    # Ends the process with its standard input, which the server holds open.
    add("--supervised", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    host, _, port = args.join.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        parser.error(f"--join takes HOST:PORT with a port between 1 and 65535, got {args.join!r}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, claim the worker's devices, and work; returns the exit code."""
    args = _arguments(argv)
    set_up(f"jdserve worker {args.name}", args.log_format)
    try:
        plan = Plan.load(args.plan)
        if plan.platform == "auto":
            plan = msgspec.structs.replace(plan, platform=platform_here())
        known = [worker.name for worker in plan.workers]
        if args.name not in known:
            raise InvalidPlan("$.workers", f"no worker {args.name!r}; there are {', '.join(known)}")
        secret = args.secret_file.read_text().strip()
        claim_devices(plan, plan.worker(args.name), oversubscribe=args.oversubscribe)
        return _work(plan, args.name, args.join, secret, supervised=args.supervised)
    except (InvalidPlan, OSError, ValueError) as error:
        print(f"jdserve worker {args.name}: {error}", file=sys.stderr)
        return 2


def _work(plan: Plan, name: str, address: str, secret: str, *, supervised: bool) -> int:
    # Only now, with the devices settled, may jax be imported.
    from jdserve.runtime.channel import Channel, Keys
    from jdserve.runtime.worker import WorkerProcess

    if supervised:
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    keys = Keys(secret)
    code = WorkerProcess(plan, name, Channel.connect(address, keys), keys).run()
    sys.stderr.flush()
    os._exit(code)  # threads that load, compile or wait for a dead peer cannot be interrupted


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    if settings := allocator(os.environ):  # of malloc, which reads them before Python starts
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **settings})
    sys.exit(main())
