"""Non-negative least squares for step times, the same bits on every platform.

A step time has at most six coefficients, so every set of them is tried and the best one without a negative value is
taken. Sums are exactly rounded and the small systems are solved in rational arithmetic: no linear-algebra library
decides the last bit of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from fractions import Fraction
from itertools import combinations

import msgspec

from jdserve.core.steptime import StepFeatures, StepTime


class FitError(msgspec.Struct, frozen=True):
    """How far a fit is from what it was fitted to.

    Attributes:
        rows: measurements used.
        mean: mean of the relative errors, without sign.
        worst: the largest of them.
    """

    rows: int
    mean: float
    worst: float


class Fit(msgspec.Struct, frozen=True):
    """Fitted coefficients and their error."""

    time: StepTime
    error: FitError


def nonnegative_least_squares(rows: Seq[Seq[float]], targets: Seq[float]) -> tuple[float, ...]:
    """The x >= 0 that minimises the sum over rows of (row . x - target)^2; zero where a column adds nothing.

    Args:
        rows: equally long, at most six columns.
        targets: one per row.
    """
    width = len(rows[0])
    scales = [math.sqrt(math.fsum(row[j] * row[j] for row in rows)) for j in range(width)]
    scaled = [[row[j] / scales[j] if scales[j] else 0.0 for j in range(width)] for row in rows]
    gram = [[Fraction(math.fsum(row[i] * row[j] for row in scaled)) for j in range(width)] for i in range(width)]
    right = [Fraction(math.fsum(row[i] * t for row, t in zip(scaled, targets, strict=True))) for i in range(width)]
    columns = [j for j in range(width) if scales[j]]
    best, least = (Fraction(0),) * width, Fraction(0)
    for size in range(1, len(columns) + 1):
        for chosen in combinations(columns, size):
            solved = _solve([[gram[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen])
            if solved is None or min(solved) < 0:
                continue
            # at a stationary point the objective is its value at zero minus x . right
            loss = -sum(x * right[i] for x, i in zip(solved, chosen, strict=True))
            if loss < least:
                least = loss
                values = dict(zip(chosen, solved, strict=True))
                best = tuple(values.get(j, Fraction(0)) for j in range(width))
    return tuple(float(x) / scale if scale else 0.0 for x, scale in zip(best, scales, strict=True))


def _solve(matrix: list[list[Fraction]], right: list[Fraction]) -> list[Fraction] | None:
    """Solution of a small symmetric system, None where it is singular."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for k in range(size):
        pivot = max(range(k, size), key=lambda i: abs(rows[i][k]))
        if abs(rows[pivot][k]) < Fraction(1, 10**13):  # columns are of length one
            return None
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(size):
            if i != k and rows[i][k]:
                factor = rows[i][k] / rows[k][k]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]


def fit_steps(features: Seq[StepFeatures], seconds: Seq[float]) -> Fit:
    """Coefficients that explain the measured ``seconds`` with the least squared *relative* error.

    Args:
        features: of the measured steps, at least one.
        seconds: above 0, one per step.
    """
    rows = [
        [
            value / time
            for value in (
                1.0,
                f.new_tokens,
                f.new_pairs,
                f.prefix_pairs,
                f.decode_seqs,
                f.decode_context,
            )
        ]
        for f, time in zip(features, seconds, strict=True)
    ]
    time = StepTime(*nonnegative_least_squares(rows, [1.0] * len(rows)))
    errors = [abs(time.seconds(f) / s - 1) for f, s in zip(features, seconds, strict=True)]
    return Fit(time, FitError(len(errors), math.fsum(errors) / len(errors), max(errors)))
