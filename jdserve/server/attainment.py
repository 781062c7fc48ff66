"""Which share of the recent requests met the objective."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from jdserve.core.request import SLO
from jdserve.server.watch import Served

WINDOW_S = 60.0


class Attained(msgspec.Struct, frozen=True):
    """Shares of the requests that ended in the window, in [0, 1]; ``both`` is of the same request.

    Attributes:
        requests: in the window.
    """

    requests: int
    ttft: float
    tpot: float
    both: float


class Window:
    """The requests of the last :data:`WINDOW_S` seconds. One that failed has met nothing; one that was left counts not.

    Args:
        slo: the objective.
        clock: seconds.
    """

    def __init__(self, slo: SLO, clock: Callable[[], float] = time.monotonic) -> None:
        self.slo = slo
        self._clock = clock
        self._met: deque[tuple[float, bool, bool]] = deque()

    def add(self, served: Served) -> None:
        """Take note of a request that has ended."""
        if served.finish in ("abort", "rejected"):
            return
        whole, ttft = served.whole, served.ttft_s
        if whole and ttft is None:
            return  # a prompt that was only scored has no first token to wait for
        in_time = whole and ttft is not None and ttft <= self.slo.ttft_s
        steady = whole and (served.tpot_s or 0.0) <= self.slo.tpot_s
        self._met.append((self._clock(), in_time, steady))
        self._forget()

    def now(self) -> Attained | None:
        """The shares now; None without a request."""
        self._forget()
        total = len(self._met)
        if not total:
            return None
        ttft, tpot = sum(one[1] for one in self._met), sum(one[2] for one in self._met)
        both = sum(one[1] and one[2] for one in self._met)
        return Attained(total, ttft / total, tpot / total, both / total)

    def _forget(self) -> None:
        oldest = self._clock() - WINDOW_S
        while self._met and self._met[0][0] < oldest:
            self._met.popleft()
