"""The tournament against brute force over made-up candidates, and what bounds are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdserve.placement.candidates import Part, low_units, mixed_units, phase_counts
from jdserve.placement.evaluate import Evaluator, highest
from jdserve.placement.job import Sample
from jdserve.placement.runner import Task
from jdserve.placement.tournament import AtRate, Budget, Contestant, Goal, PerDevice, Smallest, tournament
from jdserve.sim.workload import Workload

GRID: Any = Evaluator(SimpleNamespace(tolerance=0.1))  # type: ignore[arg-type]


class Known:
    """A runner that knows the answers: candidate n passes up to step ``truth[n]``."""

    def __init__(self, truth: list[int | None]) -> None:
        self.tools = SimpleNamespace(evaluator=GRID)
        self.truth = truth
        self.climbed = 0

    def answer(self, tasks: Seq[Task]) -> list[int | None]:
        found: list[int | None] = []
        for task in tasks:
            truth = self.truth[task.what.count]
            if not task.climb:
                assert task.step is not None
                found.append(int(truth is not None and task.step <= truth))
                continue
            self.climbed += 1
            high = GRID.below(min(task.limit, 1e9)) + 1
            passes = lambda step, truth=truth: truth is not None and step <= truth  # noqa: E731
            found.append(highest(passes, task.step, high, GRID.lowest, task.start))
        return found


candidates = st.lists(
    st.tuples(st.none() | st.integers(-20, 60), st.integers(1, 8), st.floats(1.0, 3.0), st.floats(0.3, 3.0)),
    min_size=1,
    max_size=25,
)


def goals(rate: float, most: int) -> list[Goal]:
    return [PerDevice(GRID), Budget(GRID, most), AtRate(GRID, rate, most), Smallest(GRID)]


def value(goal: Goal, step: int | None, devices: int) -> float:
    """What brute force would compare; higher is better, and -inf does not count."""
    if step is None:
        return -math.inf
    rate = GRID.rate(step)
    if isinstance(goal, PerDevice):
        return rate / devices
    if isinstance(goal, Smallest):
        return -devices + rate / 1e9
    if isinstance(goal, Budget):
        return rate * (goal._most // devices) if devices <= goal._most else -math.inf
    assert isinstance(goal, AtRate)
    total = goal.copies(step) * devices
    return -total if total <= goal._most else -math.inf


@settings(max_examples=200, deadline=None)
@given(candidates, st.floats(0.05, 500), st.integers(1, 40), st.booleans())
def test_the_tournament_finds_the_best(rows: list, rate: float, most: int, exhaustive: bool) -> None:
    truth = [row[0] for row in rows]
    contestants = [
        Contestant(
            Part("prefill", 1, 1, n),
            "low",
            str(n),
            devices,
            math.inf if step is None else GRID.rate(step + 1) * slack,
            "of the test",
            0.0 if step is None else GRID.rate(step) * luck,
        )
        for n, (step, devices, slack, luck) in enumerate(rows)
    ]
    for goal in goals(rate, most):
        runner: Any = Known(truth)
        outcome = tournament(runner, goal, contestants, exhaustive)
        best = max(value(goal, step, devices) for step, devices, *_ in rows)
        if outcome.winner is None:
            assert best == -math.inf
            continue
        won = int(outcome.winner.label)
        assert outcome.step == truth[won]
        assert value(goal, outcome.step, outcome.winner.devices) == pytest.approx(best)
        assert len(outcome.log) == len(rows)
        assert [entry.label for entry in outcome.log if entry.verdict == "best"] == [str(won)]


def test_few_candidates_are_measured() -> None:
    truth: list[int | None] = list(range(40))
    contestants = [
        Contestant(Part("prefill", 1, 1, n), "low", str(n), 1, math.inf, "", GRID.rate(n)) for n in range(40)
    ]
    runner: Any = Known(truth)
    outcome = tournament(runner, PerDevice(GRID), contestants)
    assert outcome.step == 39
    assert runner.climbed == 1
    assert "misses the SLO at 45.3 req/s, needs 45.3 per device to win" in outcome.log[5].reason


def test_grid_steps_of_rates() -> None:
    for step in (-30, -1, 0, 1, 77):
        rate = GRID.rate(step)
        assert GRID.below(rate) == step
        assert GRID.below(rate * 0.999) == step - 1
        assert GRID.below(rate * 1.05) == step


def test_prompts_with_a_known_prefix_cost_what_is_new() -> None:
    blocks = ((1, 2), (1, 3), (1, 2, 4), (9,))
    work = Workload(arrivals=(0,) * 4, inputs=(110, 100, 150, 60), outputs=(1,) * 4, blocks=blocks, block_tokens=50)
    sample = Sample(work, 4)
    np.testing.assert_array_equal(sample.fresh, [110, 50, 50, 60])
    assert sample.shared
    assert not Sample(Workload(arrivals=(0,), inputs=(5,), outputs=(1,)), 1).shared


def test_units_of_algorithm_2_hold_segments_of_both_phases() -> None:
    pairs = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]
    units = list(low_units(pairs, pairs, per_node=4, nodes=2, most=8))
    labels = {unit.label for unit in units}
    assert "1 x prefill tp2 pp1 + 1 x decode tp2 pp1" in labels
    assert "1 x prefill tp1 pp2 + 1 x decode tp1 pp2" in labels  # stages inside the node
    assert "1 x prefill tp2 pp2 + 1 x decode tp2 pp2 over 2 nodes" in labels
    assert not any("tp4 pp2" in label for label in labels)  # a segment of 4 leaves no room
    assert all(unit.devices <= 4 * unit.span for unit in units)


def test_mixed_units_are_no_multiples() -> None:
    labels = {unit.label for unit in mixed_units([(1, 1)], [(1, 1)], 6)}
    assert "2 x prefill tp1 pp1 + 3 x decode tp1 pp1" in labels
    assert "2 x prefill tp1 pp1 + 2 x decode tp1 pp1" not in labels
    assert "1 x prefill tp1 pp1 + 1 x decode tp1 pp1" not in labels  # a unit of Algorithm 2


def test_counts_of_phases() -> None:
    assert phase_counts((27.3, 50.5), (5, 4), 200, 99, False) == (8, 4)
    assert phase_counts((10, 20), (1, 1), None, 8, False) == (2, 1)
    assert phase_counts((10, 20), (1, 1), None, 8, True) == (5, 3)
