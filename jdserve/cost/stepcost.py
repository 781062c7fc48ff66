"""How long the steps of one instance take, in whole femtoseconds.

Coefficients are rounded to integers once, when a cost is built. After that every sum is exact: k decode steps in closed
form take precisely as long as k single steps, on every platform, so a simulator that jumps ahead cannot drift from one
that steps token by token.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from jdserve.core.steptime import StepFeatures, StepTime

FS = 10**15
"""Femtoseconds per second."""

NO_LIMIT = 1 << 62
"""Steps that fit any budget, where steps take no time."""


def femtoseconds(seconds: float) -> int:
    """``seconds`` as whole femtoseconds."""
    return round(seconds * FS)


Lines = tuple[tuple[int, int], ...]


class StepCost(Protocol):
    """Time of the steps of one instance (role, tp and pp fixed)."""

    @property
    def pp(self) -> int:
        """Pipeline stages of the instance."""
        ...

    def stages(self, f: StepFeatures) -> tuple[int, ...]:
        """Femtoseconds that the step takes in each of the ``pp`` stages."""
        ...

    def run(self, f: StepFeatures, k: int) -> int:
        """Femtoseconds of ``k`` successive decode steps that begin with ``f``, through all stages one after another.

        ``f`` has no new tokens; every step adds ``f.decode_seqs`` to the context. Equal to the sum of single steps.
        """
        ...

    def steps_within(self, f: StepFeatures, budget: int) -> int:
        """Most such steps that end within ``budget`` femtoseconds; :data:`NO_LIMIT` where steps take no time."""
        ...

    def lines(self, seqs: int) -> Lines | None:
        """Of each stage, (femtoseconds, femtoseconds per token of context) of a step that decodes ``seqs`` sequences.

        None where the time is no line in the context.
        """
        ...


class Coefficients(NamedTuple):
    """Femtoseconds per unit of each step feature (see :class:`~jdserve.core.steptime.StepFeatures`)."""

    base: int = 0
    new_token: int = 0
    new_pair: int = 0
    prefix_pair: int = 0
    decode_seq: int = 0
    context_token: int = 0

    @classmethod
    def of(cls, time: StepTime, share: float = 1.0) -> Coefficients:
        """``time`` times ``share``, rounded to femtoseconds."""
        return cls(
            femtoseconds(time.base * share),
            femtoseconds(time.per_new_token * share),
            femtoseconds(time.per_new_pair * share),
            femtoseconds(time.per_prefix_pair * share),
            femtoseconds(time.per_decode_seq * share),
            femtoseconds(time.per_context_token * share),
        )

    def plus(self, other: Coefficients) -> Coefficients:
        """The sum."""
        return Coefficients(*(a + b for a, b in zip(self, other, strict=True)))

    def value(self, f: StepFeatures) -> int:
        """Femtoseconds of a step with features ``f``."""
        base, new_token, new_pair, prefix_pair, decode_seq, context_token = self
        time = base + decode_seq * f.decode_seqs + context_token * f.decode_context
        if f.new_tokens:
            time += new_token * f.new_tokens + new_pair * f.new_pairs + prefix_pair * f.prefix_pairs
        return time

    def in_context(self, seqs: int) -> tuple[int, int]:
        """(femtoseconds, femtoseconds per token of context) of a step that decodes ``seqs`` sequences."""
        return self.base + self.decode_seq * seqs, self.context_token

    def line(self, f: StepFeatures) -> tuple[int, int]:
        """(first, slope): step i of a decode run that begins with ``f`` takes ``first + i * slope``."""
        return (
            self.base + self.decode_seq * f.decode_seqs + self.context_token * f.decode_context,
            self.context_token * f.decode_seqs,
        )


NOTHING = Coefficients()


def _sum(first: int, slope: int, k: int) -> int:
    """Sum of ``first + i * slope`` over i in 0..k-1."""
    return k * first + slope * (k * (k - 1) // 2)


def line_fit(first: int, slope: int, budget: int) -> int:
    """Largest k whose :func:`_sum` is within ``budget``; both arguments of the line are non-negative."""
    if budget < 0:
        return 0
    if slope == 0:
        return budget // first if first else NO_LIMIT
    # slope k^2 + (2 first - slope) k - 2 budget <= 0
    half = 2 * first - slope
    return (math.isqrt(half * half + 8 * slope * budget) - half) // (2 * slope)


class Linear:
    """A cost that is linear in the features.

    Attributes:
        later: time of a stage after the first.

    Args:
        stage: time of one stage.
        pp: number of stages.
        first: what the first stage takes in addition (the driver's share of each step).
    """

    __slots__ = ("_first", "_pass", "later", "pp")

    def __init__(self, stage: Coefficients, pp: int = 1, first: Coefficients = NOTHING) -> None:
        _check(pp, stage, stage.plus(first))
        self.pp = pp
        self.later = stage
        self._first = stage.plus(first)
        self._pass = Coefficients(*(pp * a + b for a, b in zip(stage, first, strict=True)))

    @classmethod
    def of(cls, time: StepTime, pp: int = 1) -> Linear:
        """The cost of plan coefficients, which are for one whole pass, shared evenly by ``pp`` stages."""
        return cls(Coefficients.of(time, 1 / pp), pp)

    def stages(self, f: StepFeatures) -> tuple[int, ...]:
        """See :class:`StepCost`."""
        first = self._first.value(f)
        return (first,) if self.pp == 1 else (first, *(self.later.value(f),) * (self.pp - 1))

    def run(self, f: StepFeatures, k: int) -> int:
        """See :class:`StepCost`."""
        return _sum(*self._pass.line(f), k)

    def steps_within(self, f: StepFeatures, budget: int) -> int:
        """See :class:`StepCost`."""
        return line_fit(*self._pass.line(f), budget)

    def lines(self, seqs: int) -> Lines | None:
        """See :class:`StepCost`."""
        return (self._first.in_context(seqs), *(self.later.in_context(seqs),) * (self.pp - 1))


class Switched:
    """Two costs, one below and one from a decode batch size on.

    Args:
        below: of steps with fewer than ``threshold`` decoding sequences.
        above: of the others; as many stages.
        threshold: in sequences.
    """

    __slots__ = ("_threshold", "above", "below", "pp")

    def __init__(self, below: StepCost, above: StepCost, threshold: int) -> None:
        if below.pp != above.pp:
            raise ValueError(f"one cost has {below.pp} stages, the other {above.pp}")
        self.pp = below.pp
        self.below = below
        self.above = above
        self._threshold = threshold

    def _cost(self, f: StepFeatures) -> StepCost:
        return self.below if f.decode_seqs < self._threshold else self.above

    def stages(self, f: StepFeatures) -> tuple[int, ...]:
        """See :class:`StepCost`."""
        return self._cost(f).stages(f)

    def run(self, f: StepFeatures, k: int) -> int:
        """See :class:`StepCost`."""
        return self._cost(f).run(f, k)

    def steps_within(self, f: StepFeatures, budget: int) -> int:
        """See :class:`StepCost`."""
        return self._cost(f).steps_within(f, budget)

    def lines(self, seqs: int) -> Lines | None:
        """See :class:`StepCost`."""
        return (self.below if seqs < self._threshold else self.above).lines(seqs)


class Phased:
    """Different costs of steps that only prefill, only decode, and do both.

    Args:
        prefill, decode, mixed: of such steps; as many stages.
    """

    __slots__ = ("decode", "mixed", "pp", "prefill")

    def __init__(self, prefill: StepCost, decode: StepCost, mixed: StepCost) -> None:
        if not prefill.pp == decode.pp == mixed.pp:
            raise ValueError(f"costs of one instance have {prefill.pp}, {decode.pp} and {mixed.pp} stages")
        self.pp = prefill.pp
        self.prefill = prefill
        self.decode = decode
        self.mixed = mixed

    def stages(self, f: StepFeatures) -> tuple[int, ...]:
        """See :class:`StepCost`."""
        if not f.new_tokens:
            return self.decode.stages(f)
        return (self.mixed if f.decode_seqs else self.prefill).stages(f)

    def run(self, f: StepFeatures, k: int) -> int:
        """See :class:`StepCost`."""
        return self.decode.run(f, k)

    def steps_within(self, f: StepFeatures, budget: int) -> int:
        """See :class:`StepCost`."""
        return self.decode.steps_within(f, budget)

    def lines(self, seqs: int) -> Lines | None:
        """See :class:`StepCost`."""
        return self.decode.lines(seqs)


class Roofline:
    """In each stage the longer of arithmetic and memory traffic, and what neither hides.

    Args:
        compute, memory: time of the arithmetic and of the memory traffic of one stage.
        other: added to the longer of them: all-reduces, hand-off to the next stage, launch.
        pp: number of stages.
    """

    __slots__ = ("compute", "memory", "other", "pp")

    def __init__(self, compute: Coefficients, memory: Coefficients, other: Coefficients = NOTHING, pp: int = 1) -> None:
        _check(pp, compute, memory, other)
        self.pp = pp
        self.compute = compute
        self.memory = memory
        self.other = other

    def stages(self, f: StepFeatures) -> tuple[int, ...]:
        """See :class:`StepCost`."""
        return (max(self.compute.value(f), self.memory.value(f)) + self.other.value(f),) * self.pp

    def _pieces(self, f: StepFeatures) -> tuple[int, tuple[int, int], tuple[int, int]]:
        """(steps before the bound changes, line of these steps, line of all later ones counted from step 0)."""
        compute, memory, other = self.compute.line(f), self.memory.line(f), self.other.line(f)
        now, later = sorted((compute, memory), reverse=True)
        if later[1] <= now[1]:  # the larger one also grows at least as fast
            change, later = NO_LIMIT, now
        else:
            change = -((later[0] - now[0]) // (later[1] - now[1]))
        pp = self.pp
        return (
            change,
            (pp * (now[0] + other[0]), pp * (now[1] + other[1])),
            (pp * (later[0] + other[0]), pp * (later[1] + other[1])),
        )

    def run(self, f: StepFeatures, k: int) -> int:
        """See :class:`StepCost`."""
        change, now, later = self._pieces(f)
        if k <= change:
            return _sum(*now, k)
        return _sum(*now, change) + _sum(later[0] + change * later[1], later[1], k - change)

    def steps_within(self, f: StepFeatures, budget: int) -> int:
        """See :class:`StepCost`."""
        change, now, later = self._pieces(f)
        fits = line_fit(*now, budget)
        if fits < change or change == NO_LIMIT:
            return fits
        rest = budget - _sum(*now, change)
        return change + line_fit(later[0] + change * later[1], later[1], rest)

    def lines(self, seqs: int) -> Lines | None:
        """See :class:`StepCost`; the bound may change on the way."""
        return None


def _check(pp: int, *coefficients: Coefficients) -> None:
    """Runs need non-negative lines; a fitted square term of prefill may be slightly negative."""
    if pp < 1:
        raise ValueError(f"pp must be at least 1, got {pp}")
    for one in coefficients:
        if min(one.base, one.context_token, one.base + one.decode_seq) < 0:
            raise ValueError(f"base and decode coefficients must not be negative, got {one}")
