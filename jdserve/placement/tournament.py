"""Finding the best of many candidates without measuring them all.

The most promising one is measured first. Every other one then is asked only whether it beats the best so
far: one run at the rate that it would need, which ends as soon as its verdict is certain. Whoever passes is measured.
Candidates are asked in rounds of fixed size, so the answer does not depend on the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from jdserve.placement.candidates import Family, Part, Unit
from jdserve.placement.evaluate import Evaluator
from jdserve.placement.result import Entry
from jdserve.placement.runner import Runner, Task

ROUND = 8
"""Candidates asked at a time."""


class Contestant(NamedTuple):
    """A candidate with what is known of it before any run.

    Attributes:
        what: a unit, or one instance of a phase.
        family, label, devices: see :class:`~jdserve.placement.result.Entry`.
        bound: rate that it cannot go beyond; infinite where unknown.
        why: what it cannot go beyond.
        guess: about its goodput; the most promising ones are tried first.
    """

    what: Unit | Part
    family: Family
    label: str
    devices: int
    bound: float
    why: str
    guess: float


class Score(NamedTuple):
    """A measured candidate: the highest grid step that it passes, and its devices."""

    step: int
    devices: int


class Goal(Protocol):
    """What makes one candidate better than another."""

    def to_beat(self, devices: int, best: Score | None) -> float | None:
        """The rate that a unit of ``devices`` needs in order to beat ``best`` (to count at all, where there is none);
        None where no rate would do."""
        ...

    def strictly(self) -> bool:
        """The rate must be exceeded; otherwise it may be met."""
        ...

    def why(self, rate: float, devices: int) -> str:
        """What it means not to reach ``rate``."""
        ...


class PerDevice:
    """The highest goodput per device.

    Args:
        evaluator: its grid of rates.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    def to_beat(self, devices: int, best: Score | None) -> float | None:
        """See :class:`Goal`."""
        return 0.0 if best is None else self._evaluator.rate(best.step) * devices / best.devices

    def strictly(self) -> bool:
        """See :class:`Goal`."""
        return True

    def why(self, rate: float, devices: int) -> str:
        """See :class:`Goal`."""
        return f"{rate / devices:.3g} per device"


