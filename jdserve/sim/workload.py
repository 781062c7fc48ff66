"""Which requests come, and when.

A :class:`Workload` is a list of requests, ready to be simulated. A :class:`Source` is an endless stream of them, of
which a workload is cut at any rate: the lengths and the unit gaps depend on the seed alone, so runs at two rates, or of
two plans, differ by nothing else (common random numbers).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from typing import Literal

import msgspec

from jdserve.core.errors import InvalidWorkload
from jdserve.sim.lengths import Lengths
from jdserve.sim.traces import Trace

FS = 10**15
"""Femtoseconds per second: simulated time is exact."""

Process = Literal["fixed", "poisson", "gamma", "trace"]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in the order of their arrival.

    Attributes:
        arrivals: femtoseconds from the start, never decreasing; equal ones come in the order given.
        inputs: tokens of each prompt, at least 1.
        outputs: tokens of each answer; 0 only scores the prompt, and 1 ends with the prefill.
        blocks: of each request, the ids of the leading blocks of its prompt: equal ids, equal prefix. Empty where no
            request shares anything.
        block_tokens: tokens of a block.

    Raises:
        InvalidWorkload: the columns differ in length, are empty, or a value breaks its bound.
    """

    arrivals: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...] = ()
    block_tokens: int = 512

    def __post_init__(self) -> None:
        count = len(self.arrivals)
        if not count:
            raise InvalidWorkload("workload: must have at least 1 request, got 0")
        if not len(self.inputs) == len(self.outputs) == count or len(self.blocks) not in (0, count):
            raise InvalidWorkload(f"workload: {count} arrivals, {len(self.inputs)} inputs, {len(self.outputs)} outputs")
        for name, values, least in (("inputs", self.inputs, 1), ("outputs", self.outputs, 0)):
            if min(values) < least:
                raise InvalidWorkload(
                    f"{name}[{values.index(min(values))}]: must be at least {least}, got {min(values)}"
                )
        if self.arrivals[0] < 0 or any(a > b for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)):
            raise InvalidWorkload("arrivals: must be at least 0 and never decrease")

    def __len__(self) -> int:
        return len(self.arrivals)

    @classmethod
    def of(cls, arrivals_s: Seq[float], inputs: Seq[int], outputs: Seq[int]) -> Workload:
        """Requests with arrivals in seconds.

        Raises:
            InvalidWorkload: as for the class; or a time is not finite.
        """
        for index, at in enumerate(arrivals_s):
            if not math.isfinite(at):
                raise InvalidWorkload(f"arrivals[{index}]: must be finite, got {at}")
        return cls(arrivals=tuple(round(at * FS) for at in arrivals_s), inputs=tuple(inputs), outputs=tuple(outputs))

    @classmethod
    def replay(cls, trace: Trace, speed: float = 1.0) -> Workload:
        """The requests of a trace at their own times, counted from the first one; ``speed`` 2 takes half the time.

        Raises:
            InvalidWorkload: the trace has no arrivals, or ``speed`` is not a finite number above 0.
        """
        _check_positive("speed", speed)
        if trace.arrivals_s is None:
            raise InvalidWorkload(f"{trace.name}: has lengths only, no arrivals to replay")
        first = trace.arrivals_s[0]
        return cls(
            arrivals=tuple(round((at - first) / speed * FS) for at in trace.arrivals_s),
            inputs=trace.inputs,
            outputs=trace.outputs,
            blocks=trace.blocks,
            block_tokens=trace.block_tokens,
        )

    @property
    def rate(self) -> float:
        """Requests per second, between the first arrival and the last one; 0 where that takes no time."""
        span = self.arrivals[-1] - self.arrivals[0]
        return (len(self) - 1) * FS / span if span else 0.0


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """An endless stream of requests.

    Attributes:
        lengths: where prompts and answers get their lengths.
        process: the gaps: all equal (``fixed``), exponential (``poisson``), gamma distributed with variation ``cv``
            (``gamma``: bursts above 1), or those of ``trace``, repeated (``trace``).
        cv: coefficient of variation of the gaps of ``gamma``.
        trace: whose gaps ``trace`` takes.
        seed: of lengths and gaps.

    Raises:
        InvalidWorkload: ``cv`` is not above 0, or ``trace`` has not the arrivals that ``process`` needs.
    """

    lengths: Lengths
    process: Process = "poisson"
    cv: float = 1.0
    trace: Trace | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check_positive("cv", self.cv)
        if self.process != "trace":
            return
        if self.trace is None or self.trace.arrivals_s is None:
            raise InvalidWorkload("trace: a trace with arrivals is needed where the gaps are those of a trace")
        if self.trace.arrivals_s[-1] <= self.trace.arrivals_s[0]:
            raise InvalidWorkload(f"trace: the arrivals of {self.trace.name} take no time, so they have no rate")

    def at(self, rate: float, count: int) -> Workload:
        """The first ``count`` requests, at ``rate`` per second.

        Raises:
            InvalidWorkload: ``rate`` is not a finite number above 0, or ``count`` is below 1.
        """
        _check_positive("rate", rate)
        if count < 1:
            raise InvalidWorkload(f"count: must be at least 1, got {count}")
        rows = self.lengths.draw(count, random.Random(f"lengths {self.seed}"))
        return Workload(
            arrivals=tuple(round(at / rate * FS) for at in self._unit_times(count)),
            inputs=rows.inputs,
            outputs=rows.outputs,
            blocks=rows.blocks,
            block_tokens=rows.block_tokens,
        )

    def _unit_times(self, count: int) -> list[float]:
        """Arrivals at rate 1."""
        if self.process == "fixed":
            return [float(index) for index in range(count)]
        if self.process == "trace":
            assert self.trace is not None
            return _repeated(self.trace, count)
        source = random.Random(f"arrivals {self.seed}")
        if self.process == "poisson":
            gaps = (source.expovariate(1.0) for _ in range(count))
        else:
            shape = 1 / self.cv**2
            gaps = (source.gammavariate(shape, 1 / shape) for _ in range(count))
        now, times = 0.0, []
        for gap in gaps:
            now += gap
            times.append(now)
        return times


def _repeated(trace: Trace, count: int) -> list[float]:
    """The arrivals of ``trace`` scaled to rate 1, one pass after the other."""
    assert trace.arrivals_s is not None
    first, rows = trace.arrivals_s[0], len(trace.arrivals_s)
    # the gap between two passes is the mean one
    scale = (rows - 1) / (trace.arrivals_s[-1] - first)
    unit = [(at - first) * scale for at in trace.arrivals_s]
    return [unit[index % rows] + index // rows * rows for index in range(count)]


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidWorkload(f"{name}: must be a finite number above 0, got {value}")
