from __future__ import annotations

from typing import Any

import pytest

from jdserve.core.plan import PrefillInstance
from jdserve.policy.commands import Chunk, Emit, Reject, Release, RunStep
from jdserve.policy.events import (
    Arrived,
    Cancelled,
    Draining,
    KVLanded,
    KVReady,
    LeaseExpired,
    PullFailed,
    StepDone,
)
from jdserve.policy.prefill import PrefillScheduler


def scheduler(page_size: int = 4, **changes: Any) -> PrefillScheduler:
    limits: dict[str, Any] = {"pages": 100, "lm_tokens": 20, "max_batch": 8} | changes
    return PrefillScheduler(PrefillInstance(name="p", **limits), page_size)


def queue(machine: PrefillScheduler, *prompts: int, output: int = 5) -> None:
    """Requests a, b, ... behind a step that is in flight, so that they are batched together."""
    machine.handle(Arrived("blocker", 1, 1), 0)
    for id, prompt in zip("abcdefgh", prompts, strict=False):
        assert machine.handle(Arrived(id, prompt, output), 0) == []


def batch(commands: list[Any]) -> list[str]:
    (step,) = [command for command in commands if isinstance(command, RunStep)]
    return [chunk.request_id for chunk in step.chunks]


def test_a_prompt_runs_at_once_parks_and_is_released_when_it_has_landed() -> None:
    machine = scheduler()
    assert machine.handle(Arrived("a", 6, 5), 0) == [RunStep(0, (Chunk("a", 0, 6, (1, 2), last=True),))]
    assert (machine.running, machine.waiting, machine.parked) == (1, 0, 0)
    assert machine.handle(StepDone(0), 1) == [Emit("a", parked=True)]
    assert (machine.running, machine.parked, machine.pool.owned) == (0, 1, 2)
    assert not machine.idle()
    assert machine.handle(KVLanded("a"), 2) == [Release("a")]
    assert machine.handle(KVLanded("a"), 3) == []
    assert machine.idle()
    assert machine.pool.owned == 0


def test_batches_fill_up_to_lm_and_longer_prompts_run_alone() -> None:
    machine = scheduler(lm_tokens=20)
    queue(machine, 12, 8, 1, 33, 5)
    assert machine.waiting_tokens == 59
    assert batch(machine.handle(StepDone(0), 1)) == ["a", "b"]
    assert batch(machine.handle(StepDone(1), 2)) == ["c"]
    assert batch(machine.handle(StepDone(2), 3)) == ["d"]
    assert batch(machine.handle(StepDone(3), 4)) == ["e"]


def test_max_batch_bounds_both_batch_rules() -> None:
    for batching in ("lm", "kv_capacity"):
        machine = scheduler(max_batch=2, batching=batching)
        queue(machine, 1, 1, 1)
        assert batch(machine.handle(StepDone(0), 1)) == ["a", "b"]


def test_kv_capacity_takes_all_that_the_pool_holds() -> None:
    machine = scheduler(pages=10, lm_tokens=1, batching="kv_capacity")
    queue(machine, 16, 16, 9, 1)
    assert batch(machine.handle(StepDone(0), 1)) == ["a", "b"]


def test_the_head_blocks_what_comes_behind_until_its_pages_are_free() -> None:
    machine = scheduler(pages=4)
    machine.handle(Arrived("a", 9, 5), 0)
    machine.handle(Arrived("b", 8, 5), 0)
    machine.handle(Arrived("c", 1, 5), 0)
    assert machine.handle(StepDone(0), 1) == [Emit("a", parked=True)]
    assert machine.waiting == 2
    commands = machine.handle(KVLanded("a"), 2)
    assert commands[0] == Release("a")
    assert batch(commands) == ["b", "c"]


def test_the_end_of_a_text_gives_one_emit_and_one_release() -> None:
    machine = scheduler(lm_tokens=100)
    machine.handle(Arrived("blocker", 1, 1), 0)
    for id, output in (("failed", 5), ("scored", 0), ("stopped", 5), ("single", 1), ("parked", 2)):
        machine.handle(Arrived(id, 3, output), 0)
    commands = machine.handle(StepDone(0), 1)
    assert commands[:2] == [Emit("blocker", 1, "length"), Release("blocker")]
    assert machine.handle(StepDone(1, stopped=("stopped", "scored"), failed=("failed",)), 2) == [
        Emit("failed", 0, "error"),
        Release("failed"),
        Emit("scored", 0, "length"),
        Release("scored"),
        Emit("stopped", 1, "stop"),
        Release("stopped"),
        Emit("single", 1, "length"),
        Release("single"),
        Emit("parked", 1, parked=True),
    ]
    assert machine.pool.owned == 1


def test_cancel_in_every_state() -> None:
    machine = scheduler(pages=8)
    machine.handle(Arrived("a", 4, 5), 0)
    machine.handle(Arrived("b", 4, 5), 0)
    assert machine.handle(Cancelled("b"), 1) == [Release("b")]
    assert machine.waiting == 0
    assert machine.handle(Cancelled("a"), 2) == []
    assert machine.pool.owned == 1, "a page that a step writes stays owned"
    assert not machine.idle()
    assert machine.handle(StepDone(0), 3) == [Release("a")]
    assert machine.idle()
    machine.handle(Arrived("c", 4, 5), 4)
    machine.handle(StepDone(1), 5)
    assert machine.handle(Cancelled("c"), 6) == [Release("c")]
    assert machine.handle(Cancelled("c"), 7) == []
    assert machine.pool.owned == 0


