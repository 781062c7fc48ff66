"""The commands and the Python of docs/planning.md and the README are those that there are."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from jdserve import cli

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "planning.md").read_text()
PLANNER = ("plan", "simulate", "replan")


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    text = TEXT + (ROOT / "README.md").read_text()
    lines = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line) for line in lines]
    return [one[1:] for one in words if one[:1] and one[0].endswith("jdserve") and one[1] in PLANNER]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_is_understood(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module(f"jdserve.placement.commands.{command[0]}")
    monkeypatch.setattr(module, "run", lambda args: 0)
    assert cli.main(command) == 0


def test_all_of_them_are_shown() -> None:
    assert {command[0] for command in commands()} == set(PLANNER)


def test_the_closed_form_prints_what_it_says() -> None:
    (code,) = [block for block in blocks(TEXT, "python") if "closed_form" in block]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert f"```\n{printed.getvalue()}```" in TEXT


def test_the_python_interface_works() -> None:
    (code,) = [block for block in blocks(TEXT, "python") if "closed_form" not in block]
    printed = io.StringIO()
    small = code.replace("devices=2", "devices=2, requests=60, wide=False").replace("1000", "200")
    with contextlib.redirect_stdout(printed):
        exec(small, {})
    assert "no candidate" in printed.getvalue()
    assert re.search(r"^\d+\.\d%$", printed.getvalue(), re.MULTILINE)
