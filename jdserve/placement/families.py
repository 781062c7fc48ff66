"""The best plan of each family of candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import msgspec
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
    phase_counts,
)
from jdserve.placement.compose import Composed, compose, label
from jdserve.placement.job import Job
from jdserve.placement.layout import NoRoom
from jdserve.placement.result import Entry, Option
from jdserve.placement.runner import Runner, Task
from jdserve.placement.tournament import AtRate, Budget, Contestant, Goal, PerDevice, Smallest, tournament
from jdserve.sim.attainment import Attainment, attainment, needed

Reach = Literal["any", "host"]

Progress = Callable[[str, int, int], None]
"""Told what is being searched, how many candidates are done, and of how many."""


TRIES = 6
"""So many winners of a tournament may fail the longer run before a family is given up."""


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
        if job.rate is not None:
            return Smallest(self._evaluator)
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
        for _ in range(TRIES):
            told = self._told(f"{family} candidates")
            outcome = tournament(self._runner, self.goal(), contestants, self._exhaustive, told)
            choice = None
            if outcome.winner is not None:
                unit = outcome.winner.what
                assert isinstance(unit, Unit)
                choice = self._copied(family, unit, outcome.step)
            if choice is not None or outcome.winner is None:
                self.log += outcome.log
                return choice
            # what wins by a few requests may fail in the longer run that confirms it: then the next one is asked
            failed = next(entry for entry in outcome.log if entry.verdict == "best")
            self.log.append(msgspec.structs.replace(failed, verdict="lost", reason="no plan of it stands a longer run"))
            contestants.remove(outcome.winner)
        return None

    def _copied(self, family: Family, unit: Unit, step: int) -> Choice | None:
        """The plan of as many copies of ``unit`` as the job needs; ``step`` is its goodput."""
        goodput = self._evaluator.rate(step)
        copies = self._copies(unit.devices, goodput)
        limit = self._limit(unit.devices)

        def make(counts: tuple[int, ...]) -> Composed:
            if counts[0] > limit:
                raise NoRoom(f"{counts[0]} copies of {unit.label} do not fit")
            return compose(self._job, self._sizer, [unit] * counts[0], self.reach)

        return self._settle(family, make, (copies,), {"unit": goodput}, None if copies > 1 else step)

    def algorithm_1(self, wide: bool, veto: Callable[[Composed, float], bool]) -> Choice | None:
        """DistServe's Algorithm 1: the best degrees of each phase apart, and as many instances as the rate needs.

        Args:
            wide: choose degrees by the devices that the rate needs, not by goodput per device; without, this is done
                only where the others do not fit.
            veto: told the first plan and its rate; when it says so, there is no plan.
        """
        each, fewest = PerDevice(self._evaluator), self.goal() if self._job.rate is not None else None
        for goal in [fewest] if fewest and (wide or not self._job.rate) else [each, fewest]:
            choice = None if goal is None else self._phases_apart(goal, veto)
            if choice is not None:
                return choice
        return None

    def _phases_apart(self, goal: Goal, veto: Callable[[Composed, float], bool]) -> Choice | None:
        """Algorithm 1 with what makes one kind of instance better than another."""
        most = self._most_devices()
        sizes = [tp * pp for tp, pp in self.fits["decode"]]
        found = self._best_part("prefill", goal, most - min(sizes, default=most))
        if found is None:
            return None
        prefill, p = found
        found = self._best_part("decode", goal, most - prefill.devices)
        if found is None:
            return None
        decode, d = found
        rates = (self._evaluator.rate(p), self._evaluator.rate(d))
        counts = (1, 1)
        if self._job.rate != 0:
            counts = phase_counts(rates, (prefill.devices, decode.devices), self._job.rate, most, self.whole)

        def make(counts: tuple[int, ...]) -> Composed:
            parts = [msgspec.structs.replace(part, count=n) for part, n in zip((prefill, decode), counts, strict=True)]
            if sum(part.devices for part in parts) > most:
                raise NoRoom(f"{parts[0].label} and {parts[1].label} do not fit into {most} devices")
            units = [Unit("high", (one,)) for one, n in zip((prefill, decode), counts, strict=True) for _ in range(n)]
            return compose(self._job, self._sizer, units, "any")

        phases = {"prefill": rates[0], "decode": rates[1]}
        try:
            if veto(make(counts), self._job.rate or self._suggested(counts, phases)):
                return None
        except NoRoom:
            pass  # to be told with what else was tried
        return self._settle("high", make, counts, phases, None)

    def _best_part(self, role: Literal["prefill", "decode"], goal: Goal, most: int) -> tuple[Part, int] | None:
        """The best instance of one phase by itself, of at most ``most`` devices, and the highest step it passes."""
        contestants: list[Contestant] = []
        for tp, pp in self.fits[role]:
            part = Part(role, tp, pp)
            share = self.bounds.part_alone(part)
            if tp * pp > most:
                self._skip("high", part.label, part.devices, f"leaves no room for the other phase, {most} devices do")
            elif share < self._job.slo.attainment:
                what = "TTFT" if role == "prefill" else "TPOT"
                why = f"on an idle instance {share:.1%} of the requests meet the {what}"
                self._skip("high", part.label, part.devices, why)
            else:
                bound, guess = self.bounds.part_capacity(part), self.bounds.part_guess(part)
                why = "at best batching, without queues"
                contestants.append(Contestant(part, "high", part.label, part.devices, bound, why, guess))
        told = self._told(f"Algorithm 1, {role}")
        outcome = tournament(self._runner, goal, contestants, self._exhaustive, told)
        self.log += outcome.log
        if outcome.winner is None:
            return None
        assert isinstance(outcome.winner.what, Part)
        return outcome.winner.what, outcome.step

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
                    self._skip(family, label(composed), composed.devices, "together it misses the SLO at any rate")
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
        label=label(composed),
        plan=composed.plan,
        devices=composed.devices,
        rate=rate,
        before=before,
        attainment=after,
        added=added,
        goodput=goodput,
        phases=phases,
    )
