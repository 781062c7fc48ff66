from __future__ import annotations

from typing import Any

import pytest

from jdserve.core.plan import ColocatedInstance
from jdserve.policy.colocated import ColocatedScheduler
from jdserve.policy.commands import Chunk, DecodeSeq, Emit, Preempt, Reject, Release, RunStep
from jdserve.policy.events import Arrived, Cancelled, KVLanded, StepDone


def scheduler(page_size: int = 4, **changes: Any) -> ColocatedScheduler:
    limits: dict[str, Any] = {"pages": 50, "token_budget": 16, "max_num_seqs": 4, "watermark": 0.0} | changes
    return ColocatedScheduler(ColocatedInstance(name="c", **limits), page_size)


def chunked(page_size: int = 4, **changes: Any) -> ColocatedScheduler:
    return scheduler(page_size, mode="chunked", **changes)


def launched(commands: list[Any]) -> tuple[list[tuple[str, int, int, bool]], list[tuple[str, int]]]:
    """(id, start, count, last) of the chunks, (id, context) of the decodes of the step that was launched."""
    (step,) = [command for command in commands if isinstance(command, RunStep)]
    return (
        [(chunk.request_id, chunk.start, chunk.count, chunk.last) for chunk in step.chunks],
        [(seq.request_id, seq.context) for seq in step.decodes],
    )


def test_a_request_alone_in_either_mode() -> None:
    for mode in ("prefill_first", "chunked"):
        machine = scheduler(mode=mode)
        assert machine.handle(Arrived("a", 7, 3), 0) == [RunStep(0, (Chunk("a", 0, 7, (1, 2), last=True),))]
        assert machine.handle(StepDone(0), 1) == [Emit("a"), RunStep(1, (), (DecodeSeq("a", 8, (1, 2)),))]
        assert machine.handle(StepDone(1), 2) == [Emit("a"), RunStep(2, (), (DecodeSeq("a", 9, (1, 2, 3)),))]
        assert machine.handle(StepDone(2), 3) == [Emit("a", 1, "length"), Release("a")]
        assert machine.idle()
        assert machine.pool.owned == 0


def test_prefill_first_lets_prompts_overtake_running_sequences() -> None:
    machine = scheduler(token_budget=10)
    machine.handle(Arrived("a", 4, 9), 0)
    for id, prompt in (("b", 6), ("c", 4), ("d", 30), ("e", 1)):
        machine.handle(Arrived(id, prompt, 9), 0)
    assert machine.waiting_tokens == 41
    assert launched(machine.handle(StepDone(0), 1)) == ([("b", 0, 6, True), ("c", 0, 4, True)], [])
    assert launched(machine.handle(StepDone(1), 2)) == ([("d", 0, 30, True)], []), "alone, although above the budget"
    # the batch is full now
    assert launched(machine.handle(StepDone(2), 3)) == ([], [("a", 5), ("b", 7), ("c", 5), ("d", 31)])
    assert machine.waiting == 1
    assert launched(machine.handle(StepDone(3, stopped=("a",)), 4)) == ([("e", 0, 1, True)], [])


def test_prefill_first_keeps_the_watermark_unless_nothing_runs() -> None:
    machine = scheduler(pages=8, watermark=0.25)
    assert launched(machine.handle(Arrived("a", 32, 1), 0))[0] == [("a", 0, 32, True)]
    machine = scheduler(pages=8, watermark=0.25)
    machine.handle(Arrived("a", 16, 9), 0)
    machine.handle(Arrived("b", 9, 9), 0)
    assert launched(machine.handle(StepDone(0), 1)) == ([], [("a", 17)])
    assert machine.handle(Cancelled("b"), 2) == [Release("b")]
    machine.handle(Arrived("c", 4, 9), 2)
    assert launched(machine.handle(StepDone(1), 3)) == ([("c", 0, 4, True)], [])


def test_chunks_fill_what_the_decoding_sequences_leave() -> None:
    machine = chunked(token_budget=8)
    machine.handle(Arrived("a", 3, 9), 0)
    for id, prompt in (("b", 12), ("c", 5), ("d", 2)):
        machine.handle(Arrived(id, prompt, 9), 0)
    assert launched(machine.handle(StepDone(0), 1)) == ([("b", 0, 7, False)], [("a", 4)])
    commands = machine.handle(StepDone(1), 2)
    assert commands[0] == Emit("a")
    assert launched(commands) == ([("b", 7, 5, True), ("c", 0, 2, False)], [("a", 5)])
    commands = machine.handle(StepDone(2), 3)
    assert commands[:2] == [Emit("b"), Emit("a")]
    assert launched(commands) == ([("c", 2, 3, True), ("d", 0, 2, True)], [("a", 6), ("b", 13)])
    assert machine.running == 4


