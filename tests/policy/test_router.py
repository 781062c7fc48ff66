from __future__ import annotations

import msgspec
import pytest

from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import ColocatedInstance, DecodeInstance, HostedStage, Plan, PrefillInstance, Worker
from jdserve.core.request import SLO
from jdserve.core.steptime import QueueTime, StepTime
from jdserve.policy.build import RouterConfig, machine_for, router_for
from jdserve.policy.colocated import ColocatedScheduler
from jdserve.policy.commands import Command, Dispatch, Reject, Release, Retire
from jdserve.policy.decode import DecodeScheduler
from jdserve.policy.events import (
    Arrived,
    Cancelled,
    Draining,
    Finished,
    KVLanded,
    KVReady,
    LeaseExpired,
    PeerFailed,
    PeerJoined,
    Preempted,
    PullFailed,
    StepDone,
    Tick,
)
from jdserve.policy.prefill import PrefillScheduler
from jdserve.policy.router import Router


def two_by_two(max_retries: int = 3) -> Router:
    return Router(["p0", "p1"], ["d0", "d1"], [], max_retries)


def arrive(router: Router, *prompts: int, output: int = 10) -> list[str]:
    """Names of the instances that requests a, b, ... go to."""
    places: list[str] = []
    for id, prompt in zip("abcdefgh", prompts, strict=False):
        (dispatch,) = router.handle(Arrived(id, prompt, output), 0)
        assert isinstance(dispatch, Dispatch)
        assert dispatch.source is None
        places.append(dispatch.instance)
    return places


def ready(router: Router, id: str, source: str, tokens: int = 5, output: int = 9) -> list[Command]:
    return router.handle(KVReady(id, source, tokens, output), 0)


def test_a_prompt_goes_where_the_fewest_tokens_wait() -> None:
    router = two_by_two()
    assert arrive(router, 300, 900, 120, 2048, 450, 60) == ["p0", "p1", "p0", "p0", "p1", "p1"]
    assert (router.load("p0"), router.load("p1")) == (2468, 1410)
    assert router.requests == 6


def test_kv_stays_near_while_it_can() -> None:
    near = {"p0": ("d0",), "p1": ("d1",)}
    router = Router(["p0", "p1"], ["d0", "d1"], [], near=near)
    assert arrive(router, 9, 5, 3, 1) == ["p0", "p1", "p1", "p1"]
    assert [ready(router, id, "p1") for id in "bc"] == [[Dispatch(id, "d1", "p1")] for id in "bc"]
    router.handle(PeerFailed("d1"), 0)
    assert ready(router, "d", "p1") == [Dispatch("d", "d0", "p1")]


def test_a_plan_says_which_decode_instances_are_near() -> None:
    def at(name: str, host: str, device: int) -> Worker:
        return Worker(name, (HostedStage(name, (device,)),), host)

    plan = Plan(
        model="m",
        max_model_len=64,
        reach="host",
        instances=(
            *(PrefillInstance(name=name, pages=8, lm_tokens=64) for name in ("p0", "p1")),
            *(DecodeInstance(name=name, pages=8, max_num_seqs=4) for name in ("d0", "d1", "d2")),
        ),
        workers=(at("p0", "a", 0), at("p1", "b", 0), at("d0", "a", 1), at("d1", "b", 1), at("d2", "a", 2)),
    )
    assert RouterConfig.of(plan).near == {"p0": ("d0", "d2"), "p1": ("d1",)}
    assert RouterConfig.of(msgspec.structs.replace(plan, reach="any")).near == {}


def test_ties_go_to_fewer_requests_then_to_the_order_of_the_plan() -> None:
    router = two_by_two()
    # p0 has 3 + 3 tokens of two requests, p1 has 6 of one
    assert arrive(router, 3, 6, 3, 1) == ["p0", "p1", "p0", "p1"]


def test_requests_can_be_counted_first() -> None:
    router = Router(["p0", "p1"], ["d"], [], balance="requests")
    assert arrive(router, 300, 900, 120, 2048, 450, 60) == ["p0", "p1", "p0", "p1", "p0", "p1"]


