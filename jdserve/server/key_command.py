"""``jdserve key``: make an API key. Its text is printed once; a file of keys gets its digest."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from jdserve.server.keys import make_key, read_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("name", metavar="NAME", help="of the holder, for logs")
    parser.add_argument(
        "--file", type=Path, required=True, help="file of keys (`--api-key-file` of the server) to append to"
    )
    parser.add_argument("--admin", action="store_true", help="the key opens the admin routes as well")


def run(args: argparse.Namespace) -> int:
    """Make a key; returns the exit code."""
    try:
        if args.file.exists():
            taken = {key.name for key in read_keys(args.file)}
            if args.name in taken:
                raise ValueError(f"{args.file} has a key of {args.name} already; delete its line to revoke it")
        secret, key = make_key("admin" if args.admin else "client", args.name)
        descriptor = os.open(args.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a") as file:
            file.write(key.line())
    except (OSError, ValueError) as error:
        print(f"jdserve: {error}", file=sys.stderr)
        return 2
    print(secret)
    return 0