def test_a_chunked_prompt_reserves_all_its_pages_at_once() -> None:
    machine = chunked(token_budget=4, pages=6)
    (step,) = machine.handle(Arrived("a", 16, 2), 0)
    assert isinstance(step, RunStep)
    assert step.chunks == (Chunk("a", 0, 4, (1, 2, 3, 4), last=False),)
    machine.handle(Arrived("b", 12, 2), 0)
    assert launched(machine.handle(StepDone(0), 1))[0] == [("a", 4, 4, False)]
    assert machine.waiting == 1


def test_a_full_budget_of_decodes_leaves_no_room_for_chunks() -> None:
    machine = chunked(token_budget=2)
    machine.handle(Arrived("a", 1, 9), 0)
    machine.handle(Arrived("b", 1, 9), 0)
    machine.handle(StepDone(0), 1)
    machine.handle(Arrived("c", 1, 9), 2)
    machine.handle(StepDone(1), 3)
    assert launched(machine.handle(StepDone(2), 4)) == ([], [("a", 4), ("b", 3)])
    assert machine.waiting == 1


def test_the_youngest_is_preempted_and_comes_back_with_what_it_generated() -> None:
    machine = scheduler(page_size=2, pages=5)
    machine.handle(Arrived("old", 3, 8), 0)
    machine.handle(Arrived("young", 2, 4), 0)
    machine.handle(StepDone(0), 1)
    machine.handle(StepDone(1), 2)
    # contexts 4 and 3: 2 pages each; then 5 and 4: old takes the last page; then 6 and 5: young needs one more
    assert launched(machine.handle(StepDone(2), 3)) == ([], [("old", 5), ("young", 4)])
    commands = machine.handle(StepDone(3), 4)
    assert commands[:3] == [Emit("old"), Emit("young"), Preempt("young")]
    assert launched(commands) == ([], [("old", 6)])
    assert (machine.preemptions, machine.waiting, machine.waiting_tokens) == (1, 1, 5)
    machine.handle(Arrived("new", 1, 1), 5)
    commands = machine.handle(StepDone(4, stopped=("old",)), 6)
    assert launched(commands) == ([("young", 0, 5, True), ("new", 0, 1, True)], []), "it is at the head"
    # 3 of its 4 tokens went out before: the last chunk samples the fourth
    assert machine.handle(StepDone(5), 7) == [
        Emit("young", 1, "length"),
        Release("young"),
        Emit("new", 1, "length"),
        Release("new"),
    ]
    assert machine.idle()


def test_several_victims_keep_their_order() -> None:
    machine = chunked(page_size=1, pages=12, token_budget=12)
    for id, prompt in (("a", 6), ("b", 2), ("c", 2)):
        machine.handle(Arrived(id, prompt, 6), 0)
    machine.handle(StepDone(0), 1)
    commands = machine.handle(StepDone(1), 2)
    # 10 pages for the prompts, 1 more for a, 2 for b and c: c must go first
    assert Preempt("c") in commands
    for step in range(2, 5):
        commands += machine.handle(StepDone(step), step)
    assert [command.request_id for command in commands if isinstance(command, Preempt)] == ["c", "b"]
    assert list(machine._queue) == ["b", "c"]


def test_a_prompt_begun_in_chunks_can_be_preempted() -> None:
    machine = chunked(page_size=2, pages=5, token_budget=3)
    machine.handle(Arrived("a", 2, 6), 0)
    machine.handle(StepDone(0), 1)
    machine.handle(Arrived("b", 6, 2), 1)
    # a has 2 of 5 pages (context 3) and takes a third at context 5; b reserves 3 pages and computes 2 tokens a step
    assert launched(machine.handle(StepDone(1), 2)) == ([("b", 0, 2, False)], [("a", 4)])
    commands = machine.handle(StepDone(2), 3)
    assert commands == [Emit("a"), Preempt("b"), RunStep(3, (), (DecodeSeq("a", 5, (1, 2, 3)),))]
    assert machine.waiting_tokens == 6


