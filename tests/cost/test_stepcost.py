"""Sums of steps in closed form equal the sums of single steps, exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdserve.core.steptime import StepFeatures, StepTime
from jdserve.cost.stepcost import NO_LIMIT, Coefficients, Linear, Roofline, StepCost, Switched

numbers = st.integers(0, 10**6)
coefficients = st.builds(Coefficients, *[numbers] * 6)
stages = st.integers(1, 4)
linear = st.builds(Linear, coefficients, stages, coefficients)
roofline = st.builds(Roofline, coefficients, coefficients, coefficients, stages)
decode = st.builds(lambda n, c: StepFeatures(decode_seqs=n, decode_context=n + c), st.integers(1, 300), numbers)


@st.composite
def switched(draw: st.DrawFn) -> Switched:
    pp = draw(stages)
    below, above = (Linear(draw(coefficients), pp, draw(coefficients)) for _ in range(2))
    return Switched(below, above, draw(st.integers(1, 300)))


def after(f: StepFeatures, steps: int) -> StepFeatures:
    return StepFeatures(decode_seqs=f.decode_seqs, decode_context=f.decode_context + steps * f.decode_seqs)


@given(st.one_of(linear, roofline, switched()), decode, st.integers(0, 60))
def test_a_run_is_the_sum_of_its_steps(cost: StepCost, f: StepFeatures, k: int) -> None:
    assert cost.run(f, k) == sum(sum(cost.stages(after(f, i))) for i in range(k))


@given(st.one_of(linear, roofline, switched()), decode, st.integers(-1, 10**13))
def test_steps_within_is_the_inverse_of_run(cost: StepCost, f: StepFeatures, budget: int) -> None:
    k = cost.steps_within(f, budget)
    if budget < 0:
        assert k == 0
    elif k < NO_LIMIT:
        assert cost.run(f, k) <= budget < cost.run(f, k + 1)


def test_roofline_changes_its_bound_once_inside_a_run() -> None:
    cost = Roofline(Coefficients(base=100), Coefficients(base=10, context_token=1))
    f = StepFeatures(decode_seqs=2, decode_context=40)
    assert [cost.stages(after(f, i))[0] for i in (0, 25, 26)] == [100, 100, 102]
    assert cost.run(f, 40) == 26 * 100 + sum(50 + 2 * i for i in range(26, 40))


def test_steps_without_time_fit_any_budget() -> None:
    assert Linear(Coefficients()).steps_within(StepFeatures(decode_seqs=1, decode_context=1), 5) == NO_LIMIT


def test_plan_coefficients_are_for_a_whole_pass() -> None:
    time = StepTime(base=0.004, per_new_token=1e-5, per_new_pair=2e-9, per_prefix_pair=3e-9)
    f = StepFeatures(new_tokens=100, new_pairs=10_000, prefix_pairs=5_000)
    assert Linear.of(time, 4).stages(f) == (round(time.seconds(f) * 10**15 / 4),) * 4


def test_the_first_stage_takes_its_addition_once() -> None:
    cost = Linear(Coefficients(base=5), 3, Coefficients(base=2, context_token=1))
    f = StepFeatures(decode_seqs=1, decode_context=10)
    assert cost.stages(f) == (17, 5, 5)
    assert cost.run(f, 2) == 27 + 28


@pytest.mark.parametrize("bad", [(Coefficients(), 0), (Coefficients(base=-1), 1)])
def test_impossible_costs_are_refused(bad: tuple[Coefficients, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        Linear(*bad)
