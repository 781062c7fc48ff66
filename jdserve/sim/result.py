"""What a simulation found."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from jdserve.core.request import SLO
from jdserve.sim.workload import FS

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

End = Literal["length", "rejected", "open"]

NEVER = -1


class Usage(msgspec.Struct, frozen=True):
    """What one instance did.

    Attributes:
        name: of the instance.
        steps: steps it ran.
        busy_s: seconds of work of each stage.
        preemptions: how often a running sequence lost its pages.
        tokens: tokens that it computed or generated.
    """

    name: str
    steps: int
    busy_s: tuple[float, ...]
    preemptions: int
    tokens: int


class SimResult(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, instances and links of a simulated run.

    Attributes:
        arrivals: of each request, in femtoseconds.
        started: when the step was launched that computed (the first part of) the prompt; -1 for never.
        pulled: when the KV was asked for; -1 for never, as on colocated instances.
        landed: when the KV had landed; -1 for never. Of the last try, where a request was interrupted.
        first: when the first token was there (the score, where no token was asked for); -1 for never.
        ends: when the last token was there; -1 for never.
        outputs: tokens asked for.
        generated: tokens got.
        rejected: index of each refused request, and why.
        complete: every request ended; False where the run was stopped because its verdict was certain.
        duration: femtoseconds until the last event.
        instances: in the order of the plan.
        links: seconds that each link was occupied.
        events: events told to the machines, ends of steps that were jumped over included.
    """

    arrivals: tuple[int, ...]
    started: tuple[int, ...]
    first: tuple[int, ...]
    pulled: tuple[int, ...]
    landed: tuple[int, ...]
    ends: tuple[int, ...]
    outputs: tuple[int, ...]
    generated: tuple[int, ...]
    rejected: dict[int, str]
    complete: bool
    duration: int
    instances: tuple[Usage, ...]
    links: dict[str, float]
    events: int

    def __len__(self) -> int:
        return len(self.arrivals)

    def ttft_s(self) -> Floats:
        """Seconds from arrival to the first token; infinite for requests that never got one. Shape [requests]."""
        pairs = zip(self.first, self.arrivals, strict=True)
        return np.array([(first - at) / FS if first >= 0 else np.inf for first, at in pairs])

    def tpot_s(self) -> Floats:
        """Mean seconds per token after the first; 0 where there is at most one. Shape [requests]."""
        return np.array(
            [
                np.inf if end < 0 else (end - first) / FS / (count - 1) if count > 1 else 0.0
                for first, end, count in zip(self.first, self.ends, self.outputs, strict=True)
            ]
        )

    def latency_s(self) -> Floats:
        """Seconds from arrival to the last token; infinite for requests that never ended. Shape [requests]."""
        pairs = zip(self.ends, self.arrivals, strict=True)
        return np.array([(end - at) / FS if end >= 0 else np.inf for end, at in pairs])

    def met(self, slo: SLO) -> Bools:
        """Which requests meet TTFT and TPOT together. Shape [requests]."""
        return (self.ttft_s() <= slo.ttft_s) & (self.tpot_s() <= slo.tpot_s)

    def attainment(self, slo: SLO) -> float:
        """Share of requests that meet both."""
        return float(np.mean(self.met(slo)))

    def to_json(self) -> bytes:
        """Everything in here as one line of JSON: equal runs give equal bytes."""
        return msgspec.json.encode(self)