def test_the_decode_instance_is_chosen_after_prefill_by_its_load() -> None:
    router = two_by_two()
    arrive(router, 5, 5, 5)
    assert ready(router, "a", "p0", 5, 9) == [Dispatch("a", "d0", "p0")]
    assert (router.load("p0"), router.load("p1"), router.load("d0")) == (5, 5, 14)
    assert ready(router, "b", "p1", 5, 1) == [Dispatch("b", "d1", "p1")]
    assert ready(router, "c", "p0", 5, 9) == [Dispatch("c", "d1", "p0")]
    assert (router.load("d0"), router.load("d1")) == (14, 20)
    assert router.place("c") == "d1"


def test_a_request_weighs_on_a_colocated_instance_until_it_is_finished() -> None:
    router = Router([], [], ["c0", "c1"])
    assert arrive(router, 5, 3, 3, output=2) == ["c0", "c1", "c1"]
    assert (router.load("c0"), router.load("c1")) == (7, 10)
    assert router.handle(Finished("b"), 0) == []
    assert (router.load("c1"), router.requests) == (5, 2)


def test_finished_releases_kv_that_may_still_be_parked() -> None:
    router = two_by_two()
    arrive(router, 5, 5)
    ready(router, "a", "p0")
    ready(router, "b", "p1")
    assert router.handle(KVLanded("a"), 0) == []
    assert router.handle(Finished("a"), 0) == []
    assert router.handle(Finished("b"), 0) == [Release("b", "p1")]
    assert router.idle()
    assert not any(router.load(name) for name in ("p0", "p1", "d0", "d1"))


def test_cancel_tells_everyone_who_holds_the_request() -> None:
    router = two_by_two()
    arrive(router, 5, 5, 5)
    assert router.handle(Cancelled("a"), 0) == [Release("a", "p0")]
    ready(router, "b", "p1")
    assert router.handle(Cancelled("b"), 0) == [Release("b", "p1"), Release("b", "d0")]
    ready(router, "c", "p0")
    router.handle(KVLanded("c"), 0)
    assert router.handle(Cancelled("c"), 0) == [Release("c", "d0")]
    assert router.handle(Cancelled("c"), 0) == []
    assert router.idle()


def test_late_events_about_unknown_or_moved_requests_are_ignored() -> None:
    router = two_by_two()
    for event in (
        Cancelled("x"),
        KVReady("x", "p0", 1, 1),
        KVLanded("x"),
        PullFailed("x"),
        Preempted("x", 1, 1),
        Finished("x"),
    ):
        assert router.handle(event, 0) == []
    arrive(router, 5)
    assert ready(router, "a", "p1") == [], "it is on p0"
    for event in (KVLanded("a"), PullFailed("a"), Preempted("a", 1, 1)):
        assert router.handle(event, 0) == [], "it is not on a decode instance"
    assert router.place("a") == "p0"


def test_preempted_goes_to_prefill_again_and_is_no_retry() -> None:
    router = two_by_two(max_retries=0)
    arrive(router, 5)
    for _ in range(3):
        ready(router, "a", "p0", 5, 9)
        router.handle(KVLanded("a"), 0)
        assert router.handle(Preempted("a", 9, 6), 0) == [Dispatch("a", "p0")]
        assert (router.load("p0"), router.load("d0")) == (9, 0)
    ready(router, "a", "p0")
    assert router.handle(Preempted("a", 9, 6), 0) == [Release("a", "p0"), Dispatch("a", "p0")], "landing not seen"


def test_a_failed_pull_is_prefilled_again_a_few_times() -> None:
    router = two_by_two(max_retries=2)
    arrive(router, 5)
    for _ in range(2):
        ready(router, "a", "p0")
        assert router.handle(PullFailed("a", "timeout"), 0) == [
            Release("a", "d0"),
            Release("a", "p0"),
            Dispatch("a", "p0"),
        ]
        assert (router.load("p0"), router.load("d0")) == (6, 0), "with the token that prefill sampled"
    ready(router, "a", "p0")
    assert router.handle(PullFailed("a", "timeout"), 0) == [
        Release("a", "d0"),
        Release("a", "p0"),
        Reject("a", "the pull to d0 failed: timeout; given up after 2 retries"),
    ]
    assert router.idle()


