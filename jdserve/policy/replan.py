"""When to plan again: watches the requests and fires when they have become others than those that were planned for.

Time is cut into windows of equal length. The first one, or what the plan was made for, is the reference. A window is
off when its arrival rate or the mean length of its prompts or answers differs from the reference by a share that
matters *and* by more than chance explains. The trigger fires when two windows in a row are off in the same way; the
second one, which lies wholly behind the change, is the new reference. So noise near a boundary changes nothing, a burst
shorter than a window changes nothing, and a step of the load fires once.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec

from jdserve.core.errors import InvalidWorkload

NS = 10**9
"""Nanoseconds per second."""

BINS = 10
"""Parts of a window whose counts tell how bursty the arrivals are."""

ENOUGH = 30
"""Lengths below which a mean is not judged."""

Quantity = Literal["rate", "input", "output"]


class Arrival(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """A request came in.

    Attributes:
        input_len: tokens of its prompt.
    """

    input_len: int


class Answer(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """A request is over.

    Attributes:
        output_len: tokens of its answer.
    """

    output_len: int


class Clock(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """Nothing happened but time; without requests somebody has to say so."""


Event = Arrival | Answer | Clock


class Mean(msgspec.Struct, frozen=True):
    """A mean length.

    Attributes:
        value: tokens; 0 where nothing was seen.
        count: of what was seen; infinite for a figure that is not measured.
        square_error: square of its standard error.
    """

    value: float = 0.0
    count: float = 0
    square_error: float = 0.0


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a stretch of time, or those that a plan was made for. No request reads as 0 everywhere.

    Attributes:
        rate: requests per second.
        input, output: lengths of prompts, and of answers that ended.
        seconds: length of the stretch; infinite for figures that are not measured.
        dispersion: variance of counts of arrivals over their mean: 1 for Poisson arrivals, above 1 for bursts; never
            below 1.
    """

    rate: float = 0.0
    input: Mean = Mean()
    output: Mean = Mean()
    seconds: float = math.inf
    dispersion: float = 1.0

    @classmethod
    def planned(cls, rate: float, mean_input: float, mean_output: float) -> Traffic:
        """What a plan was made for.

        Raises:
            InvalidWorkload: a figure is negative or not finite.
        """
        for name, value in (("rate", rate), ("mean_input", mean_input), ("mean_output", mean_output)):
            if not (math.isfinite(value) and value >= 0):
                raise InvalidWorkload(f"{name}: must be a finite number of at least 0, got {value}")
        return cls(rate=rate, input=Mean(mean_input, math.inf), output=Mean(mean_output, math.inf))

    @property
    def rate_high(self) -> float:
        """The highest rate that such arrivals may well have had (two standard errors): what a plan should carry, so
        that a smaller one is not too small the moment it is there."""
        return self.rate + 2 * math.sqrt(self.dispersion * self.rate / self.seconds)


class Shift(msgspec.Struct, frozen=True):
    """What has changed.

    Attributes:
        quantity: arrival rate, or mean length of prompts or answers.
        before: in the reference.
        after: in the new one.
    """

    quantity: Quantity
    before: float
    after: float


class Replan(msgspec.Struct, frozen=True, tag=True, tag_field="command"):
    """Search again.

    Attributes:
        traffic: for these requests; they are the reference from now on.
        shifts: why, at least one.
    """

    traffic: Traffic
    shifts: tuple[Shift, ...]


class TriggerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a :class:`ReplanTrigger` judges.

    Attributes:
        window_s: seconds of a window; the trigger fires one to three of them after a change.
        change: least relative difference that matters.
        certainty: standard errors beyond which a difference is no chance.

    Raises:
        InvalidWorkload: a figure is not a finite number above 0.
    """

    window_s: float = 300.0
    change: float = 0.2
    certainty: float = 4.0

    def __post_init__(self) -> None:
        for name in ("window_s", "change", "certainty"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidWorkload(f"{name}: must be a finite number above 0, got {value}")


class _Sum:
    """Count, sum and sum of squares."""

    def __init__(self) -> None:
        self.count = self.total = self.squares = 0

    def add(self, value: int) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    def mean(self) -> Mean:
        if not self.count:
            return Mean()
        n = self.count
        variance = (self.squares - self.total * self.total / n) / (n - 1) if n > 1 else 0.0
        return Mean(self.total / n, n, max(variance, 0.0) / n)


class _Off(NamedTuple):
    """One way in which a window is off."""

    quantity: Quantity
    more: bool


class ReplanTrigger:
    """The profiler of the workload, and the trigger.

    Attributes:
        reference: what the present plan is for; None until the first window is over.
        traffic: the last whole window; all zeros before there is one.

    Args:
        config: see there.
        reference: what the present plan was made for; by default the first window says.
        start: nanoseconds at which the first window begins.
    """

    def __init__(self, config: TriggerConfig, reference: Traffic | None = None, start: int = 0) -> None:
        self.reference = reference
        self.traffic = Traffic()
        self._config = config
        self._length = max(round(config.window_s * NS), BINS)
        self._start = start
        self._off: frozenset[_Off] = frozenset()
        # spread of the counts since the reference: squares of their distances from the mean of their window, and what
        # these would be for Poisson arrivals
        self._spread = self._usual = 0.0
        self._open()

    def handle(self, event: Event, now: int) -> list[Replan]:
        """Take note of ``event`` at ``now``, in nanoseconds that never decrease."""
        commands = self._pass(now)
        match event:
            case Arrival(input_len):
                self._bins[(now - self._start) * BINS // self._length] += 1
                self._inputs.add(input_len)
            case Answer(output_len):
                self._outputs.add(output_len)
            case Clock():
                pass
        return commands

    def _open(self) -> None:
        self._bins = [0] * BINS
        self._inputs, self._outputs = _Sum(), _Sum()

    def _pass(self, now: int) -> list[Replan]:
        """Close the windows that have ended by ``now``."""
        commands: list[Replan] = []
        closed = 0
        while now >= self._start + self._length:
            if closed == 3:  # windows without requests are all alike from the third on
                self._start += (now - self._start) // self._length * self._length
                break
            commands += self._close()
            self._start += self._length
            closed += 1
        return commands

    def _close(self) -> list[Replan]:
        traffic = self.traffic = self._measured()
        self._open()
        reference = self.reference
        if reference is None:
            self._settle(traffic)
            return []
        off = self._judge(reference, traffic)
        again, self._off = off & self._off, off
        if not again:
            return []
        shifts = tuple(
            Shift(quantity, _value(reference, quantity), _value(traffic, quantity)) for quantity, _ in sorted(again)
        )
        self._settle(traffic)
        return [Replan(traffic, shifts)]

    def _measured(self) -> Traffic:
        mean = sum(self._bins) / BINS
        self._spread += sum((count - mean) ** 2 for count in self._bins)
        self._usual += (BINS - 1) * mean
        seconds = self._length / NS
        return Traffic(
            rate=self._inputs.count / seconds,
            input=self._inputs.mean(),
            output=self._outputs.mean(),
            seconds=seconds,
            dispersion=max(1.0, self._spread / self._usual) if self._usual else 1.0,
        )

    def _settle(self, traffic: Traffic) -> None:
        self.reference = traffic
        self._off = frozenset()
        self._spread = self._usual = 0.0

    def _judge(self, reference: Traffic, traffic: Traffic) -> frozenset[_Off]:
        """In which ways ``traffic`` is off."""
        config = self._config
        found: set[_Off] = set()
        before, after = reference.rate, traffic.rate
        if abs(after - before) > config.change * before:
            # the roots of counts have one and the same spread, however many there are
            noise = traffic.dispersion * (1 / traffic.seconds + 1 / reference.seconds)
            distance = 2 * abs(_root(traffic) - _root(reference)) / math.sqrt(noise)
            if distance > config.certainty:
                found.add(_Off("rate", after > before))
        for quantity in ("input", "output"):
            old: Mean = getattr(reference, quantity)
            new: Mean = getattr(traffic, quantity)
            if min(old.count, new.count) < ENOUGH or abs(new.value - old.value) <= config.change * old.value:
                continue
            if abs(new.value - old.value) > config.certainty * math.sqrt(old.square_error + new.square_error):
                found.add(_Off(quantity, new.value > old.value))
        return frozenset(found)


def _root(traffic: Traffic) -> float:
    """Root of a rate, with the correction that keeps few requests from looking like a change."""
    return math.sqrt(traffic.rate + 3 / 8 / traffic.seconds)


def _value(traffic: Traffic, quantity: Quantity) -> float:
    return traffic.rate if quantity == "rate" else getattr(traffic, quantity).value
