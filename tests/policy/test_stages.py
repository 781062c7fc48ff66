"""Instances of several pipeline stages: as many steps in flight, of equal size, and no sequence in two of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdserve.core.plan import ColocatedInstance, DecodeInstance, PrefillInstance
from jdserve.policy.colocated import ColocatedScheduler
from jdserve.policy.commands import Command, Preempt, Pull, Release, RunStep
from jdserve.policy.decode import DecodeScheduler
from jdserve.policy.events import Arrived, Cancelled, KVLanded, KVReady, StepDone
from jdserve.policy.prefill import PrefillScheduler
from policy.harness import oldest


def decode(pp: int = 2, page_size: int = 4, **changes: Any) -> DecodeScheduler:
    limits: dict[str, Any] = {"pages": 100, "max_num_seqs": 16, "watermark": 0.0} | changes
    return DecodeScheduler(DecodeInstance(name="d", pp=pp, **limits), page_size)


def colocated(mode: str, pp: int = 2, **changes: Any) -> ColocatedScheduler:
    limits: dict[str, Any] = {"pages": 100, "max_num_seqs": 8, "watermark": 0.0, "token_budget": 8} | changes
    return ColocatedScheduler(ColocatedInstance(name="c", pp=pp, mode=mode, **limits), 4)  # type: ignore[arg-type]


def steps(commands: list[Command]) -> list[str]:
    """The steps among ``commands``: chunks as ``a:start+count``, decoding sequences by name."""
    return [
        " ".join(
            [f"{c.request_id}:{c.start}+{c.count}" for c in command.chunks]
            + [seq.request_id for seq in command.decodes]
        )
        for command in commands
        if isinstance(command, RunStep)
    ]


def land(machine: DecodeScheduler, id: str, tokens: int = 4, output: int = 50) -> list[Command]:
    machine.handle(KVReady(id, "p", tokens, output), 0)
    return machine.handle(KVLanded(id), 0)


def test_decoding_sequences_are_dealt_to_the_stages() -> None:
    machine = decode()
    launched = [steps(land(machine, id)) for id in "abcde"]
    assert launched == [["a"], ["b"], [], [], []]
    assert steps(machine.handle(StepDone(0), 1)) == ["a c d"]
    assert steps(machine.handle(StepDone(1), 2)) == ["b e"]
    assert steps(machine.handle(StepDone(2), 3)) == ["a c d"]


def test_what_is_idle_fills_all_free_places() -> None:
    machine = decode(pp=4)
    for id in "abcde":
        land(machine, id)
    for step in range(3):
        machine.handle(StepDone(step), 1)
    # two sequences are left for two places, although a share of five would be two
    assert [len(flight.batch) for flight in machine._flights] == [1, 2, 1, 1]


def test_one_step_in_flight_takes_all() -> None:
    machine = decode(in_flight=1)
    launched = [steps(land(machine, id)) for id in "abc"]
    assert launched == [["a"], [], []]
    assert steps(machine.handle(StepDone(0), 1)) == ["a b c"]
    assert machine.horizon() == 48


def test_no_batch_is_launched_while_another_waits_for_its_pull() -> None:
    machine = decode(pull="between_steps")
    land(machine, "a")
    assert machine.handle(KVReady("b", "p", 4, 50), 1) == []
    assert isinstance(machine.handle(StepDone(0), 2)[-1], Pull)
    assert machine.horizon() == 0
    assert steps(machine.handle(KVLanded("b"), 3)) == ["a", "b"]
    assert machine.handle(KVReady("c", "p", 4, 50), 4) == []
    (_, pull) = machine.handle(StepDone(1), 5)
    assert isinstance(pull, Pull)
    assert steps(machine.handle(StepDone(2), 6)) == [], "a and b wait for c"
    assert steps(machine.handle(KVLanded("c"), 7)) == ["a b", "c"]


def test_steps_end_in_order() -> None:
    machine = decode()
    for id in "ab":
        land(machine, id)
    with pytest.raises(ValueError, match="step_id 1 ended, but step 0 is the oldest in flight"):
        machine.handle(StepDone(1), 1)
    machine.handle(StepDone(0), 1)
    machine.handle(StepDone(1), 2)


def test_the_horizon_of_several_stages_counts_the_steps_of_all() -> None:
    machine = decode()
    land(machine, "a", output=10)
    assert machine.horizon() == 9
    land(machine, "b", output=3)
    # a, b, a, b: the sixth event is the end of b
    assert machine.horizon() == 5
    assert steps(machine.advance(5, 1)) == ["a"]
    assert (oldest(machine), len(machine._flights)) == (5, 2)
    land(machine, "c")
    assert machine.horizon() == 0, "c joins at the next StepDone"


def test_a_sequence_in_a_step_is_not_preempted() -> None:
    machine = decode(pages=4)
    land(machine, "a", 6, 8)
    land(machine, "b", 4, 8)
    assert [held.id for held in machine._running.values() if held.in_step] == ["a", "b"]
    machine.handle(StepDone(0), 1)
    machine.handle(StepDone(1), 2)
    # a has filled its two pages, b runs in its own two: a waits instead of giving way to itself
    assert steps(machine.handle(StepDone(2), 3)) == []
    assert machine.preemptions == 0
    commands = machine.handle(StepDone(3), 4)
    assert [type(command) for command in commands[1:]] == [Preempt, Release, RunStep]
    assert steps(commands) == ["a"]
    assert machine.preemptions == 1


def test_a_cancelled_sequence_keeps_its_place_while_a_step_that_stays_in_flight_holds_it() -> None:
    machine = decode(pp=2, max_num_seqs=2)
    for id in "ab":
        land(machine, id)
    assert machine.handle(KVReady("c", "p", 4, 5), 0) == []
    assert machine.handle(Cancelled("b"), 1) == [], "b is in the younger step, c would be there before it has ended"
    (_, step, pull) = machine.handle(StepDone(0), 2)
    assert isinstance(step, RunStep)
    assert isinstance(pull, Pull), "b ends before the next launch"
    assert machine.handle(StepDone(1), 3) == [Release("b")]


def test_a_prefill_batch_per_stage() -> None:
    machine = PrefillScheduler(PrefillInstance(name="p", pp=2, pages=100, lm_tokens=10, max_batch=8), 4)
    assert steps(machine.handle(Arrived("a", 4, 5), 0)) == ["a:0+4"]
    assert steps(machine.handle(Arrived("b", 4, 5), 0)) == ["b:0+4"]
    for id in "cdef":
        assert machine.handle(Arrived(id, 5, 5), 0) == []
    assert steps(machine.handle(StepDone(0), 1)) == ["c:0+5 d:0+5"]
    assert steps(machine.handle(StepDone(1), 2)) == ["e:0+5 f:0+5"]
    assert machine.running == 4


def test_a_prompt_has_one_chunk_in_flight() -> None:
    machine = colocated("chunked")
    assert steps(machine.handle(Arrived("a", 20, 5), 0)) == ["a:0+8"]
    assert steps(machine.handle(Arrived("b", 20, 5), 0)) == ["b:0+8"]
    assert steps(machine.handle(StepDone(0), 1)) == ["a:8+8"]
    assert steps(machine.handle(StepDone(1), 2)) == ["b:8+8"]
    assert steps(machine.handle(StepDone(2), 3)) == ["a:16+4"]
    assert steps(machine.handle(StepDone(3), 4)) == ["b:16+4"]
    assert steps(machine.handle(StepDone(4), 5)) == ["a"]


def test_prompts_go_first_on_every_stage() -> None:
    machine = colocated("prefill_first")
    machine.handle(Arrived("a", 4, 9), 0)
    machine.handle(StepDone(0), 1)
    assert steps(machine.handle(Arrived("b", 8, 9), 2)) == ["b:0+8"]
    machine.handle(Arrived("c", 8, 9), 2)
    assert steps(machine.handle(StepDone(1), 3)) == ["c:0+8"]
    assert steps(machine.handle(StepDone(2), 4)) == ["a"]


@given(seed=st.integers(0, 2**32 - 1), pp=st.sampled_from((1, 2, 3)))
@settings(max_examples=100, deadline=None)
def test_steps_are_balanced(seed: int, pp: int) -> None:
    """No step exceeds its share of those that run, and without news everything that runs is soon in a step."""
    rng = random.Random(seed)
    machine = decode(pp, pages=400, max_num_seqs=12)
    ids = iter(range(1000))
    for _ in range(rng.randint(1, 60)):
        if rng.random() < 0.4 and machine.running < 12:
            commands = land(machine, f"r{next(ids)}")
        elif machine._flights:
            flight = machine._flights[0]
            stopped = [id for id in flight.batch.members if rng.random() < 0.1]
            commands = machine.handle(StepDone(oldest(machine), tuple(stopped)), 0)
        else:
            continue
        for command in commands:
            if isinstance(command, RunStep):
                assert 1 <= len(command.decodes) <= -(-machine.running // pp)
    for _ in range(2 * pp):
        if machine._flights:
            machine.handle(StepDone(oldest(machine)), 0)
    sizes = [len(flight.batch) for flight in machine._flights]
    assert len(sizes) == min(pp, machine.running)
    assert sum(sizes) == machine.running
    assert max(sizes, default=0) <= -(-machine.running // pp)
