"""How long the prompts and the answers are, and, for a trace, when they came.

A trace file has the format of :mod:`jdserve.core.trace`. An answer has at least 1 token here: a row without one cannot
be measured, so it is refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec

from jdserve.core import trace
from jdserve.core.errors import InvalidWorkload
from jdserve.loadgen.errors import BenchError


class Row(trace.Row, frozen=True):
    """One request.

    Attributes:
        output_len: tokens of the answer, at least 1.
    """

    output_len: Annotated[int, msgspec.Meta(ge=1)]

    def divided(self, divisor: float) -> Row:
        """The same request with both lengths divided, rounded, and kept at 1 or above."""
        return Row(max(1, round(self.input_len / divisor)), max(1, round(self.output_len / divisor)), self.arrival_s)


class Workload(msgspec.Struct, frozen=True):
    """The requests of a run in the order of their arrival; at least one.

    Attributes:
        rows: one per request.
    """

    rows: tuple[Row, ...]

    @classmethod
    def uniform(cls, count: int, input_len: int, output_len: int) -> Workload:
        """``count`` requests of equal lengths.

        Raises:
            BenchError: one of the three is below 1.
        """
        for name, value in (("count", count), ("input_len", input_len), ("output_len", output_len)):
            if value < 1:
                raise BenchError(f"{name}: must be at least 1, got {value}")
        return cls((Row(input_len, output_len),) * count)

    @classmethod
    def read(cls, path: str | Path, count: int | None = None, divisor: float = 1.0) -> Workload:
        """The first ``count`` rows of a trace file, or all of them, lengths divided by ``divisor``.

        Raises:
            BenchError: the file cannot be read, has no row, has fewer than ``count`` rows, or a row breaks the format;
                or ``divisor`` is not a finite number of at least 1.
        """
        if not (math.isfinite(divisor) and divisor >= 1):
            raise BenchError(f"divisor: must be a finite number of at least 1, got {divisor}")
        try:
            rows = trace.read_rows(path, Row, count)
        except InvalidWorkload as error:
            raise BenchError(str(error)) from None
        return cls(tuple(row.divided(divisor) for row in rows))

    def arrivals(self) -> list[float] | None:
        """Seconds of every row, or None where the trace has none."""
        times = [row.arrival_s for row in self.rows if row.arrival_s is not None]
        return times or None