class Budget:
    """The highest goodput of as many copies as fit into ``most`` devices.

    Args:
        evaluator: its grid of rates.
        most: devices.
    """

    def __init__(self, evaluator: Evaluator, most: int) -> None:
        self._evaluator = evaluator
        self._most = most

    def to_beat(self, devices: int, best: Score | None) -> float | None:
        """See :class:`Goal`."""
        if devices > self._most:
            return None
        if best is None:
            return 0.0
        return self._evaluator.rate(best.step) * (self._most // best.devices) / (self._most // devices)

    def strictly(self) -> bool:
        """See :class:`Goal`."""
        return True

    def why(self, rate: float, devices: int) -> str:
        """See :class:`Goal`."""
        return f"{rate * (self._most // devices):.3g} req/s on {self._most} devices"


class Smallest:
    """The fewest devices that meet the SLO at all; of equally many, the highest goodput.

    Args:
        evaluator: its grid of rates.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    def to_beat(self, devices: int, best: Score | None) -> float | None:
        """See :class:`Goal`."""
        if best is None or devices < best.devices:
            return 0.0
        return self._evaluator.rate(best.step) if devices == best.devices else None

    def strictly(self) -> bool:
        """See :class:`Goal`."""
        return True

    def why(self, rate: float, devices: int) -> str:
        """See :class:`Goal`."""
        return f"more than {rate:.3g} req/s on as many devices"


class AtRate:
    """The fewest devices that carry ``rate``, of at most ``most``.

    Args:
        evaluator: its grid of rates.
        rate: requests per second, above 0.
        most: devices.
    """

    def __init__(self, evaluator: Evaluator, rate: float, most: int) -> None:
        self._evaluator = evaluator
        self._rate = rate
        self._most = most

    def copies(self, step: int) -> int:
        """Units with goodput ``step`` that carry the rate."""
        return math.ceil(self._rate / self._evaluator.rate(step))

    def to_beat(self, devices: int, best: Score | None) -> float | None:
        """See :class:`Goal`."""
        most = self._most if best is None else self.copies(best.step) * best.devices - 1
        return self._rate / (most // devices) if most >= devices else None

    def strictly(self) -> bool:
        """See :class:`Goal`."""
        return False

    def why(self, rate: float, devices: int) -> str:
        """See :class:`Goal`."""
        return f"{self._rate:.3g} req/s with {round(self._rate / rate)} copies"


class Outcome(NamedTuple):
    """Who won, with the highest step that passes; None where nobody does."""

    winner: Contestant | None
    step: int
    log: tuple[Entry, ...]


class Tournament:
    """One search; see :func:`tournament` for the arguments."""

    def __init__(self, runner: Runner, goal: Goal, contestants: Seq[Contestant], exhaustive: bool) -> None:
        self._runner = runner
        self._evaluator = runner.tools.evaluator
        self._goal = goal
        self._all = contestants
        self._exhaustive = exhaustive
        self._order = sorted(range(len(contestants)), key=lambda n: (-contestants[n].guess / contestants[n].devices, n))
        self._steps: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        self._best: int | None = None

    def run(self, progress: Callable[[int, int], None] | None) -> Outcome:
        """Ask everybody."""
        at, order = 0, self._order
        while at < len(order):
            if self._exhaustive:
                batch = order
                self._measure(batch, {})
            else:
                batch = order[at : at + (1 if self._best is None else ROUND)]
                self._ask(batch)
            at += len(batch)
            if progress is not None:
                progress(at, len(order))
        best = self._best
        return Outcome(
            None if best is None else self._all[best],
            0 if best is None else self._steps[best],
            tuple(self._entry(n) for n in order),
        )

    def _needs(self, n: int) -> int | None:
        """The grid step that contestant ``n`` must pass to be the best; None where none would do."""
        best = None if self._best is None else Score(self._steps[self._best], self._all[self._best].devices)
        rate = self._goal.to_beat(self._all[n].devices, best)
        if rate is None:
            return None
        if rate <= 0:
            return self._evaluator.lowest
        step = self._evaluator.below(rate)
        return step + (self._goal.strictly() or self._evaluator.rate(step) < rate)

    def _ask(self, numbers: Seq[int]) -> None:
        """Prune by bounds, ask the others whether they beat the best, measure the first that does; then again."""
        asked: dict[int, int] = {}
        for n in numbers:
            one, wanted = self._all[n], self._needs(n)
            if wanted is None:
                self._reasons[n] = f"one unit has {one.devices} devices, which is too many to win"
            elif self._evaluator.rate(wanted) >= one.bound:
                self._reasons[n] = (
                    f"cannot go beyond {one.bound:.3g} req/s ({one.why}), needs {self._means(n, wanted)} to win"
                )
            elif wanted == self._evaluator.lowest:
                self._measure([n], {})
            else:
                asked[n] = wanted
        tasks = [Task(self._all[n].what, False, step, math.inf) for n, step in asked.items()]
        passed: list[int] = []
        for (n, step), yes in zip(asked.items(), self._runner.answer(tasks), strict=True):
            if yes:
                passed.append(n)
            else:
                self._reasons[n] = (
                    f"misses the SLO at {self._evaluator.rate(step):.3g} req/s, needs {self._means(n, step)} to win"
                )
        if passed:
            self._measure(passed[:1], asked)
            self._ask(passed[1:])

    def _means(self, n: int, step: int) -> str:
        return self._goal.why(self._evaluator.rate(step), self._all[n].devices)

    def _measure(self, numbers: Seq[int], known: Mapping[int, int]) -> None:
        tasks = [
            Task(one.what, True, known.get(n), math.inf if self._exhaustive else one.bound, self._start(one))
            for n in numbers
            for one in [self._all[n]]
        ]
        for n, step in zip(numbers, self._runner.answer(tasks), strict=True):
            if step is None:
                self._reasons[n] = "misses the SLO at any rate"
                continue
            self._steps[n] = step
            wanted = self._needs(n)
            if wanted is not None and step >= wanted:
                self._best = n

    def _start(self, one: Contestant) -> int | None:
        return self._evaluator.below(one.guess) if one.guess > 0 else None

    def _entry(self, n: int) -> Entry:
        one, won = self._all[n], n == self._best
        goodput = self._evaluator.rate(self._steps[n]) if n in self._steps else None
        reason = self._reasons.get(n) or ("best of its family" if won else f"others beat its {goodput:.3g} req/s")
        return Entry(
            family=one.family,
            label=one.label,
            devices=one.devices,
            verdict="best" if won else "lost",
            reason=reason,
            goodput=goodput,
            bound=None if math.isinf(one.bound) else one.bound,
        )


def tournament(
    runner: Runner,
    goal: Goal,
    contestants: Seq[Contestant],
    exhaustive: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """The best of ``contestants``.

    Args:
        runner: answers what must be simulated.
        goal: what is best.
        contestants: where two are equally good, the one with the higher guess per device wins, then the earlier one.
        exhaustive: measure every one of them, and use no bound.
        progress: told how many are done, of how many.
    """
    return Tournament(runner, goal, contestants, exhaustive).run(progress)