def test_a_dead_prefill_instance_loses_its_prompts_and_its_parked_kv() -> None:
    router = two_by_two()
    arrive(router, 5, 100, 5, 5, 5)
    ready(router, "c", "p0")
    ready(router, "d", "p0")
    router.handle(KVLanded("d"), 0)
    assert router.handle(PeerFailed("p0"), 0) == [
        Dispatch("a", "p1"),
        Release("c", "d0"),
        Dispatch("c", "p1"),
        Dispatch("e", "p1"),
    ]
    assert router.place("d") == "d1", "its KV had landed"
    assert (router.load("p0"), router.load("p1"), router.load("d0")) == (0, 116, 0)
    assert router.handle(PeerFailed("p0"), 0) == []


def test_a_dead_decode_instance_sends_its_requests_back_to_prefill() -> None:
    router = Router(["p0", "p1"], ["d0"], [], 3)
    arrive(router, 5, 9, 5)
    ready(router, "b", "p1")
    ready(router, "a", "p0")
    router.handle(KVLanded("a"), 0)
    assert router.handle(PeerFailed("d0"), 0) == [
        Reject("a", "no live decode instance"),
        Release("b", "p1"),
        Reject("b", "no live decode instance"),
    ]
    assert ready(router, "c", "p0") == [Release("c", "p0"), Reject("c", "no live decode instance")]
    assert router.idle()

    router = two_by_two()
    arrive(router, 5, 9)
    ready(router, "b", "p1")
    ready(router, "a", "p0")
    assert router.handle(PeerFailed("d0"), 0) == [Release("b", "p1"), Dispatch("b", "p0")], "a is on d1"
    assert router.place("a") == "d1"


def test_failures_are_counted_as_retries() -> None:
    router = Router([], [], ["c0", "c1"], max_retries=1)
    arrive(router, 5)
    assert router.handle(PeerFailed("c0"), 0) == [Dispatch("a", "c1")]
    router.handle(PeerJoined("c0"), 0)
    assert router.handle(PeerFailed("c1"), 0) == [Reject("a", "c1 failed; given up after 1 retries")]
    assert router.load("c1") == 0


def test_newcomers_are_rejected_while_a_role_is_dead() -> None:
    router = two_by_two()
    for name in ("p0", "p1"):
        router.handle(PeerFailed(name), 0)
    assert router.handle(Arrived("a", 5, 5), 0) == [Reject("a", "no live prefill or colocated instance")]
    router.handle(PeerJoined("p1"), 0)
    assert router.handle(Arrived("a", 5, 5), 0) == [Dispatch("a", "p1")]
    for name in ("d0", "d1"):
        router.handle(PeerFailed(name), 0)
    assert router.handle(Arrived("b", 5, 5), 0) == [Reject("b", "no live decode instance")]
    assert router.handle(Arrived("c", 5, 1), 0) == [Dispatch("c", "p1")], "one token needs no decode instance"


def test_colocated_instances_take_over_for_a_dead_role() -> None:
    router = Router(["p"], ["d"], ["c"])
    assert arrive(router, 5, 5) == ["p", "c"]
    router.handle(PeerFailed("d"), 0)
    assert router.handle(Arrived("x", 5, 5), 0) == [Dispatch("x", "c")]
    assert router.handle(PeerFailed("p"), 0) == [Dispatch("a", "c")]


def test_draining_rejects_newcomers_and_finishes_the_rest() -> None:
    router = two_by_two()
    arrive(router, 5)
    assert router.handle(Draining(), 0) == []
    assert router.handle(Arrived("b", 5, 5), 0) == [Reject("b", "the service is draining: it takes no new requests")]
    assert ready(router, "a", "p0") == [Dispatch("a", "d0", "p0")]
    router.handle(KVLanded("a"), 0)
    assert router.handle(Preempted("a", 7, 3), 0) == [Dispatch("a", "p0")]


def test_what_it_refuses() -> None:
    router = two_by_two()
    for event in (StepDone(0), LeaseExpired("a")):
        with pytest.raises(TypeError, match=f"Router takes no {type(event).__name__}"):
            router.handle(event, 0)
    arrive(router, 5)
    with pytest.raises(ValueError, match="request a has arrived already"):
        router.handle(Arrived("a", 5, 5), 0)
    for event in (PeerFailed("x"), PeerJoined("x")):
        with pytest.raises(ValueError, match="'x' is not in the plan"):
            router.handle(event, 0)
    with pytest.raises(ValueError, match="two instances are called 'p'"):
        Router(["p"], ["p"], [])
    with pytest.raises(ValueError, match="max_retries must be at least 0, got -1"):
        Router(["p"], ["d"], [], -1)


