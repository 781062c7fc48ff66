"""What a person sees while the server starts: one bar per stage on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

STAGES = {
    "download": "download the model",
    "convert": "convert the checkpoint",
    "load": "load the weights",
    "compile": "compile the step programs",
}

LINE_EVERY = 0.25
"""Share of a stage between two plain lines."""


class StartDisplay:
    """Shows the stages of a start; :meth:`show` may be called from any thread.

    Args:
        file: where to.
        url: of the server.
        say: writes a line of a log, where that is not for people; None for the file.
    """

    def __init__(self, file: TextIO, url: str, say: Callable[[str], None] | None = None) -> None:
        self._console = Console(file=file, soft_wrap=True, highlight=False)
        self._url = url
        self._say = say
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, float] = {}
        self._bars: Progress | None = None
        if self._console.is_terminal and say is None:
            columns = (TextColumn("{task.description:<26}"), BarColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=self._console)
            self._bars.start()

    def show(self, stage: str, done: float | None) -> None:
        """Show ``done`` of ``stage``; stages without a title are not shown."""
        title = STAGES.get(stage)
        if title is None:
            return
        with self._lock:
            if self._bars is None:
                self._line(stage, title, done or 0.0)
                return
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(title, total=1.0 if done is not None else None)
            # Instances load side by side, each from 0 to 1: a bar never goes back.
            before = self._told.get(stage, 0.0)
            self._told[stage] = max(before, done or 0.0)
            total = None if done is None else 1.0
            self._bars.update(self._tasks[stage], total=total, completed=self._told[stage])

    def _line(self, stage: str, title: str, done: float) -> None:
        told = self._told.get(stage)
        if told is None or done >= told + LINE_EVERY or (done >= 1.0 > told):
            self._told[stage] = done
            self._print(f"{title}: {done:.0%}")

    def _print(self, text: str) -> None:
        if self._say is None:
            self._console.print(f"jdserve: {text}")
        else:
            self._say(text)

    def close(self) -> None:
        """Leave the terminal as it is now."""
        if self._bars is not None:
            self._bars.stop()

    def ready(self, model: str) -> None:
        """Say where the server is, and how to try it."""
        if self._say is not None:
            self._say(f"ready on {self._url}")
            return
        body = f'{{"model": "{model}", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}}'
        self._console.print(f"jdserve: ready on {self._url} (Ctrl-C to stop). Try:\n")
        self._console.print(f"curl {self._url}/v1/completions -H 'Content-Type: application/json' \\\n  -d '{body}'\n")
