"""The search: the same answer as brute force, complete plans, and answers to jobs that cannot be done."""

from __future__ import annotations

import json
import math
import pickle

import pytest

from jdserve.core.errors import InvalidPlan, InvalidWorkload
from jdserve.core.plan import ColocatedInstance, DecodeInstance, Plan, PrefillInstance
from jdserve.core.request import SLO
from jdserve.cost.closed_form import ClosedForm
from jdserve.cost.hardware import Link, hardware
from jdserve.cost.models import model
from jdserve.cost.roofline import Efficiency, RooflineModel
from jdserve.placement.evaluate import highest
from jdserve.sim.lengths import SharedPrefix, Uniform
from jdserve.sim.simulate import simulate
from jdserve.sim.workload import Source
from placement.toy import SLOS, cluster, run, source


@pytest.mark.parametrize(
    "goal",
    [
        pytest.param({}, id="per device"),
        pytest.param({"rate": 150.0}, id="rate"),
        pytest.param({"devices": 3}, id="budget", marks=pytest.mark.long),
    ],
)
def test_pruning_gives_the_answer_of_brute_force(goal: dict) -> None:
    pruned, brute = run(**goal, requests=60), run(**goal, requests=60, exhaustive=True)
    assert pruned.plan == brute.plan
    assert pruned.runs < brute.runs
    assert pruned.option is not None
    found = {(entry.family, entry.label): entry for entry in brute.log if entry.verdict != "skipped"}
    for entry in pruned.log:
        if entry.goodput is not None:
            assert entry.goodput == found[entry.family, entry.label].goodput
    # no bound was below what its candidate really does
    for entry in pruned.log:
        real = found[entry.family, entry.label].goodput if entry.verdict != "skipped" else None
        assert entry.bound is None or real is None or real <= entry.bound, entry


def test_several_processes_give_the_same_bytes() -> None:
    one, two = (run(workers=workers, wide=False, affinity="low", requests=40) for workers in (1, 2))
    assert one.to_json() == two.to_json()


def test_a_plan_is_complete_and_runs_as_it_is() -> None:
    result = run(wide=False, affinity="low")
    assert result.plan is not None
    assert result.option is not None
    plan = Plan.from_json(result.plan.to_json())
    plan.check(model("llama-3-8b"))
    assert plan.slo == SLOS
    assert plan.predicted is not None
    assert plan.predicted.low <= plan.predicted.attainment <= plan.predicted.high
    assert plan.predicted.rate == result.option.goodput
    assert {type(instance) for instance in plan.instances} == {PrefillInstance, DecodeInstance}
    assert all(instance.steptime is not None and instance.pages > 512 for instance in plan.instances)
    # the coefficients in the plan tell nearly the same story as the model that it was planned with
    alone = simulate(plan, source().at(plan.predicted.rate / 2, 80))
    assert alone.attainment(SLOS) >= 0.9
    read = json.loads(result.to_json())
    assert read["feasible"] is True
    assert read["plan"]["instances"][0]["lm_tokens"] >= 64


def test_a_rate_is_carried_jointly_by_algorithm_1() -> None:
    result = run(cluster(nodes=2, per_node=4), rate=300.0, wide=False, steady=True)
    assert result.affinity.level == "high"
    option, plan = result.option, result.plan
    assert option is not None
    assert plan is not None
    assert option.family == "high"
    assert set(option.phases) == {"prefill", "decode"}
    assert option.attainment.share >= 0.9
    assert option.goodput is not None
    assert option.goodput >= 300
    assert sum(len(stage.devices) for worker in plan.workers for stage in worker.stages) == option.devices


def test_slow_links_keep_both_phases_on_a_node() -> None:
    slow = Link(1e9, 2e-5)
    result = run(cluster(2, 2, slow), rate=120.0, wide=False)
    assert result.affinity.level == "low"
    assert "takes 46.6 ms over one link" in result.affinity.reason
    assert "one TPOT is 12 ms" in result.affinity.reason
    assert result.plan is not None
    assert result.plan.reach == "host"
    for instance in result.plan.instances:
        if isinstance(instance, PrefillInstance):
            assert result.plan.near(instance.name)
    assert not any(load.link.startswith("nic") for load in result.links)


def test_a_link_that_a_plan_would_fill_keeps_them_too() -> None:
    # one request crosses in time, so many per second do not
    result = run(cluster(2, 2, Link(3e9, 2e-6)), SLO(0.06, 0.02), rate=120.0, wide=False, steady=True)
    assert result.affinity.level == "low"
    assert result.affinity.busiest is not None
    assert "KV would load nic" in result.affinity.reason
    assert any(entry.family == "high" and "KV would load" in entry.reason for entry in result.log)