def test_a_plan_gives_its_machines() -> None:
    instances = (
        PrefillInstance(name="p", pages=10, lm_tokens=8),
        DecodeInstance(name="d", pages=20, max_num_seqs=2),
        ColocatedInstance(name="c", pages=30, token_budget=8, max_num_seqs=2),
    )
    plan = Plan(
        model="m",
        max_model_len=32,
        page_size=4,
        instances=instances,
        workers=(Worker(name="w", stages=tuple(HostedStage(i.name, (n,)) for n, i in enumerate(instances))),),
    )
    assert RouterConfig.of(plan) == RouterConfig(
        prefill=("p",), decode=("d",), colocated=("c",), max_open=plan.max_open_requests
    )
    router = router_for(plan)
    assert arrive(router, 5, 6) == ["p", "c"]
    machines = [machine_for(instance, plan.page_size) for instance in plan.instances]
    assert [type(machine) for machine in machines] == [PrefillScheduler, DecodeScheduler, ColocatedScheduler]
    assert [(machine.pool.total, machine.pool.page_size) for machine in machines] == [(10, 4), (20, 4), (30, 4)]


SECOND = 1_000_000_000


def patient() -> Router:
    return Router(["p0", "p1"], ["d0"], [], max_retries=3, patience_s=30.0)


def test_requests_wait_for_a_dead_role_and_go_on_when_it_is_back() -> None:
    router = patient()
    arrive(router, 5)
    assert router.handle(PeerFailed("d0"), 0) == []
    assert ready(router, "a", "p0") == []  # its KV stays parked
    assert router.handle(Arrived("b", 5, 10), SECOND) == []
    assert router.handle(Arrived("one", 5, 1), SECOND) == [Dispatch("one", "p0", None)]  # needs no decode
    assert router.stranded == 2
    assert router.place("a") is None
    assert router.handle(Tick(), 29 * SECOND) == []
    assert router.handle(PeerJoined("d0"), 29 * SECOND) == [Dispatch("a", "d0", "p0"), Dispatch("b", "p1", None)]
    assert router.stranded == 0


def test_patience_counts_from_the_death_of_the_last_one() -> None:
    router = patient()
    arrive(router, 5)
    ready(router, "a", "p0")
    assert router.handle(PeerFailed("p0"), 0) == [Release("a", "d0"), Dispatch("a", "p1", None)]
    assert router.handle(PeerFailed("p1"), 10 * SECOND) == []
    assert router.handle(Arrived("b", 5, 10), 39 * SECOND) == []
    assert router.handle(Tick(), 39 * SECOND) == []
    rejected = router.handle(Tick(), 40 * SECOND)
    assert [(c.request_id, c.reason) for c in rejected if isinstance(c, Reject)] == [
        ("a", "no live prefill or colocated instance"),
        ("b", "no live prefill or colocated instance"),
    ]
    assert isinstance(router.handle(Arrived("c", 5, 10), 41 * SECOND)[0], Reject)
    assert router.idle()


def test_kv_that_waits_is_released_with_its_request() -> None:
    router = patient()
    arrive(router, 5, 5)
    router.handle(PeerFailed("d0"), 0)
    ready(router, "a", "p0")
    ready(router, "b", "p1")
    assert router.handle(Cancelled("a"), 0) == [Release("a", "p0")]
    assert router.handle(Tick(), 30 * SECOND)[0] == Release("b", "p1")
    assert router.idle()


def test_waiting_kv_that_is_lost_is_computed_again() -> None:
    router = patient()
    arrive(router, 5)
    router.handle(PeerFailed("d0"), 0)
    ready(router, "a", "p0")
    assert router.handle(PeerFailed("p0"), 0) == []
    assert router.handle(PeerJoined("d0"), 0) == [Dispatch("a", "p1", None)]
    assert router.load("p1") == 6  # with the token that prefill sampled


def test_a_full_house_sheds() -> None:
    router = Router(["p"], ["d"], [], max_open=2)
    router.handle(Arrived("a", 5, 10), 0)
    router.handle(Arrived("b", 5, 10), 0)
    (rejected,) = router.handle(Arrived("c", 5, 10), 0)
    assert isinstance(rejected, Reject)
    assert rejected.retryable
    assert "2 requests are open" in rejected.reason
    router.handle(Finished("a"), 0)
    assert isinstance(router.handle(Arrived("c", 5, 10), 0)[0], Dispatch)


