from __future__ import annotations

import io

import msgspec
import pytest

from jdserve.core.plan import ColocatedInstance, DecodeInstance, PrefillInstance
from jdserve.core.steptime import StepFeatures
from jdserve.policy.build import RouterConfig, machine_of
from jdserve.policy.commands import (
    BriefStep,
    Chunk,
    Command,
    DecodeSeq,
    Dispatch,
    Emit,
    Preempt,
    Pull,
    Reject,
    Release,
    Retire,
    RunStep,
)
from jdserve.policy.events import (
    Arrived,
    Cancelled,
    Draining,
    Event,
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
from jdserve.policy.record import Entry, Header, Recorder, replay

EVENTS: tuple[Event, ...] = (
    Arrived("a", 1, 2, (b"\x00\xff", b"")),
    Cancelled("a"),
    StepDone(3, ("a",), ("b",)),
    KVReady("a", "p", 1, 2),
    KVLanded("a"),
    PullFailed("a", "why"),
    LeaseExpired("a"),
    Preempted("a", 3, 4),
    Finished("a"),
    PeerFailed("p"),
    PeerJoined("p"),
    Draining(),
    Draining("d"),
    PeerJoined("d", "decode"),
    Tick(),
)
COMMANDS: tuple[Command, ...] = (
    RunStep(0, (Chunk("a", 0, 4, (1, 2), last=True),), (DecodeSeq("b", 7, (3,)),)),
    BriefStep(1, StepFeatures(4, 16, 0, 1, 7), ("a",)),
    Pull("a", "p", 4, (1,)),
    Release("a", "p"),
    Preempt("a"),
    Emit("a", 0, "length", parked=True),
    Reject("a", "why", retryable=False),
    Dispatch("a", "d", "p"),
    Retire("d"),
)


def recorded(file: io.StringIO | None = None) -> Recorder:
    config = PrefillInstance(name="p", pages=10, lm_tokens=8)
    recorder = Recorder(machine_of(config, 4), Header(config, 4), file)
    recorder.handle(Arrived("a", 8, 5, (b"\x00\x01", b"\xfe\xff")), 10)
    recorder.handle(Arrived("b", 8, 1, (b"\x00\x01", b"\xfe\xff")), 20)
    recorder.handle(StepDone(0), 30)
    recorder.handle(KVLanded("a"), 40)
    recorder.handle(StepDone(1), 50)
    return recorder


def test_every_event_and_command_survives_json_exactly() -> None:
    assert {type(event) for event in EVENTS} == set(Event.__args__)
    assert {type(command) for command in COMMANDS} == set(Command.__args__)
    for event in EVENTS:
        entry = Entry(2**62, event, COMMANDS)
        assert msgspec.json.decode(msgspec.json.encode(entry), type=Entry) == entry


def test_every_header_survives_json_exactly() -> None:
    for config in (
        PrefillInstance(name="p", pages=10, lm_tokens=8),
        DecodeInstance(name="d", pages=10, max_num_seqs=3, watermark=0.1),
        ColocatedInstance(name="c", pages=10, max_num_seqs=3, token_budget=8),
        RouterConfig(prefill=("p",), decode=("d",), colocated=("c",), max_retries=1, balance="requests"),
    ):
        header = Header(config, 4)
        assert msgspec.json.decode(msgspec.json.encode(header), type=Header) == header


def test_a_recorder_says_what_its_machine_says_and_replays_identically() -> None:
    file = io.StringIO()
    recorder = recorded(file)
    assert [entry.now for entry in recorder.entries] == [10, 20, 30, 40, 50]
    assert recorder.entries[0].commands == (RunStep(0, (Chunk("a", 0, 8, (1, 2), last=True),)),)
    assert file.getvalue().splitlines() == recorder.lines()
    result = replay(recorder.lines())
    assert (result.identical, result.events, result.differs_at) == (True, 5, None)
    file.seek(0)
    assert replay(file).identical


def test_the_first_difference_is_named() -> None:
    recorder = recorded()
    changed = recorder.entries[3]
    recorder.entries[3] = Entry(changed.now, changed.event, (Emit("a"),))
    result = replay(recorder.lines())
    assert not result.identical
    assert (result.differs_at, result.events) == (3, 4)
    assert (result.recorded, result.replayed) == ((Emit("a"),), (Release("a"),))


def test_the_header_decides_what_is_replayed() -> None:
    lines = recorded().lines()
    other = msgspec.json.encode(Header(PrefillInstance(name="p", pages=10, lm_tokens=8, prefix_cache=False), 4))
    assert replay([other, *lines[1:]]).differs_at == 2


def test_a_refused_event_is_not_logged() -> None:
    recorder = recorded()
    with pytest.raises(ValueError, match="no step is in flight"):
        recorder.handle(StepDone(9), 60)
    assert len(recorder.entries) == 5
    assert replay(recorder.lines()).identical


def test_a_log_that_is_none_is_refused_with_its_line() -> None:
    lines = recorded().lines()
    with pytest.raises(ValueError, match="line 1: the log is empty"):
        replay([])
    with pytest.raises(ValueError, match="line 1: no Header"):
        replay(lines[1:])
    with pytest.raises(ValueError, match="line 3: no Entry"):
        replay([*lines[:2], "{}"])
    with pytest.raises(ValueError, match="line 2: no Entry"):
        replay([lines[0], "what"])
