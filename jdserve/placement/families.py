"""The best plan of each family of candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import numpy as np

from jdserve.placement.bounds import Bounds
from jdserve.placement.candidates import (
    Degrees,
    Family,
    Part,
    Unit,
    colocated_units,
    degrees,
    low_units,
    mixed_units,
)
from jdserve.placement.compose import Composed, compose
from jdserve.placement.job import Job
from jdserve.placement.layout import NoRoom
from jdserve.placement.result import Entry, Option
from jdserve.placement.runner import Runner, Task
from jdserve.placement.tournament import AtRate, Budget, Contestant, Goal, PerDevice, tournament
from jdserve.sim.attainment import Attainment, attainment, needed

Reach = Literal["any", "host"]

Progress = Callable[[str, int, int], None]
"""Told what is being searched, how many candidates are done, and of how many."""


class Choice(NamedTuple):
    """The best plan of a family."""

    option: Option
    composed: Composed


class Families:
    """All candidates of a job, and the best plan of each family.

    Attributes:
        log: every candidate so far.
        bounds: of its units.
        whole: the goodput of all devices counts, not that per device.
        degrees: of an instance.
        fits: degrees by role for which there is an instance.

    Args:
        job: see there.
        runner: simulates.
        most: devices of a plan, where that is a goal of its own; None for the best per device.
        exhaustive: measure every candidate.
        progress: see :data:`Progress`.
    """

    def __init__(self, job: Job, runner: Runner, most: int | None, exhaustive: bool, progress: Progress | None) -> None:
        self.log: list[Entry] = []
        self._job = job
        self._runner = runner
        self._sizer = runner.tools.sizer
        self._evaluator = runner.tools.evaluator
        self.bounds = Bounds(job, self._sizer)
        self._exhaustive = exhaustive
        self._progress = progress
        self._most = most
        self.whole = most is not None
        self.reach: Reach = "any"
        self.degrees: Degrees = degrees(job.spec, job.cluster.devices_per_node, min(job.devices, job.cluster.devices))
        self.fits: dict[str, list[tuple[int, int]]] = {
            role: [pair for pair in self.degrees.pairs if not isinstance(self._sizer.size(Part(role, *pair)), str)]
            for role in ("prefill", "decode", "colocated")
        }

    def skipped(self, family: Family) -> None:
        """Log the degrees that no candidate may have."""
        for what, why in self.degrees.skipped:
            self._skip(family, what, 0, why)
        roles: tuple[Literal["prefill", "decode", "colocated"], ...] = (
            ("colocated",) if family == "colocated" else ("prefill", "decode")
        )
        for role in roles:
            for tp, pp in self.degrees.pairs:
                part = Part(role, tp, pp)
                why = self._sizer.size(part)
                if isinstance(why, str):
                    self._skip(family, part.label, part.devices, why)

    def _skip(self, family: Family, label: str, devices: int, why: str) -> None:
        self.log.append(Entry(family=family, label=label, devices=devices, verdict="skipped", reason=why))

    def units(self, family: Family) -> list[Unit]:
        """Candidates of a family of units whose instances fit."""
        job = self._job
        per_node, nodes = job.cluster.devices_per_node, job.cluster.nodes
        most = min(job.devices, job.cluster.devices)
        prefill, decode = self.fits["prefill"], self.fits["decode"]
        inside = min(per_node, most)
        match family:
            case "low":
                return list(low_units(prefill, decode, per_node, nodes, most))
            case "mixed":
                return list(mixed_units(prefill, decode, inside))
            case _:
                return list(colocated_units(self.fits["colocated"]))

    def goal(self) -> Goal:
        """What the job asks for."""
        job = self._job
        if job.rate:
            return AtRate(self._evaluator, job.rate, job.devices)
        return PerDevice(self._evaluator) if self._most is None else Budget(self._evaluator, self._most)

    def contest(self, family: Family, units: Iterable[Unit]) -> list[Contestant]:
        """The units that a request alone does not rule out."""
        able = self._able(family, units)
        prefill = {} if self._exhaustive or family == "colocated" else self._prefill_limits(able)
        contestants: list[Contestant] = []
        for unit in able:
            bound, guess, why = self.bounds.capacity(unit), self.bounds.guess(unit), "at best batching, without queues"
            alone = prefill.get(unit.parts[0], math.inf)
            if alone < bound:
                bound, why = alone, "its prefill by itself"
            contestants.append(Contestant(unit, family, unit.label, unit.devices, bound, why, min(guess, alone)))
        return contestants

    def _prefill_limits(self, units: Iterable[Unit]) -> dict[Part, float]:
        """Rates at which prefill instances by themselves miss the TTFT: no decode instance makes up for that."""
        parts = list(dict.fromkeys(unit.parts[0] for unit in units))
        tasks = [
            Task(part, True, None, self.bounds.part_capacity(part), self._evaluator.below(self.bounds.part_guess(part)))
            for part in parts
            if self.bounds.part_guess(part) > 0
        ]
        answers = self._runner.answer(tasks)
        return {
            task.what: 0.0 if step is None else self._evaluator.rate(step + 1)
            for task, step in zip(tasks, answers, strict=True)
            if isinstance(task.what, Part)
        }

    def _able(self, family: Family, units: Iterable[Unit]) -> list[Unit]:
        target = self._job.slo.attainment
        able: list[Unit] = []
        for unit in units:
            alone = self.bounds.alone(unit)
            if alone.share < target:
                self._skip(
                    family,
                    unit.label,
                    unit.devices,
                    f"on an idle unit {alone.share:.1%} of the requests meet the SLO; median TTFT {alone.ttft_s:.3g} s,"
                    f" TPOT {alone.tpot_s:.3g} s",
                )
            else:
                able.append(unit)
        return able

    def best_unit(self, family: Family) -> Choice | None:
        """The best plan of a family of units; None where there is none."""
        contestants = self.contest(family, self.units(family))
        outcome = tournament(
            self._runner, self.goal(), contestants, self._exhaustive, self._told(f"{family} candidates")
        )
        self.log += outcome.log
        if outcome.winner is None:
            return None
        unit = outcome.winner.what
        assert isinstance(unit, Unit)
        goodput = self._evaluator.rate(outcome.step)
        copies = self._copies(unit.devices, goodput)
        limit = self._limit(unit.devices)

        def make(counts: tuple[int, ...]) -> Composed:
            if counts[0] > limit:
                raise NoRoom(f"{counts[0]} copies of {unit.label} do not fit")
            return compose(self._job, self._sizer, [unit] * counts[0], self.reach)

        return self._settle(family, make, (copies,), {"unit": goodput}, None if copies > 1 else outcome.step)

    def algorithm_1(self, wide: bool) -> Choice | None:
        """DistServe's Algorithm 1: the best degrees of each phase apart, and as many instances as the rate needs.

        Args:
            wide: choose degrees by the devices that the rate needs, not by goodput per device.
        """
        best: list[tuple[Part, int]] = []
        for role in ("prefill", "decode"):
            contestants: list[Contestant] = []
            for tp, pp in self.fits[role]:
                part = Part(role, tp, pp)
                share = self.bounds.part_alone(part)
                if share < self._job.slo.attainment:
                    what = "TTFT" if role == "prefill" else "TPOT"
                    why = f"on an idle instance {share:.1%} of the requests meet the {what}"
                    self._skip("high", part.label, part.devices, why)
                    continue
                bound, guess = self.bounds.part_capacity(part), self.bounds.part_guess(part)
                why = "at best batching, without queues"
                contestants.append(Contestant(part, "high", part.label, part.devices, bound, why, guess))
            # the paper is after goodput per device, whatever the rate; a wide search after the fewest devices
            goal = self.goal() if self._job.rate and wide else PerDevice(self._evaluator)
            outcome = tournament(self._runner, goal, contestants, self._exhaustive, self._told(f"Algorithm 1, {role}"))
            self.log += outcome.log
            if outcome.winner is None:
                return None
            assert isinstance(outcome.winner.what, Part)
            best.append((outcome.winner.what, outcome.step))
        (prefill, p), (decode, d) = best
        rates = (self._evaluator.rate(p), self._evaluator.rate(d))
        counts = phase_counts(
            rates, (prefill.devices, decode.devices), self._job.rate or None, self._most_devices(), self.whole
        )
        if counts is None:
            why = f"{prefill.label} and {decode.label} do not fit into {self._most_devices()} devices together"
            self._skip("high", f"{prefill.label} + {decode.label}", prefill.devices + decode.devices, why)
            return None

        def make(counts: tuple[int, ...]) -> Composed:
            n, m = counts
            if n * prefill.devices + m * decode.devices > self._most_devices():
                raise NoRoom(f"{n} x {prefill.label} and {m} x {decode.label} do not fit")
            units = [Unit("high", (prefill,))] * n + [Unit("high", (decode,))] * m
            return compose(self._job, self._sizer, units, "any")

        return self._settle("high", make, counts, {"prefill": rates[0], "decode": rates[1]}, None)

    def _most_devices(self) -> int:
        return min(self._job.devices, self._job.cluster.devices)

    def _limit(self, devices: int) -> int:
        """Copies of a unit that the job allows."""
        return self._most_devices() // devices

    def _copies(self, devices: int, goodput: float) -> int:
        if self._job.rate:
            return min(math.ceil(self._job.rate / goodput), self._limit(devices))
        return 1 if self._most is None else max(min(self._most, self._most_devices()) // devices, 1)

    def _settle(
        self,
        family: Family,
        make: Callable[[tuple[int, ...]], Composed],
        counts: tuple[int, ...],
        phases: dict[str, float],
        known: int | None,
    ) -> Choice | None:
        """The plan of ``counts`` copies, with copies added until it carries the rate, or taken away that it can spare.

        Args:
            family: see :class:`Option`.
            make: the plan of so many copies.
            counts: as the search suggests.
            phases: see :class:`Option`.
            known: goodput of the plan, as a grid step, where it is known already.
        """
        evaluator, rate = self._evaluator, self._job.rate
        try:
            composed = make(counts)
            if not rate:
                step = known
                if step is None:
                    start = evaluator.below(self._suggested(counts, phases))
                    step = evaluator.highest(composed, "both", None, math.inf, start)
                if step is None:
                    self._skip(family, _label(composed), composed.devices, "together it misses the SLO at any rate")
                    return None
                at = evaluator.rate(step)
                found = evaluator.attainment(composed, at)
                return Choice(_option(family, composed, at, found, found, 0, at, phases), composed)
            before, first = evaluator.attainment(composed, rate), counts
            composed, counts, after = self._adjust(make, counts, rate)
        except NoRoom as error:
            self._skip(family, "the composed plan", 0, f"does not carry the rate: {error}")
            return None
        added = sum(counts) - sum(first)
        return Choice(_option(family, composed, rate, before, after, added, None, phases), composed)

    def _suggested(self, counts: tuple[int, ...], phases: dict[str, float]) -> float:
        return min(count * goodput for count, goodput in zip(counts, phases.values(), strict=True))

    def _adjust(
        self, make: Callable[[tuple[int, ...]], Composed], counts: tuple[int, ...], rate: float
    ) -> tuple[Composed, tuple[int, ...], Attainment]:
        """Add the copies that are missing at ``rate``; where none is, take away those that can be spared."""
        evaluator, slo = self._evaluator, self._job.slo
        composed = make(counts)
        if evaluator.passes(composed, rate):
            for place in range(len(counts)):
                while counts[place] > 1:
                    fewer = (*counts[:place], counts[place] - 1, *counts[place + 1 :])
                    if not evaluator.passes(make(fewer), rate):
                        break
                    counts = fewer
        while True:
            composed = make(counts)
            result = evaluator.run(composed, rate, times=self._job.confirm)
            met = result.met(slo)
            if int(met.sum()) >= needed(slo.attainment, len(met)):
                return composed, counts, attainment(met.tolist())
            late = int(np.sum(result.ttft_s() > slo.ttft_s)), int(np.sum(result.tpot_s() > slo.tpot_s))
            place = 0 if len(counts) == 1 or late[0] >= late[1] else 1
            counts = (*counts[:place], counts[place] + 1, *counts[place + 1 :])

    def _told(self, what: str) -> Callable[[int, int], None] | None:
        progress = self._progress
        return None if progress is None else lambda done, total: progress(what, done, total)


def phase_counts(
    rates: tuple[float, float], devices: tuple[int, int], rate: float | None, most: int, whole: bool
) -> tuple[int, int] | None:
    """How many instances of each phase; None where not even one of each fits into ``most`` devices.

    Args:
        rates: goodput of one instance of each.
        devices: of one instance of each.
        rate: to carry; None for the mix of the highest goodput.
        most: devices in all.
        whole: the goodput of all devices together counts, not that per device.
    """
    if rate is not None:
        return math.ceil(rate / rates[0]), math.ceil(rate / rates[1])
    best: tuple[float, tuple[int, int]] | None = None
    for n in range(1, most // devices[0] + 1):
        for m in range(1, (most - n * devices[0]) // devices[1] + 1):
            value = min(n * rates[0], m * rates[1]) / (1 if whole else n * devices[0] + m * devices[1])
            if best is None or value > best[0]:
                best = value, (n, m)
    return None if best is None else best[1]


def _label(composed: Composed) -> str:
    kinds: dict[str, int] = {}
    for instance in composed.plan.instances:
        role = {"p": "prefill", "d": "decode", "c": "colocated"}[instance.name[0]]
        how = f" {mode}" if (mode := getattr(instance, "mode", "")) else ""
        key = f"{role}{how} tp{instance.tp} pp{instance.pp}"
        kinds[key] = kinds.get(key, 0) + 1
    return " + ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _option(
    family: Family,
    composed: Composed,
    rate: float,
    before: Attainment,
    after: Attainment,
    added: int,
    goodput: float | None,
    phases: dict[str, float],
) -> Option:
    return Option(
        family=family,
        label=_label(composed),
        devices=composed.devices,
        rate=rate,
        before=before,
        attainment=after,
        added=added,
        goodput=goodput,
        phases=phases,
    )
