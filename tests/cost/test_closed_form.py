"""Every table of the worked 70B example, as printed in the article."""

from __future__ import annotations

import math

import pytest

from jdserve.core.errors import InvalidPlan
from jdserve.core.steptime import StepFeatures
from jdserve.cost.closed_form import ClosedForm
from jdserve.cost.hardware import Link
from jdserve.cost.queueing import crossover, largest_rate, one_device, two_shards, two_stages

D, K = 0.15, 1.6


@pytest.mark.parametrize(
    ("rate", "one", "stages", "shards"),
    [
        (0.5, 0.156, 0.151, 0.096),
        (2, 0.182, 0.157, 0.105),
        (4, 0.262, 0.166, 0.122),
        (6, 0.825, 0.181, 0.154),
        (8, math.inf, 0.206, 0.234),
        (10, math.inf, 0.262, 0.797),
    ],
)
def test_mean_ttft_of_equations_1_to_3(rate: float, one: float, stages: float, shards: float) -> None:
    assert [round(x, 3) if x < math.inf else x for x in (one_device(rate, D), two_stages(rate, D))] == [one, stages]
    assert round(two_shards(rate, D, K), 3) == shards


@pytest.mark.parametrize(("speedup", "rate"), [(1.6, 7.3), (1.3, 4.1), (1.9, 10.8)])
def test_crossover_of_stages_and_shards(speedup: float, rate: float) -> None:
    assert round(crossover(D, speedup), 1) == rate


@pytest.mark.parametrize(("slo", "stages", "shards"), [(0.12, 0, 3.8), (0.20, 7.6, 7.4), (0.30, 10.7, 8.7)])
def test_largest_rate_within_a_mean_ttft(slo: float, stages: float, shards: float) -> None:
    assert round(largest_rate(slo, D, D / 2), 1) == stages
    assert round(largest_rate(slo, D / K, D / K), 1) == shards


@pytest.mark.parametrize(
    ("tp", "pp", "goodput", "per_gpu"), [(1, 5, 27.3, 5.47), (1, 4, 21.7, 5.42), (1, 8, 43.1, 5.39), (4, 2, 32.2, None)]
)
def test_prefill_goodput(tp: int, pp: int, goodput: float, per_gpu: float | None) -> None:
    rate = ClosedForm().prefill_goodput(tp, pp, 0.25)
    assert round(rate, 1) == goodput
    assert per_gpu is None or round(rate / tp / pp, 2) == per_gpu


@pytest.mark.parametrize(
    ("tp", "pp", "goodput", "per_gpu"), [(2, 2, 50.5, 12.62), (2, 4, 97.2, 12.14), (4, 1, 48.0, 12.01)]
)
def test_decode_goodput(tp: int, pp: int, goodput: float, per_gpu: float) -> None:
    rate = ClosedForm().decode_goodput(tp, pp, 0.05)
    assert (round(rate, 1), round(rate / tp / pp, 2)) == (goodput, per_gpu)


@pytest.mark.parametrize(("tp", "gpus"), [(2, 82), (4, 72), (8, 88)])
def test_one_configuration_for_both_phases(tp: int, gpus: int) -> None:
    model = ClosedForm()
    counts = [math.ceil(200 / rate) for rate in (model.prefill_goodput(tp, 1, 0.25), model.decode_goodput(tp, 1, 0.05))]
    assert tp * sum(counts) == gpus


def test_kv_of_one_request_and_its_transfer() -> None:
    n_bytes = 512 * ClosedForm().kv_bytes
    assert round(n_bytes / 1e6) == 168
    assert [round(Link(speed).seconds(n_bytes) * 1e3, 2) for speed in (450e9, 50e9)] == [0.37, 3.36]
    assert round(Link(3.1e9).seconds(n_bytes) * 1e3) == 54


def test_decode_tpot_and_kv_budget_of_two_devices() -> None:
    model = ClosedForm(inputs=1024, outputs=0, decode_exponent=1.0)
    assert [round(model.decode_step(batch, 2, 1) * 1e3, 1) for batch in (1, 8, 32)] == [20.9, 21.3, 22.5]
    assert round((2 * model.memory_bytes - model.weight_bytes) / model.kv_bytes, -3) == 61_000


def test_step_costs_are_those_of_the_closed_form() -> None:
    model = ClosedForm()
    prompt = StepFeatures.of([(0, model.inputs)])
    for tp, pp in ((1, 5), (4, 2)):
        assert sum(model.cost("prefill", tp, pp).stages(prompt)) / 1e15 == pytest.approx(model.execution(tp, pp))
    for batch in (1, 300, 400):
        f = StepFeatures(decode_seqs=batch, decode_context=batch * model.context)
        assert sum(model.cost("decode", 2, 2).stages(f)) / 1e15 == pytest.approx(model.decode_step(batch, 2, 2))


@pytest.mark.parametrize(("tp", "pp", "what"), [(1, 1, "does not fit"), (3, 1, "heads"), (1, 3, "layers")])
def test_degrees_that_cannot_be(tp: int, pp: int, what: str) -> None:
    with pytest.raises(InvalidPlan, match=what):
        ClosedForm().check(tp, pp)


def test_no_rate_meets_an_slo_below_one_request() -> None:
    model = ClosedForm()
    assert model.prefill_goodput(1, 5, 0.01) == 0
    assert model.decode_goodput(2, 2, 0.001) == 0
