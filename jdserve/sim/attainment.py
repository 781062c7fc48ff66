"""Attainment with the interval that it is known to."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from statistics import NormalDist

import msgspec

BATCHES = 20
"""Stretches of a run whose attainments are compared to see how much neighbours have in common."""


class Attainment(msgspec.Struct, frozen=True):
    """Share of requests that meet an SLO jointly.

    Attributes:
        met: requests that do.
        count: all requests.
        low, high: interval of the true share.
        effective: independent requests that would tell as much: those of one run share queues, so they are fewer.
    """

    met: int
    count: int
    low: float
    high: float
    effective: float

    @property
    def share(self) -> float:
        """The estimate; 0 where there was no request."""
        return self.met / self.count if self.count else 0.0


def attainment(met: Seq[bool], confidence: float = 0.95) -> Attainment:
    """Attainment over requests in the order of arrival.

    The interval is Wilson's, for the effective number of requests: the share is also taken over stretches of the run,
    and where these scatter by a factor f more than independent requests would, f requests count as one.

    Args:
        met: for each request whether it met its SLO; none at all gives a share of 0 that may be anything.
        confidence: chance that the interval holds the true share.

    Raises:
        ValueError: ``confidence`` is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    count, total = len(met), int(sum(met))
    if not count:
        return Attainment(0, 0, 0.0, 1.0, 0.0)
    effective = count / _scatter(met, total / count)
    low, high = wilson(total / count, effective, confidence)
    return Attainment(total, count, low, high, effective)


def wilson(share: float, count: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share that was seen in ``count`` independent cases."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def requests_for(target: float, margin: float, confidence: float = 0.95) -> int:
    """Independent requests after which a share near ``target`` is known within ``margin`` on either side.

    Raises:
        ValueError: ``target`` is not in (0, 1], or ``margin`` not in (0, 1).
    """
    if not 0 < target <= 1 or not 0 < margin < 1:
        raise ValueError(f"target must be in (0, 1] and margin in (0, 1), got {target} and {margin}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    # a target of 1 has no spread of its own; the interval is then that of a share one margin below
    spread = max(target * (1 - target), margin * (1 - margin))
    return math.ceil(z * z * spread / margin**2)


def needed(target: float, count: int) -> int:
    """Requests of ``count`` that must meet the SLO for an attainment of ``target``."""
    return math.ceil(round(target * count, 6))


def _scatter(met: Seq[bool], share: float) -> float:
    """Variance of the attainments of equal stretches, over that of as many independent requests; at least 1."""
    length = len(met) // BATCHES
    if length < 2 or share in (0.0, 1.0):
        return 1.0
    shares = [sum(met[start : start + length]) / length for start in range(0, BATCHES * length, length)]
    mean = math.fsum(shares) / BATCHES
    variance = math.fsum((one - mean) ** 2 for one in shares) / (BATCHES - 1)
    return min(max(1.0, variance * length / (share * (1 - share))), len(met))
