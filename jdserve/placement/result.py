"""What a search answers, typed and ready for JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from jdserve.core import jsonio
from jdserve.core.plan import Plan
from jdserve.placement.candidates import Family
from jdserve.placement.layout import LinkLoad
from jdserve.sim.attainment import Attainment

Verdict = Literal["best", "lost", "skipped"]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate and what became of it.

    Attributes:
        family: the search that it was part of.
        label: its instances.
        devices: of one unit of it.
        verdict: ``skipped`` candidates were never simulated.
        reason: why it lost, with the figure.
        goodput: requests per second of one unit, where it was measured.
        bound: requests per second that it cannot go beyond, where that is known.
    """

    family: Family
    label: str
    devices: int
    verdict: Verdict
    reason: str
    goodput: float | None = None
    bound: float | None = None

    @property
    def per_device(self) -> float | None:
        """Requests per second and device, where they were measured."""
        return None if self.goodput is None else self.goodput / self.devices


class Affinity(msgspec.Struct, frozen=True, kw_only=True):
    """Whether KV may cross between nodes, and the figure that decided.

    Attributes:
        level: ``high``: instances lie anywhere (Algorithm 1). ``low``: prefill and decode stay together (Algorithm 2).
            ``inside``: there is one node.
        reason: in words.
        transfer_s: KV of a mean request over one link between nodes; None with one node.
        busiest: traffic of the busiest link between nodes, where a plan was looked at.
    """

    level: Literal["high", "low", "inside"]
    reason: str
    transfer_s: float | None = None
    busiest: LinkLoad | None = None


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan of one family.

    Attributes:
        family: whose.
        label: instances in all.
        plan: as it was simulated; only that of the answer has step times.
        devices: in all.
        rate: at which it was judged.
        before: attainment of the plan as its phases or units alone suggest it.
        attainment: of the plan in the end, after instances were added (or found needless).
        added: instances (Algorithm 1) or units that the joint target asked for in addition; negative for fewer.
        goodput: requests per second in all, where it was measured.
        phases: goodput of one instance of each phase by itself (Algorithm 1), or of one unit.
    """

    family: Family
    label: str
    plan: Plan
    devices: int
    rate: float
    before: Attainment
    attainment: Attainment
    added: int
    goodput: float | None
    phases: dict[str, float]

    @property
    def per_device(self) -> float | None:
        """Requests per second and device, where the goodput was measured."""
        return None if self.goodput is None else self.goodput / self.devices


class Nearest(msgspec.Struct, frozen=True, kw_only=True):
    """What comes closest to a job that cannot be done.

    Attributes:
        label: the configuration.
        devices: of it.
        rate: at which it was looked at.
        attainment: there.
        ttft_s, tpot_s: median of a request alone.
        slo_scale: factor for both latencies of the SLO at which it would do; None where none would.
        goodput: rate that it carries, where it carries any.
    """

    label: str
    devices: int
    rate: float
    attainment: Attainment
    ttft_s: float
    tpot_s: float
    slo_scale: float | None
    goodput: float | None = None


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer.

    Attributes:
        feasible: there is a plan that does the job.
        reason: why this one, or why none.
        plan: complete; None where the job cannot be done.
        option: the family that won.
        options: the best plan of every family that has one, the winner first.
        affinity: whether KV may cross nodes.
        links: KV traffic of the plan at its rate, the busiest links first.
        largest_worker: share of the devices that the death of one worker takes along.
        nearest: what comes closest, where there is no plan.
        log: every candidate, in the order of the search.
        warnings: what the reader should know about the answer.
        latency: what the step times rest on.
        runs: simulations.
    """

    feasible: bool
    reason: str
    plan: Plan | None
    option: Option | None
    options: tuple[Option, ...]
    affinity: Affinity
    links: tuple[LinkLoad, ...]
    largest_worker: float | None
    nearest: Nearest | None
    log: tuple[Entry, ...]
    warnings: tuple[str, ...]
    latency: str
    runs: int

    @property
    def per_device(self) -> float | None:
        """Goodput per device of the plan, in requests per second."""
        return None if self.option is None else self.option.per_device

    def to_json(self) -> bytes:
        """Everything as indented JSON."""
        return jsonio.encode(self)
