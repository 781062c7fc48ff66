from __future__ import annotations

from typing import Any

import pytest

from jdserve.core.plan import ColocatedInstance, DecodeInstance, PrefillInstance
from jdserve.policy.base import watermark_pages
from jdserve.policy.commands import DecodeSeq, Emit, Preempt, Pull, Reject, Release, RunStep
from jdserve.policy.decode import DecodeScheduler
from jdserve.policy.events import Arrived, Cancelled, KVLanded, KVReady, LeaseExpired, PullFailed, StepDone
from policy.harness import Harness


def scheduler(page_size: int = 4, **changes: Any) -> DecodeScheduler:
    limits: dict[str, Any] = {"pages": 20, "max_num_seqs": 4, "watermark": 0.0} | changes
    return DecodeScheduler(DecodeInstance(name="d", **limits), page_size)


def ready(id: str, tokens: int = 4, output: int = 5) -> KVReady:
    return KVReady(id, "p", tokens, output)


def test_a_sequence_is_pulled_decoded_and_released() -> None:
    machine = scheduler()
    # 5 tokens: the next step writes the KV of the token that prefill sampled
    assert machine.handle(ready("a", 4, 2), 0) == [Pull("a", "p", 4, (1, 2))]
    assert (machine.pulling, machine.running, machine.waiting) == (1, 0, 0)
    assert not machine.idle()
    assert machine.handle(KVLanded("a"), 1) == [RunStep(0, (), (DecodeSeq("a", 5, (1, 2)),))]
    assert machine.handle(StepDone(0), 2) == [Emit("a"), RunStep(1, (), (DecodeSeq("a", 6, (1, 2)),))]
    assert machine.handle(StepDone(1), 3) == [Emit("a", 1, "length"), Release("a")]
    assert machine.idle()
    assert machine.pool.owned == 0


def test_newcomers_join_at_the_next_step_in_order_of_landing() -> None:
    machine = scheduler()
    for id in "abc":
        machine.handle(ready(id), 0)
    machine.handle(KVLanded("a"), 1)
    assert machine.handle(KVLanded("c"), 2) == []
    assert machine.handle(KVLanded("b"), 3) == []
    (_, step) = machine.handle(StepDone(0), 4)
    assert isinstance(step, RunStep)
    assert [(seq.request_id, seq.context) for seq in step.decodes] == [("a", 6), ("c", 5), ("b", 5)]


def test_admission_is_bounded_by_max_num_seqs_and_in_order() -> None:
    machine = scheduler(max_num_seqs=2)
    assert machine.handle(ready("a"), 0) != []
    assert machine.handle(ready("b"), 0) != []
    assert machine.handle(ready("c"), 0) == []
    assert (machine.waiting, machine.waiting_tokens) == (1, 4)
    machine.handle(KVLanded("a"), 1)
    assert machine.handle(StepDone(0, stopped=("a",)), 2) == [
        Emit("a", 1, "stop"),
        Release("a"),
        Pull("c", "p", 4, (1, 2)),
    ]


def test_the_head_waits_for_pages_and_nobody_overtakes() -> None:
    machine = scheduler(pages=5)
    machine.handle(ready("a", 11, 2), 0)
    assert machine.handle(ready("big", 11, 2), 0) == []
    assert machine.handle(ready("small", 1, 2), 0) == []
    assert machine.handle(PullFailed("a"), 1)[1:] == [Pull("big", "p", 11, (1, 2, 3)), Pull("small", "p", 1, (4,))]


def test_the_watermark_holds_back_all_but_the_first() -> None:
    assert watermark_pages(0.01, 100) == 1
    assert watermark_pages(0.01, 101) == 2
    assert watermark_pages(0.07, 100) == 7, "not 8, although 0.07 * 100 is a little more than 7"
    machine = scheduler(pages=6, watermark=0.5)
    assert machine.handle(ready("a", 19, 1), 0) == [Pull("a", "p", 19, (1, 2, 3, 4, 5))]
    assert machine.handle(ready("b", 1, 1), 0) == []
    machine = scheduler(pages=6, watermark=0.5)
    machine.handle(ready("a", 7, 1), 0)
    assert len(machine.handle(ready("b", 3, 1), 0)) == 1
    assert machine.handle(ready("c", 3, 1), 0) == []


def test_a_failed_pull_gives_back_its_pages() -> None:
    machine = scheduler()
    machine.handle(ready("a"), 0)
    assert machine.handle(PullFailed("a"), 1) == [Release("a")]
    assert machine.handle(PullFailed("a"), 2) == []
    assert machine.idle()