def test_colocated_wins_where_disaggregation_does_not_pay() -> None:
    """One device: there is no other way. And with long answers to short prompts there is nothing to take apart."""
    result = run(cluster(per_node=1))
    assert result.plan is not None
    assert [type(instance) for instance in result.plan.instances] == [ColocatedInstance]


def test_shared_prefixes_are_planned_with() -> None:
    tail = Uniform(64, 8)
    shared = Source(lengths=SharedPrefix(tail, groups=2, blocks=2))
    alike = Source(lengths=Uniform(64 + 2 * 512, 8))
    with_cache, without = (run(workload=one, wide=False, affinity="low", max_model_len=2048) for one in (shared, alike))
    assert with_cache.per_device is not None
    assert without.per_device is not None
    assert with_cache.per_device > 1.5 * without.per_device


# jobs that cannot be done, or hardly: PLAN-01, 02, 03, 04, 09


@pytest.mark.parametrize(
    ("slo", "what"), [(SLO(0.0001, 0.012), "TTFT"), (SLO(0.06, 0.0001), "TPOT")], ids=["ttft", "tpot"]
)
def test_an_unreachable_slo_names_the_nearest(slo: SLO, what: str) -> None:
    result = run(slo=slo)
    assert not result.feasible
    assert result.plan is None
    assert result.nearest is not None
    assert result.nearest.attainment.share < 0.9
    assert result.nearest.slo_scale is not None
    assert result.nearest.slo_scale > 10
    assert "no configuration meets the SLO at any rate" in result.reason
    assert what in result.reason


def test_a_model_that_fits_nowhere_says_what_it_needs() -> None:
    result = run(model="llama-3.1-405b")
    assert not result.feasible
    assert "does not fit: needs" in result.reason
    assert "GiB per device" in result.reason
    assert all(entry.verdict == "skipped" for entry in result.log)


def test_nodes_of_one_device_have_no_unit() -> None:
    result = run(cluster(2, 1), affinity="low", wide=False)
    assert not result.feasible
    assert "there are 2 nodes of 1 devices" in result.reason


@pytest.mark.parametrize("rate", [-5.0, math.nan, math.inf])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(InvalidWorkload, match="rate: must be a finite number of at least 0"):
        run(rate=rate)


def test_rate_0_gives_the_smallest_plan() -> None:
    result = run(rate=0.0, wide=False)
    assert result.feasible
    assert result.plan is not None
    assert len(result.plan.instances) == 2
    everything = run(rate=0.0)
    assert everything.option is not None
    assert everything.option.devices == 1


def test_a_rate_beyond_the_cluster_tells_what_it_carries() -> None:
    result = run(rate=1e5, wide=False)
    assert not result.feasible
    assert "1e+05 req/s needs more than 3 devices" in result.reason
    assert result.nearest is not None
    assert result.nearest.goodput is not None
    assert 1 < result.nearest.goodput < 1e5


def test_a_very_high_goodput_is_not_cut() -> None:
    spec = model("llama-3-8b")
    row = hardware("h100-80g")
    fast = RooflineModel(
        spec=spec,
        dtype="bfloat16",
        device=type(row)(
            **{name: getattr(row, name) for name in row.__struct_fields__} | {"bfloat16": 1e19, "bytes_per_s": 1e18}
        ),
        efficiency=Efficiency(step_s=1e-7),
    )
    result = run(cluster(per_node=2), latency=fast, wide=False, requests=40)
    assert result.per_device is not None
    assert result.per_device > 5_000


def test_degrees_that_do_not_divide_are_skipped_with_the_valid_ones() -> None:
    result = run(cluster(per_node=8), model="qwen2.5-7b", wide=False, requests=30, tolerance=0.2)
    reasons = {entry.label: entry.reason for entry in result.log if entry.verdict == "skipped"}
    assert "28 query heads" in reasons["tp 8"]
    assert "valid: 1, 2, 4" in reasons["tp 8"]
    assert "does not divide 28 layers; valid: 1, 2, 4, 7, 14, 28" in reasons["pp 3"]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidPlan, match="neither a path nor a known model"):
        run(model="gpt-9")
    with pytest.raises(InvalidWorkload, match="nowhere"):
        run(workload="nowhere.csv")


def test_highest_finds_the_last_that_passes() -> None:
    for truth in (-40, -3, 0, 7, 8, 100):
        for low, high, start in ((None, 500, None), (None, 101, None), (None, 300, 5), (-50, 200, None)):
            assert highest(lambda n, t=truth: n <= t, low, high, -100, start) == truth
    assert highest(lambda n: False, None, 50, -100) is None
    assert highest(lambda n: True, None, 50, -100, 7) == 49  # saturated


def test_a_latency_model_travels_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(ClosedForm())) == ClosedForm()
