"""Stopping a run as soon as its answer is certain."""

from __future__ import annotations

import msgspec

from jdserve.core.request import SLO
from jdserve.sim.workload import FS, Workload


class Verdict(msgspec.Struct, frozen=True):
    """The question whether enough requests meet an SLO.

    Attributes:
        slo: TTFT and TPOT; its ``attainment`` is not looked at.
        misses: the answer is no when more than this many requests miss it, and yes when it is certain that no more do.
    """

    slo: SLO
    misses: int


class Watch:
    """Counts the requests whose fate is known.

    Attributes:
        certain: the answer cannot change any more.
    """

    def __init__(self, verdict: Verdict, workload: Workload) -> None:
        self.certain = False
        self._arrivals = workload.arrivals
        self._outputs = workload.outputs
        self._ttft_s, self._tpot_s = verdict.slo.ttft_s, verdict.slo.tpot_s
        # first tokens later than this are late, whatever the rounding
        self._patience = round(self._ttft_s * FS) + 1
        self._misses_left = verdict.misses
        self._meets_left = len(workload) - verdict.misses
        self._fate: list[bool | None] = [None] * len(workload)
        self._has_first = bytearray(len(workload))
        self._next = 0

    def passed(self, now: int) -> None:
        """Time has passed: requests without a first token may have become late."""
        arrivals, deadline = self._arrivals, now - self._patience
        while self._next < len(arrivals) and arrivals[self._next] < deadline:
            if not self._has_first[self._next]:
                self.lost(self._next)
            self._next += 1

    def first(self, index: int, now: int) -> None:
        """The first token of a request is there."""
        self._has_first[index] = 1
        if (now - self._arrivals[index]) / FS > self._ttft_s:
            self.lost(index)

    def ended(self, index: int, first: int, now: int) -> None:
        """The last token of a request is there."""
        count = self._outputs[index]
        if count > 1 and (now - first) / FS / (count - 1) > self._tpot_s:
            self.lost(index)
        elif self._fate[index] is None:
            self._fate[index] = True
            self._meets_left -= 1
            self.certain = self.certain or self._meets_left <= 0

    def lost(self, index: int) -> None:
        """A request misses the SLO."""
        if self._fate[index] is None:
            self._fate[index] = False
            self._misses_left -= 1
            self.certain = self.certain or self._misses_left < 0
