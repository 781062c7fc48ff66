"""When requests come: seconds after the start of the run, never decreasing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from jdserve.loadgen.errors import BenchError


def fixed(rate: float, count: int) -> list[float]:
    """``count`` arrivals, one every ``1 / rate`` seconds, the first at 0.

    Raises:
        BenchError: ``rate`` is not a finite number above 0, or ``count`` is below 1.
    """
    _check(rate, count)
    return [index / rate for index in range(count)]


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """``count`` arrivals of a Poisson process of ``rate`` per second: independent, exponential gaps.

    Equal seeds give equal gaps up to the factor ``1 / rate``, so that runs at two rates differ by the rate alone.

    Raises:
        BenchError: ``rate`` is not a finite number above 0, or ``count`` is below 1.
    """
    _check(rate, count)
    source = random.Random(f"arrivals {seed}")
    now, times = 0.0, []
    for _ in range(count):
        now += source.expovariate(1.0)
        times.append(now / rate)
    return times


def replay(seconds: Sequence[float], speed: float = 1.0) -> list[float]:
    """The arrivals of a trace, counted from its first one; ``speed`` 2 replays it in half the time.

    Raises:
        BenchError: ``speed`` is not a finite number above 0, or ``seconds`` is empty, not finite or decreasing.
    """
    _check_positive("speed", speed)
    if not seconds:
        raise BenchError("arrivals: the trace must have at least 1 row, got 0")
    previous = seconds[0]
    for index, at in enumerate(seconds):
        if not math.isfinite(at) or at < previous:
            raise BenchError(f"arrivals[{index}]: must be finite and at least the one before ({previous}), got {at}")
        previous = at
    return [(at - seconds[0]) / speed for at in seconds]


def _check(rate: float, count: int) -> None:
    _check_positive("rate", rate)
    if count < 1:
        raise BenchError(f"count: must be at least 1, got {count}")


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise BenchError(f"{name}: must be a finite number above 0, got {value}")