def test_a_request_may_come_back_while_its_cancelled_run_ends() -> None:
    machine = scheduler()
    machine.handle(Arrived("a", 4, 5), 0)
    machine.handle(Cancelled("a"), 1)
    assert machine.handle(Arrived("a", 4, 5), 2) == []
    commands = machine.handle(StepDone(0), 3)
    assert commands == [RunStep(1, (Chunk("a", 0, 4, (1,), last=True),))]
    assert machine.handle(StepDone(1), 4) == [Emit("a", parked=True)]


def test_an_expired_lease_drops_only_what_is_parked() -> None:
    machine = scheduler()
    machine.handle(Arrived("a", 4, 5), 0)
    assert machine.handle(LeaseExpired("a"), 1) == []
    machine.handle(StepDone(0), 2)
    assert machine.handle(LeaseExpired("a"), 3) == [Release("a")]
    assert machine.idle()


HASHES = (b"0", b"1", b"2")


def test_a_resident_prefix_is_shared_but_the_last_token_is_computed() -> None:
    machine = scheduler(page_size=4)
    machine.handle(Arrived("a", 12, 5, HASHES), 0)
    machine.handle(Arrived("same", 12, 5, HASHES), 0)
    machine.handle(Arrived("longer", 14, 5, HASHES), 0)
    machine.handle(Arrived("other", 12, 5, (b"0", b"x", b"y")), 0)
    (_, step) = machine.handle(StepDone(0), 1)
    assert isinstance(step, RunStep)
    first = (1, 2, 3)
    assert [(chunk.start, chunk.count) for chunk in step.chunks] == [(8, 4), (12, 2), (4, 8)]
    assert [chunk.pages[: chunk.start // 4] for chunk in step.chunks] == [first[:2], first, first[:1]]
    assert step.chunks[0].pages[2] != first[2]


def test_lm_counts_only_the_tokens_that_are_computed() -> None:
    machine = scheduler(lm_tokens=8)
    machine.handle(Arrived("a", 12, 5, HASHES), 0)
    machine.handle(Arrived("b", 14, 5, HASHES), 0)
    machine.handle(Arrived("c", 6, 5), 0)
    assert batch(machine.handle(StepDone(0), 1)) == ["b", "c"]


def test_without_prefix_cache_or_after_a_failure_nothing_is_shared() -> None:
    machine = scheduler(prefix_cache=False)
    machine.handle(Arrived("a", 12, 5, HASHES), 0)
    machine.handle(StepDone(0), 1)
    (step,) = machine.handle(Arrived("b", 12, 5, HASHES), 2)
    assert isinstance(step, RunStep)
    assert step.chunks[0].start == 0

    machine = scheduler()
    machine.handle(Arrived("a", 12, 5, HASHES), 0)
    machine.handle(StepDone(0, failed=("a",)), 1)
    assert machine.pool.cached == 0
    (step,) = machine.handle(Arrived("b", 12, 5, HASHES), 2)
    assert isinstance(step, RunStep)
    assert step.chunks[0].start == 0


def test_a_prompt_that_never_fits_is_rejected_for_good() -> None:
    machine = scheduler(pages=3)
    (reject,) = machine.handle(Arrived("a", 13, 5), 0)
    assert reject == Reject("a", "a prompt of 13 tokens needs 4 pages, there are 3", retryable=False)
    assert machine.idle()
    assert batch(machine.handle(Arrived("b", 12, 5), 0)) == ["b"]


def test_what_it_refuses() -> None:
    machine = scheduler()
    for event in (Draining(), KVReady("a", "p", 1, 1), PullFailed("a")):
        with pytest.raises(TypeError, match=f"PrefillScheduler takes no {type(event).__name__}"):
            machine.handle(event, 0)
    with pytest.raises(ValueError, match="prompt_tokens must be at least 1, got 0"):
        machine.handle(Arrived("a", 0, 1), 0)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 0, got -1"):
        machine.handle(Arrived("a", 1, -1), 0)
    with pytest.raises(ValueError, match="step_id 0 ended, but no step is in flight"):
        machine.handle(StepDone(0), 0)
    machine.handle(Arrived("a", 1, 5), 0)
    with pytest.raises(ValueError, match="step_id 1 ended, but step 0 is the oldest in flight"):
        machine.handle(StepDone(1), 0)
    with pytest.raises(ValueError, match="a is here already"):
        machine.handle(Arrived("a", 1, 5), 0)
    machine.handle(StepDone(0), 0)
    with pytest.raises(ValueError, match="a is here already"):
        machine.handle(Arrived("a", 1, 5), 0)


def test_the_queue_is_in_the_order_of_priority_and_then_of_arrival() -> None:
    machine = scheduler(lm_tokens=1)
    machine.handle(Arrived("blocker", 1, 1), 0)
    for id, priority in (("a", 0), ("b", 2), ("c", -1), ("d", 0), ("e", 2), ("f", -1)):
        assert machine.handle(Arrived(id, 4, 5, priority=priority), 0) == []
    order = [batch(machine.handle(StepDone(step), 1 + step))[0] for step in range(6)]
    assert order == ["c", "f", "a", "d", "b", "e"]
