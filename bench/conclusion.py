"""How a bench ends: figures into a file and as the last line, checks for people, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from jdserve.core import jsonio

HOLDS = "holds"
"""What a check says that does."""


class BenchFailed(Exception):
    """There is nothing to report figures of."""


def show_checks(checks: Mapping[str, str], console: Console) -> None:
    """Print what each check says."""
    for name, said in checks.items():
        console.print(f"{name}: {said}", highlight=False)


def save(report: Mapping[str, Any], file: Path, quick: bool) -> None:
    """Keep the figures; those of a quick run are only printed, because ``file`` holds those of a whole one."""
    if quick:
        return
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(jsonio.encode(report))


def conclude(report: Mapping[str, Any], check: bool, fine: Collection[str] = (HOLDS,)) -> int:
    """Print the figures as one JSON object; gives the exit code.

    Args:
        report: with ``checks``.
        check: whether a check that does not hold is a failure.
        fine: what a check may say.
    """
    print(msgspec.json.encode(report).decode())
    broken = [name for name, said in report["checks"].items() if said not in fine]
    if check and broken:
        print(f"does not hold: {', '.join(broken)}", file=sys.stderr)
        return 1
    return 0