def test_cancel_in_every_state() -> None:
    machine = scheduler(max_num_seqs=3)
    for id in "abcd":
        machine.handle(ready(id), 0)
    assert machine.handle(Cancelled("d"), 1) == [Release("d")]
    assert machine.handle(Cancelled("c"), 1) == []
    assert machine.pool.owned == 6, "a page that a pull writes stays owned"
    assert machine.handle(KVLanded("c"), 2) == [Release("c")]
    machine.handle(Cancelled("b"), 3)
    assert machine.handle(PullFailed("b"), 4) == [Release("b")]
    machine.handle(KVLanded("a"), 5)
    assert machine.handle(Cancelled("a"), 6) == []
    assert machine.pool.owned == 2
    assert not machine.idle()
    assert machine.handle(StepDone(0, stopped=("a",)), 7) == [Release("a")]
    assert machine.idle()


def test_a_landed_sequence_that_is_in_no_step_is_cancelled_at_once() -> None:
    machine = scheduler()
    machine.handle(ready("a"), 0)
    machine.handle(ready("b"), 0)
    machine.handle(KVLanded("a"), 1)
    machine.handle(KVLanded("b"), 2)
    assert machine.handle(Cancelled("b"), 3) == [Release("b")]


def test_a_request_that_comes_back_waits_for_its_abandoned_pull() -> None:
    machine = scheduler()
    machine.handle(ready("a"), 0)
    machine.handle(Cancelled("a"), 1)
    assert machine.handle(KVReady("a", "p2", 4, 5), 2) == []
    assert machine.handle(ready("b"), 2) == []
    # no Release: the request is here again
    commands = machine.handle(PullFailed("a"), 3)
    assert commands == [Pull("a", "p2", 4, (1, 2)), Pull("b", "p", 4, (3, 4))]
    machine.handle(Cancelled("a"), 4)
    machine.handle(KVReady("a", "p3", 4, 5), 5)
    assert machine.handle(Cancelled("a"), 6) == [], "released with its last run"
    assert machine.handle(PullFailed("a"), 7) == [Release("a")]


def test_ends_of_texts() -> None:
    machine = scheduler()
    for id in "abc":
        machine.handle(ready(id), 0)
        machine.handle(KVLanded(id), 0)
    machine.handle(StepDone(0), 1)
    assert machine.handle(StepDone(1, stopped=("b", "x"), failed=("a",)), 2)[:5] == [
        Emit("a", 0, "error"),
        Release("a"),
        Emit("b", 1, "stop"),
        Release("b"),
        Emit("c"),
    ]


def test_pages_grow_one_at_a_time_and_the_youngest_makes_room() -> None:
    machine = scheduler(page_size=2, pages=5)
    machine.handle(ready("old", 3, 6), 0)
    machine.handle(ready("young", 1, 6), 0)
    machine.handle(KVLanded("young"), 0)  # lands first and is the youngest all the same
    machine.handle(KVLanded("old"), 0)
    assert machine.handle(StepDone(0), 1)[1:] == [
        RunStep(1, (), (DecodeSeq("young", 3, (3, 4)), DecodeSeq("old", 4, (1, 2)))),
    ]
    # old needs a third page, the last one; then young needs one too
    assert machine.handle(StepDone(1), 2)[2:] == [
        RunStep(2, (), (DecodeSeq("young", 4, (3, 4)), DecodeSeq("old", 5, (1, 2, 5)))),
    ]
    assert machine.handle(StepDone(2), 3) == [
        Emit("young"),
        Emit("old"),
        Preempt("young"),
        Release("young"),
        RunStep(3, (), (DecodeSeq("old", 6, (1, 2, 5)),)),
    ]
    assert machine.preemptions == 1
    assert machine.handle(KVLanded("young"), 4) == [], "it is forgotten"


def test_a_pull_in_flight_is_not_preempted() -> None:
    machine = scheduler(page_size=2, pages=4)
    machine.handle(ready("old", 3, 4), 0)
    machine.handle(ready("young", 3, 4), 0)
    machine.handle(KVLanded("old"), 0)
    assert machine.handle(StepDone(0), 1) == [Emit("old"), Preempt("old"), Release("old")]
    assert machine.pulling == 1


def test_what_never_fits_is_rejected_for_good() -> None:
    machine = scheduler(pages=3)
    assert machine.handle(ready("a", 8, 5), 0) == [
        Reject("a", "13 tokens of prompt and output need 4 pages, there are 3", retryable=False)
    ]
    assert machine.handle(ready("b", 8, 4), 0) == [Pull("b", "p", 8, (1, 2, 3))]


