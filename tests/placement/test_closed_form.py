"""Algorithms 1 and 2 of the worked 70B example, as printed in the article, and the faults of a literal translation."""

from __future__ import annotations

import math

import pytest

from jdserve.core.errors import InvalidPlan, InvalidWorkload
from jdserve.core.request import SLO
from jdserve.cost.closed_form import ClosedForm
from jdserve.placement.closed_form import algorithm_1, algorithm_2

SLOS = SLO(0.25, 0.05)


def test_algorithm_1_of_the_example() -> None:
    plan = algorithm_1(ClosedForm(), SLOS, 200, nodes=2, per_node=8)
    prefill, decode = plan.prefill, plan.decode
    assert (prefill.count, prefill.pp, prefill.tp) == (8, 5, 1)
    assert (round(prefill.goodput, 1), round(prefill.per_device, 2)) == (27.3, 5.47)
    assert (decode.count, decode.pp, decode.tp) == (4, 2, 2)
    assert (round(decode.goodput, 1), round(decode.per_device, 2)) == (50.5, 12.62)
    assert plan.devices == 56


def test_algorithm_2_of_the_example() -> None:
    plan = algorithm_2(ClosedForm(), SLOS, 200, nodes=2, per_node=8)
    assert (plan.prefill.count, plan.prefill.pp, plan.prefill.tp, plan.decode.tp) == (7, 2, 4, 2)
    assert (round(plan.goodput, 1), round(plan.goodput / 12, 2)) == (32.2, 2.68)
    assert plan.devices == 84


def test_a_tighter_ttft_wants_tensor_parallelism() -> None:
    prefill = algorithm_1(ClosedForm(), SLO(0.18, 0.05), 200, nodes=2, per_node=8).prefill
    assert (prefill.pp, prefill.tp) == (5, 2)


@pytest.mark.parametrize("algorithm", [algorithm_1, algorithm_2])
@pytest.mark.parametrize("slo", [SLO(0.01, 0.05), SLO(0.25, 0.001)])
def test_an_unreachable_slo_is_an_answer(algorithm, slo: SLO) -> None:
    with pytest.raises(InvalidPlan, match=r"\$\.slo.*: no .* meets? "):
        algorithm(ClosedForm(), slo, 200, nodes=2, per_node=8)


def test_a_model_that_fits_nowhere_and_nodes_of_one_device() -> None:
    small = ClosedForm(memory_bytes=1e9)
    with pytest.raises(InvalidPlan, match=r"does not fit: needs 8\.15 GiB per device for weights alone, have 0\.93"):
        algorithm_1(small, SLOS, 200, nodes=2, per_node=8)
    with pytest.raises(InvalidPlan, match="does not fit"):
        algorithm_2(small, SLOS, 200, nodes=2, per_node=8)
    with pytest.raises(InvalidPlan, match="needs 2 devices on each node, there is 1"):
        algorithm_2(ClosedForm(), SLOS, 200, nodes=2, per_node=1)


@pytest.mark.parametrize("rate", [-5, math.nan, math.inf])
def test_rates_that_are_none(rate: float) -> None:
    with pytest.raises(InvalidWorkload, match="rate: must be a finite number of at least 0"):
        algorithm_1(ClosedForm(), SLOS, rate, nodes=2, per_node=8)


def test_rate_0_keeps_one_of_each() -> None:
    plan = algorithm_1(ClosedForm(), SLOS, 0, nodes=2, per_node=8)
    assert (plan.prefill.count, plan.decode.count) == (1, 1)


def test_a_high_rate_is_not_cut() -> None:
    fast = ClosedForm(prefill_s=1e-6)
    assert algorithm_1(fast, SLOS, 200, nodes=2, per_node=8).prefill.goodput > 100_000
