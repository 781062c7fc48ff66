"""Mean TTFT of one prefill instance in closed form: the M/D/1 queue of DistServe (OSDI'24, section 3.1).

Poisson arrivals at ``rate``, one request per batch. A pipeline works on a new request every ``slowest`` seconds and
each takes ``execution`` seconds through all stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def mean_ttft(rate: float, execution: float, slowest: float) -> float:
    """D_s + r D_m^2 / (2 (1 - r D_m)): execution plus the mean wait; infinite where the queue grows without end."""
    if rate * slowest >= 1:
        return math.inf
    return execution + rate * slowest**2 / (2 * (1 - rate * slowest))


def one_device(rate: float, d: float) -> float:
    """Equation 1: D + R D^2 / (2 (1 - R D))."""
    return mean_ttft(rate, d, d)


def two_stages(rate: float, d: float) -> float:
    """Equation 2, two pipeline stages: D + R D^2 / (4 (2 - R D))."""
    return mean_ttft(rate, d, d / 2)


def two_shards(rate: float, d: float, speedup: float) -> float:
    """Equation 3, tensor parallelism over two devices: D/K + R D^2 / (2 K (K - R D))."""
    return mean_ttft(rate, d / speedup, d / speedup)


def largest_rate(ttft_s: float, execution: float, slowest: float) -> float:
    """Highest rate with a mean TTFT of at most ``ttft_s``; 0 where a single request already takes longer.

    With the slack s = TTFT - D_s, r D_m^2 / (2 (1 - r D_m)) <= s gives r <= 2 s / (D_m^2 + 2 s D_m).
    """
    slack = ttft_s - execution
    return 2 * slack / (slowest**2 + 2 * slack * slowest) if slack > 0 else 0.0


def crossover(d: float, speedup: float) -> float:
    """Rate above which two stages give a lower mean TTFT than two shards."""
    return _root(lambda rate: two_stages(rate, d) - two_shards(rate, d, speedup), 0.0, speedup / d)


def _root(difference: Callable[[float], float], low: float, high: float) -> float:
    """Where a difference that is positive at ``low`` and falls changes its sign."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if difference(middle) > 0 else (low, middle)
    return low
