"""Attainment, its interval, the verdict that ends a run, and the search for the goodput."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdserve.core.errors import InvalidWorkload
from jdserve.core.plan import DecodeInstance, Plan, PrefillInstance
from jdserve.core.request import SLO
from jdserve.core.steptime import StepTime
from jdserve.sim.attainment import attainment, needed, requests_for, wilson
from jdserve.sim.goodput import find_rate, goodput, scaled, slo_scale
from jdserve.sim.lengths import FromTrace, Uniform
from jdserve.sim.simulate import simulate
from jdserve.sim.traces import load_trace
from jdserve.sim.verdict import Verdict
from jdserve.sim.workload import Source, Workload
from sim.plans import DECODE, PREFILL, Wires, plan_of, random_plan, random_workload

CHAT = Source(lengths=FromTrace(load_trace("sharegpt"), resample=False))


def served(prefill: StepTime = PREFILL, decode: StepTime = DECODE) -> Plan:
    return plan_of(
        PrefillInstance(name="p", tp=2, pages=4000, lm_tokens=2048, steptime=prefill),
        DecodeInstance(name="d", pages=4000, max_num_seqs=256, steptime=decode),
        max_model_len=4096,
        max_open_requests=10**6,
    )


def test_intervals() -> None:
    low, high = wilson(0.9, 100)
    assert (low, high) == pytest.approx((0.8256, 0.9448), abs=1e-4)
    alternating = attainment([True, True, True, False] * 100)
    assert (alternating.share, alternating.effective) == (0.75, 400)
    assert (alternating.low, alternating.high) == wilson(0.75, 400)
    # all misses in one stretch: neighbours tell nothing new
    stretch = attainment([True] * 300 + [False] * 100)
    assert stretch.effective < 40
    assert stretch.low < alternating.low
    empty = attainment([])
    assert (empty.share, empty.low, empty.high) == (0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="confidence must be between 0 and 1"):
        attainment([True], 1.0)


def test_the_interval_covers_what_it_should() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(300):
        found = attainment([rng.random() < 0.9 for _ in range(400)])
        covered += found.low <= 0.9 <= found.high
    assert covered >= 0.92 * 300


def test_requests_for_a_margin() -> None:
    assert requests_for(0.9, 0.02) == 865
    assert requests_for(0.99, 0.002) == 9508
    assert requests_for(1.0, 0.01) == requests_for(0.99, 0.01)
    assert [needed(0.9, 300), needed(0.9, 301), needed(0.99, 100)] == [270, 271, 99]
    with pytest.raises(ValueError, match="target must be in"):
        requests_for(0, 0.1)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_a_verdict_changes_no_answer(seed: int) -> None:
    rng = random.Random(seed)
    plan, workload, network = random_plan(rng), random_workload(rng), Wires(rng)
    whole = simulate(plan, workload, network=network)
    slo = SLO(rng.uniform(0.001, 0.1), rng.uniform(0.001, 0.02))
    met = int(whole.met(slo).sum())
    for misses in {0, len(workload) // 10, len(workload) - met, max(len(workload) - met - 1, 0)}:
        part = simulate(plan, workload, network=network, verdict=Verdict(slo, misses))
        enough = met >= len(workload) - misses
        assert (int(part.met(slo).sum()) >= len(workload) - misses) == enough
        assert part.duration <= whole.duration
        assert part.complete or part.events < whole.events


@given(true=st.floats(1e-6, 1e6), start=st.sampled_from((0.01, 1.0, 300.0)))
def test_brackets_find_any_rate(true: float, start: float) -> None:
    found = find_rate(lambda rate: rate <= true, start, tolerance=0.01)
    assert found.rate <= true < found.fails
    assert found.fails - found.rate <= 0.01 * found.rate
    assert not found.saturated
    assert [probe.passed for probe in found.probes] == [probe.rate <= true for probe in found.probes]


def test_no_rate_fails_or_passes() -> None:
    always = find_rate(lambda rate: True)
    assert always.saturated
    assert always.rate == 2.0**40
    limited = find_rate(lambda rate: True, limit=5.0)
    assert (limited.rate, limited.saturated, limited.fails) == (5.0, True, math.inf)
    never = find_rate(lambda rate: False)
    assert (never.rate, never.saturated) == (0.0, False)


def test_goodput_of_a_deterministic_line() -> None:
    """Equal gaps, one prompt at a time: the queue grows without end beyond one request per prefill time."""
    prefill = StepTime(base=0.1)
    plan = plan_of(
        PrefillInstance(name="p", pages=100, lm_tokens=1, max_batch=1, steptime=prefill),
        DecodeInstance(name="d", pages=100, max_num_seqs=64, steptime=StepTime(base=0.001)),
        max_model_len=64,
    )
    source = Source(lengths=Uniform(16, 4), process="fixed")
    found = goodput(plan, source, SLO(0.2, 0.05), requests=400)
    assert found.rate == pytest.approx(10.0, rel=0.05)
    assert found.rate < found.fails <= 1.011 * found.rate
    assert (found.devices, found.per_device) == (2, found.rate / 2)
    assert found.attainment.share >= 0.9
    assert goodput(plan, source, SLO(0.2, 0.05), requests=400, limit=4.0).saturated
    nothing = goodput(plan, source, SLO(0.09, 0.05), requests=50)
    assert not nothing.feasible
    assert nothing.attainment.share == 0.0


def test_goodput_grows_with_the_hardware_and_falls_with_the_target() -> None:
    def found(plan: Plan, target: float = 0.9) -> float:
        return goodput(plan, CHAT, SLO(0.2, 0.1), requests=150, tolerance=0.05, target=target, start=4.0).rate

    half = StepTime(base=PREFILL.base / 2, per_new_token=PREFILL.per_new_token / 2)
    assert found(served(), 0.99) < found(served()) < found(served(prefill=half))


def test_the_smallest_scale_is_exact() -> None:
    slo = SLO(0.2, 0.1)
    result = simulate(served(), CHAT.at(3.0, 200))
    for target in (0.5, 0.9, 0.99, 1.0):
        scale = slo_scale(result, slo, target)
        assert result.attainment(scaled(slo, scale * (1 + 1e-9))) >= target
        assert result.attainment(scaled(slo, scale * (1 - 1e-9))) < target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 0.0}, "start: must be a number above 0"),
        ({"start": math.nan}, "start: must be a number above 0"),
        ({"limit": -1.0}, "limit: must be a number above 0"),
        ({"tolerance": 0.0}, "tolerance: must be a number above 0"),
        ({"requests": -3}, "requests: must be at least 1"),
    ],
)
def test_bad_searches(change, message) -> None:
    with pytest.raises(InvalidWorkload, match=message):
        goodput(served(), CHAT, SLO(0.2, 0.1), **change)


def test_one_request_and_requests_that_end_with_the_prefill() -> None:
    result = simulate(served(), Workload.of([0.0], [100], [0]))
    assert (result.complete, result.generated, result.tpot_s().tolist()) == (True, (0,), [0.0])
    assert result.ends == result.first
    one, two = simulate(served(), Workload.of([1.0, 1.0], [100, 100], [1, 2])).ends
    assert one < two, "both prompts share a step, and one of them goes on"