def test_what_it_refuses() -> None:
    machine = scheduler()
    for event in (Arrived("a", 1, 1), LeaseExpired("a")):
        with pytest.raises(TypeError, match=f"DecodeScheduler takes no {type(event).__name__}"):
            machine.handle(event, 0)
    with pytest.raises(ValueError, match="must be at least 1, got 4 and 0"):
        machine.handle(ready("a", 4, 0), 0)
    with pytest.raises(ValueError, match="no step is in flight"):
        machine.handle(StepDone(0), 0)
    machine.handle(ready("a"), 0)
    with pytest.raises(ValueError, match="a is here already"):
        machine.handle(ready("a"), 0)
    machine.handle(KVLanded("a"), 0)
    with pytest.raises(ValueError, match="a is here already"):
        machine.handle(ready("a"), 0)
    with pytest.raises(ValueError, match="step_id 7 ended, but step 0 is the oldest in flight"):
        machine.handle(StepDone(7), 0)


def test_the_horizon_ends_before_an_end_or_a_shortage() -> None:
    machine = scheduler(page_size=4, pages=30)
    assert machine.horizon() == 0
    machine.handle(ready("a", 4, 10), 0)
    machine.handle(KVLanded("a"), 0)
    assert machine.horizon() == 9, "the tenth StepDone ends the text"
    machine.handle(ready("b", 4, 90), 0)
    assert machine.horizon() == 9, "b is still being pulled"
    machine.handle(KVLanded("b"), 0)
    assert machine.horizon() == 0, "b joins at the next StepDone"

    machine = scheduler(page_size=4, pages=5)
    machine.handle(ready("a", 4, 12), 0)
    machine.handle(ready("b", 6, 12), 0)
    machine.handle(KVLanded("a"), 0)
    machine.handle(KVLanded("b"), 0)
    machine.handle(StepDone(0), 1)
    # contexts 6 and 7 of 8 tokens each in flight; one page is left: b takes it after 2 steps, a would after 3
    machine.handle(StepDone(1), 2)
    assert machine.horizon() == 1
    assert machine.advance(1, 3)[-1] == RunStep(3, (), (DecodeSeq("a", 8, (1, 2)), DecodeSeq("b", 9, (3, 4, 5))))
    assert machine.horizon() == 0
    assert Preempt("b") in machine.handle(StepDone(3), 4)


def test_pulls_between_steps() -> None:
    machine = scheduler(pull="between_steps", pages=9)
    assert machine.handle(ready("a"), 0) == [Pull("a", "p", 4, (1, 2))]
    assert machine.handle(ready("b"), 1) == [Pull("b", "p", 4, (3, 4))], "no step is in flight, so this pull joins"
    assert machine.handle(KVLanded("a"), 2) == [], "b is still on its way"
    assert machine.handle(KVLanded("b"), 3)[0] == RunStep(0, (), (DecodeSeq("a", 5, (1, 2)), DecodeSeq("b", 5, (3, 4))))
    assert machine.horizon() == 4
    assert machine.handle(ready("c", 20, 5), 4) == []
    assert machine.horizon() == 4, "c does not fit"
    assert machine.handle(ready("d"), 5) == []
    assert machine.handle(Cancelled("c"), 6) == [Release("c")]
    assert machine.horizon() == 0, "d is pulled at the end of the step"
    assert machine.handle(StepDone(0), 7) == [Emit("a"), Emit("b"), Pull("d", "p", 4, (5, 6))]
    assert [type(command) for command in machine.handle(PullFailed("d"), 8)] == [Release, RunStep]


def test_seven_pages_make_two_requests_take_turns() -> None:
    """34 prompt and 35 output tokens need 5 pages of 16 each; with 7 both finish, one of them with an interruption."""
    prefill = PrefillInstance(name="p", pages=20, lm_tokens=512)
    decode = DecodeInstance(name="d", pages=7, max_num_seqs=2, watermark=0.0)
    for instances in (
        [prefill, decode],
        [ColocatedInstance(name="c", pages=7, token_budget=64, max_num_seqs=2, watermark=0.0)],
    ):
        harness = Harness(instances, page_size=16)
        harness.arrive("a", 34, 35)
        harness.arrive("b", 34, 35)
        while harness.flights or harness.busy():
            for flight in list(harness.flights):
                harness.end_pull(flight)
            for name in harness.busy():
                harness.finish_step(name)
        harness.check_end()
        harness.check_replay()
        assert [ticket.emitted for ticket in harness.tickets.values()] == [35, 35]
        assert {ticket.end for ticket in harness.tickets.values()} == {"length"}
        assert harness.preemptions >= 1
