"""``--config FILE``: flags from a TOML file. Its keys are the flags' names; what the command line says wins."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path

FLAG = "--config"


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the flag."""
    parser.add_argument(
        FLAG,
        type=Path,
        metavar="FILE",
        help="TOML file of flags by their names, such as max-model-len = 4096; the command line wins over it",
    )


def expanded(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The command line with the file's flags before its own, so that those win. Ends the process where one is wrong.

    Args:
        parser: knows the flags.
        argv: without the program and the subcommand.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_argument(finder)
    path = finder.parse_known_args(argv)[0].config
    if path is None:
        return list(argv)
    try:
        return [*_flags(parser, path), *argv]
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError) as error:
        parser.error(f"{FLAG} {path}: {error}")


def _flags(parser: argparse.ArgumentParser, path: Path) -> list[str]:
    known = {name: action for action in parser._actions for name in action.option_strings}
    flags: list[str] = []
    for key, value in tomllib.loads(path.read_text()).items():
        name = f"--{key.replace('_', '-')}"
        action = known.get(name)
        if action is None or name in (FLAG, "--help"):
            raise ValueError(f"{key} is no flag of the server")
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise ValueError(f"{key} must be true or false, got {value!r}")
            flags += [name] if value else []
            continue
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
            raise ValueError(f"{key} takes one value, got {value!r}")
        for one in values:
            if isinstance(one, bool) or not isinstance(one, str | int | float):
                raise ValueError(f"{key} must be a text or a number, got {one!r}")
            flags.append(f"{name}={one}")
    return flags
