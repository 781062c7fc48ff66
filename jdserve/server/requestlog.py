"""A log of requests that ``jdserve replan --from-log`` and ``jdserve simulate --trace`` read; see ``core/trace.py``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from jdserve.core.trace import Row
from jdserve.server.watch import Served


class Line(Row, frozen=True, kw_only=True):
    """One request; what the reader passes over is for people.

    Attributes:
        id: of the request.
        finish: how it ended.
        ttft_s, tpot_s, e2e_s: its latencies, where it has them.
    """

    id: str
    finish: str
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float


class Entry:
    """A request that has arrived and may not have ended.

    Attributes:
        line: what is written of it, None for nothing.
        open: it has not ended.
    """

    def __init__(self) -> None:
        self.line: Line | None = None
        self.open = True


class RequestLog:
    """Writes a line per request, in the order of their arrivals: one that ends early waits for those before it.

    Args:
        path: ends in ``.jsonl``; what is there already is kept.

    Raises:
        ValueError: it has another ending, by which its readers could not tell what it is.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix != ".jsonl":
            raise ValueError(f"--request-log must end in .jsonl, got {path}")
        self._file = path.open("ab", buffering=0)
        self._open: deque[Entry] = deque()
        self._wall = time.time() - time.monotonic()

    def begin(self) -> Entry:
        """A request has arrived."""
        entry = Entry()
        self._open.append(entry)
        return entry

    def end(self, entry: Entry, served: Served) -> None:
        """It has ended. One that was refused is not part of the load that was served."""
        entry.open = False
        if served.finish != "rejected":
            entry.line = Line(
                input_len=served.prompt_tokens,
                output_len=served.output_tokens,
                arrival_s=round(self._wall + served.arrival, 6),
                id=served.id,
                finish=served.finish,
                ttft_s=served.ttft_s,
                tpot_s=served.tpot_s,
                e2e_s=served.end - served.arrival,
            )
        self._write(lambda entry: not entry.open)

    def close(self) -> None:
        """Write what has ended, though requests before it have not."""
        self._write(lambda _: True)
        self._file.close()

    def _write(self, due: Callable[[Entry], bool]) -> None:
        while self._open and due(self._open[0]):
            line = self._open.popleft().line
            if line is not None:
                self._file.write(msgspec.json.encode(line) + b"\n")