def test_a_draining_instance_is_retired_when_nothing_is_on_it() -> None:
    router = two_by_two()
    arrive(router, 5, 5)
    ready(router, "a", "p0")
    ready(router, "b", "p1")
    assert router.place("a") == "d0"
    assert router.handle(Draining("d0"), 0) == []
    assert router.handle(Draining("p0"), 0) == []
    assert router.handle(Arrived("c", 1, 9), 0) == [Dispatch("c", "p1", None)]
    assert ready(router, "c", "p1") == [Dispatch("c", "d1", "p1")]
    assert router.handle(KVLanded("a"), 0) == [Retire("p0")]
    assert router.handle(Finished("a"), 0) == [Retire("d0")]
    with pytest.raises(ValueError, match="'d0' is not in the plan"):
        router.load("d0")


def test_an_idle_instance_retires_at_once_and_a_new_one_takes_its_place() -> None:
    router = two_by_two()
    assert router.handle(Draining("d0"), 0) == [Retire("d0")]
    assert router.handle(PeerJoined("d2", "decode"), 0) == []
    arrive(router, 5, 5)
    assert ready(router, "a", "p0") == [Dispatch("a", "d1", "p0")]
    assert ready(router, "b", "p1") == [Dispatch("b", "d2", "p1")]
    with pytest.raises(ValueError, match="'x' is not in the plan"):
        router.handle(PeerJoined("x"), 0)


def test_a_prompt_that_would_wait_too_long_is_shed() -> None:
    steptime = StepTime(base=0.5, per_new_token=0.01)
    queueing = dict.fromkeys(("p0", "p1"), QueueTime(steptime, 50))
    router = Router(["p0", "p1"], ["d0"], [], max_wait_s=2.0, queueing=queueing)
    assert arrive(router, 100, 100, 30) == ["p0", "p1", "p0"]  # p0: 130 tokens in 2.6 steps, 1.3 + 1.3 s
    assert router.wait_s() == pytest.approx(2.0)
    (dispatch,) = router.handle(Arrived("d", 1, 10), 0)
    assert isinstance(dispatch, Dispatch)
    (shed,) = router.handle(Arrived("e", 1, 10), 0)
    assert isinstance(shed, Reject)
    assert shed.retryable
    assert shed.after_s == pytest.approx(0.02)
    assert router.requests == 4
    ready(router, "b", "p1")
    assert router.wait_s() < 1.0
    (dispatch,) = router.handle(Arrived("e", 1, 10), 0)
    assert isinstance(dispatch, Dispatch)
    full = Router(["p0"], ["d0"], [], max_open=1)
    full.handle(Arrived("a", 1, 10), 0)
    (refused,) = full.handle(Arrived("b", 1, 10), 0)
    assert isinstance(refused, Reject)
    assert refused.after_s


def test_what_shedding_needs() -> None:
    plan = Plan(
        model="tiny",
        max_model_len=64,
        slo=SLO(0.5, 0.1),
        shed=True,
        instances=(
            PrefillInstance(name="p0", pages=64, lm_tokens=64, pp=2, steptime=StepTime(0.1)),
            DecodeInstance(name="d0", pages=64, max_num_seqs=4),
        ),
        workers=(
            Worker("p0", (HostedStage("p0", (0,)), HostedStage("p0", (2,), 1))),
            Worker("d0", (HostedStage("d0", (1,)),)),
        ),
    )
    plan.check()
    config = RouterConfig.of(plan)
    assert (config.max_wait_s, config.queueing) == (0.5, {"p0": QueueTime(StepTime(0.1), 64, 2)})
    assert RouterConfig.of(msgspec.structs.replace(plan, shed=False)).max_wait_s is None
    with pytest.raises(InvalidPlan, match=r"\$.shed: without an slo"):
        msgspec.structs.replace(plan, slo=None).check()
    bare = msgspec.structs.replace(plan.instances[0], steptime=None)
    with pytest.raises(InvalidPlan, match="shed needs the step times"):
        msgspec.structs.replace(plan, instances=(bare, plan.instances[1])).check()