def test_cancel_in_every_state() -> None:
    machine = chunked(token_budget=4)
    machine.handle(Arrived("a", 6, 9), 0)
    machine.handle(Arrived("b", 6, 9), 0)
    assert machine.handle(Cancelled("b"), 1) == [Release("b")]
    assert machine.handle(Cancelled("a"), 2) == []
    assert machine.pool.owned == 2, "pages that a step writes stay owned"
    assert not machine.idle()
    assert machine.handle(StepDone(0), 3) == [Release("a")]
    assert machine.idle()
    assert machine.handle(Cancelled("a"), 4) == []

    machine = scheduler()
    machine.handle(Arrived("a", 4, 9), 0)
    machine.handle(StepDone(0), 1)
    machine.handle(Arrived("b", 4, 9), 2)
    assert launched(machine.handle(StepDone(1), 3))[0] == [("b", 0, 4, True)]
    assert machine.handle(Cancelled("a"), 4) == [Release("a")], "it is in no step"
    machine.handle(StepDone(2), 5)
    assert machine.handle(Cancelled("b"), 6) == []
    assert machine.handle(StepDone(3), 7) == [Release("b")]


def test_ends_of_texts() -> None:
    machine = scheduler(max_num_seqs=8)
    machine.handle(Arrived("blocker", 1, 1), 0)
    for id, output in (("failed", 5), ("scored", 0), ("stopped", 5), ("single", 1)):
        machine.handle(Arrived(id, 3, output), 0)
    machine.handle(StepDone(0), 1)
    assert machine.handle(StepDone(1, stopped=("stopped",), failed=("failed",)), 2) == [
        Emit("failed", 0, "error"),
        Release("failed"),
        Emit("scored", 0, "length"),
        Release("scored"),
        Emit("stopped", 1, "stop"),
        Release("stopped"),
        Emit("single", 1, "length"),
        Release("single"),
    ]
    machine.handle(Arrived("a", 1, 9), 3)
    machine.handle(StepDone(2), 4)
    assert machine.handle(StepDone(3, failed=("a",)), 5) == [Emit("a", 0, "error"), Release("a")]


def test_a_failed_chunk_ends_the_request_before_its_last_chunk() -> None:
    machine = chunked(token_budget=4)
    machine.handle(Arrived("a", 6, 9, (b"0",)), 0)
    assert machine.handle(StepDone(0, failed=("a",)), 1) == [Emit("a", 0, "error"), Release("a")]
    assert machine.pool.cached == 0


def test_prefixes_are_shared_as_soon_as_they_are_computed() -> None:
    hashes = (b"0", b"1", b"2")
    machine = chunked(token_budget=9)
    machine.handle(Arrived("a", 12, 2, hashes), 0)
    machine.handle(Arrived("b", 13, 2, hashes), 0)
    # 9 tokens of a are computed: two full pages
    assert launched(machine.handle(StepDone(0), 1))[0] == [("a", 9, 3, True), ("b", 8, 5, True)]
    machine.handle(StepDone(1), 2)
    machine.handle(StepDone(2), 3)
    assert machine.pool.cached == 3
    assert launched(machine.handle(Arrived("c", 12, 2, hashes), 4))[0] == [("c", 8, 4, True)]

    machine = chunked(token_budget=9, prefix_cache=False)
    machine.handle(Arrived("a", 12, 2, hashes), 0)
    machine.handle(Arrived("b", 13, 2, hashes), 0)
    assert launched(machine.handle(StepDone(0), 1))[0] == [("a", 9, 3, True), ("b", 0, 6, False)]


def test_what_never_fits_is_rejected_for_good() -> None:
    machine = scheduler(pages=3)
    assert machine.handle(Arrived("a", 8, 6), 0) == [
        Reject("a", "13 tokens of prompt and output need 4 pages, there are 3", retryable=False)
    ]
    assert launched(machine.handle(Arrived("b", 8, 5), 0))[0] == [("b", 0, 8, True)]
    assert machine.handle(Arrived("c", 13, 0), 0)[0] == Reject(
        "c", "13 tokens of prompt and output need 4 pages, there are 3", retryable=False
    )


def test_what_it_refuses() -> None:
    machine = scheduler()
    with pytest.raises(TypeError, match="ColocatedScheduler takes no KVLanded"):
        machine.handle(KVLanded("a"), 0)
    machine.handle(Arrived("a", 1, 5), 0)
    with pytest.raises(ValueError, match="a is here already"):
        machine.handle(Arrived("a", 1, 5), 0)
    with pytest.raises(ValueError, match="step_id 1 ended, but step 0 is the oldest in flight"):
        machine.handle(StepDone(1), 0)
