"""Instances that span worker processes: the texts of one device, and one death restarts the whole instance."""

from __future__ import annotations

import asyncio
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import HostedStage, Instance, Plan, Worker
from jdserve.core.request import Guide, Request
from jdserve.models.checkpoint import LoadedModel
from jdserve.runtime import lockstep
from jdserve.runtime.channel import Channel, Keys, new_secret
from jdserve.runtime.engine import Engine
from jdserve.runtime.team import SILENCE_S, Team
from jdserve.runtime.wire import World
from runtime.harness import Answer, answer, colocated, decode, prefill, prompt, request, serve, until
from runtime.harness import plan_of as local_plan
from runtime.workers import ask, engine_for, hit, long_ones, run, workers

SPANS: dict[str, list[list[tuple[int, int]]]] = {
    "one": [[(0, 1)]],
    "PP2": [[(0, 1)], [(1, 1)]],
    "TP2": [[(0, 1)], [(0, 1)]],
    "TP2 in each of PP2": [[(0, 2)], [(1, 2)]],
    "TP2 x PP2": [[(0, 1), (1, 1)], [(0, 1), (1, 1)]],
}
"""For each worker of an instance the stages that it hosts, with the number of devices."""


def spanning(model: LoadedModel | None, *instances: tuple[Instance, str], **changes: Any) -> Plan:
    """A plan whose instances lie on workers as ``SPANS`` says, each with the next free devices."""
    workers, device = [], 0
    for instance, span in instances:
        for number, parts in enumerate(SPANS[span]):
            stages = []
            for stage, count in parts:
                stages.append(HostedStage(instance.name, tuple(range(device, device + count)), stage))
                device += count
            workers.append(Worker(f"{instance.name}-{number}", tuple(stages)))
    fields = {"max_model_len": 128, "platform": "cpu", **changes}
    return Plan(
        model=str(model.folder) if model is not None else "tiny",
        instances=tuple(instance for instance, _ in instances),
        workers=tuple(workers),
        **fields,
    )


def degrees(span: str) -> dict[str, Any]:
    """TP and PP of an instance on ``span``."""
    parts = [part for worker in SPANS[span] for part in worker]
    stages = {stage for stage, _ in parts}
    return {"pp": len(stages), "tp": sum(count for stage, count in parts if stage == 0)}


def requests() -> list[Request]:
    options: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 5},
        {},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.7, "seed": 15, "presence_penalty": 0.8, "frequency_penalty": 0.6},
        {"temperature": 1.0, "seed": 16, "ignore_eos": False, "guide": Guide("regex", "(fox|owl){5,}")},
    ]
    return [request(f"r{i}", prompt(5 + 11 * i, i), max_tokens=12, **options[i % 5]) for i in range(6)]


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> dict[str, Answer]:
    """What one device gives."""
    asked = requests() + long_ones()
    return {r.id: a for r, a in zip(asked, serve(model, local_plan(colocated()), asked), strict=True)}


def check(asked: list[Request], answers: list[Answer], expected: dict[str, Answer]) -> None:
    for r, a in zip(asked, answers, strict=True):
        wanted = expected[r.id]
        assert (a.error, a.finish, a.tokens) == (None, wanted.finish, wanted.tokens), r.id
        scored, oracle = ([*one.logprobs, *(one.prompt_logprobs or ())] for one in (a, wanted))
        assert [(one.token, one.rank) for one in scored] == [(one.token, one.rank) for one in oracle], r.id
        assert [one.logprob for one in scored] == pytest.approx([one.logprob for one in oracle], abs=1e-4), r.id


@pytest.mark.slow
@pytest.mark.parametrize(
    "span",
    ["TP2 x PP2", pytest.param("PP2", marks=pytest.mark.long), pytest.param("TP2", marks=pytest.mark.long)],
)
def test_colocated(model: LoadedModel, expected: dict[str, Answer], span: str) -> None:
    plan = spanning(model, (colocated(**degrees(span)), span))

    async def body(engine: Engine) -> None:
        check(requests(), await ask(engine, requests()), expected)
        (counts,) = engine.stats().instances
        assert (counts.bubble_s > 0) == (plan.instances[0].pp > 1)
        assert counts.bubble_s <= (plan.instances[0].pp - 1) * counts.busy_s * 1.05 + 1.0, "a launch is within a step"

    run(engine_for(model, plan), body)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("source", "destination"), [("TP2", "PP2")])
def test_hand_off(model: LoadedModel, expected: dict[str, Answer], source: str, destination: str) -> None:
    """KV moves from each process that has some to each process that wants some; more pairs of instances below."""
    pair = (prefill(**degrees(source)), source), (decode(**degrees(destination)), destination)
    plan = spanning(model, *pair)

    async def body(engine: Engine) -> None:
        check(requests(), await ask(engine, requests()), expected)
        stats = {one.name: one for one in engine.stats().instances}
        assert stats["d0"].transfers == len(requests())

    run(engine_for(model, plan), body)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "destination", "victim", "number"),
    [
        pytest.param("PP2", "one", "p0-1", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("one", "PP2", "d0-1", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("one", "TP2", "d0-0", signal.SIGKILL, marks=pytest.mark.long),
        ("one", "TP2", "d0-1", signal.SIGSTOP),  # the other one hangs in a collective
    ],
)
def test_one_death_restarts_the_whole_instance(
    model: LoadedModel, expected: dict[str, Answer], source: str, destination: str, victim: str, number: signal.Signals
) -> None:
    pair = (prefill(**degrees(source)), source), (decode(**degrees(destination)), destination)
    name = victim.partition("-")[0]
    plan = spanning(model, *pair, transfer_checksums=source == "one")
    parts = [worker.name for worker in plan.workers if worker.instances == (name,)]

    async def body(engine: Engine) -> None:
        first = [asyncio.create_task(answer(engine, r)) for r in long_ones()]
        await until(lambda: engine.stats().transfers.count >= 2, "some are being decoded")
        old = workers()
        hit(victim, number)
        more = [asyncio.create_task(answer(engine, r)) for r in requests()]
        await until(lambda: name in engine.stats().dead, "the death is noticed")
        check(long_ones(), await asyncio.gather(*first), expected)
        check(requests(), await asyncio.gather(*more), expected)
        await until(lambda: name not in engine.stats().dead, f"{name} takes work again", 120)
        new = workers()
        assert all(new[part] != old[part] for part in parts)
        assert {part: pid for part, pid in new.items() if part not in parts} == {
            part: pid for part, pid in old.items() if part not in parts
        }
        assert engine.stats().restarts == 1

    run(engine_for(model, plan), body)


def test_a_plan_that_cannot_work_is_refused() -> None:
    def broken(*instances: tuple[Instance, str], workers: tuple[Worker, ...] = (), **changes: Any) -> Plan:
        plan = spanning(None, *instances, **changes)
        return msgspec.structs.replace(plan, workers=workers or plan.workers)

    decode_pp2, prefill_pp2 = (decode(pp=2), "PP2"), (prefill(pp=2), "PP2")
    one, other = (prefill(), "one"), (decode(), "one")
    spanning(None, prefill_pp2, decode_pp2).check()
    with pytest.raises(InvalidPlan, match=r"\$\.transport: d0 spans 2 workers, which only pull can serve, not shm"):
        broken(one, decode_pp2, transport="shm").check()
    with pytest.raises(InvalidPlan, match=r"\$\.transport: device_put needs one prefill and one decode instance"):
        broken(one, decode_pp2, transport="device_put").check()
    with pytest.raises(InvalidPlan, match=r"\$\.transport: local needs one worker"):
        broken(one, decode_pp2, transport="local").check()
    with pytest.raises(InvalidPlan, match=r"\$\.transfer_checksums: p0 spans 2 workers"):
        broken(prefill_pp2, other, transfer_checksums=True).check()
    shared = (
        Worker("a", (HostedStage("p0", (0,)), HostedStage("d0", (1,)))),
        Worker("b", (HostedStage("p0", (2,), 1),)),
    )
    with pytest.raises(InvalidPlan, match=r"\$\.workers\[0\]\.stages: p0 spans 2 workers, so a must host nothing else"):
        broken(prefill_pp2, other, workers=shared).check()
    uneven = (Worker("a", (HostedStage("c0", (0,)),)), Worker("b", (HostedStage("c0", (1, 2, 3)),)))
    with pytest.raises(
        InvalidPlan, match=r"\$\.instances\[0\]\.tp: stage 0 of c0 lies on workers with 1 and 3 devices"
    ):
        broken((colocated(tp=4), "one"), workers=uneven).check()


class Peer:
    """Process 1 of an instance, as its leader sees it."""

    def __init__(self) -> None:
        self.now = 0.0
        keys = Keys(new_secret())
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.team = Team(World("", 2, 0, steps=address), keys, None, lambda: self.now)
        self._told: queue.SimpleQueue[lockstep.ToFollower] = queue.SimpleQueue()
        self._channel = Channel.connect(address, keys)
        take = lambda frames: self._told.put(lockstep.to_follower.decode(frames[0]))  # noqa: E731
        self._thread = threading.Thread(target=self._channel.run, args=(take, lambda: None, 0.01))
        self._thread.start()

    def say(self, message: lockstep.ToLeader) -> None:
        self._channel.post((lockstep.encode(message),))

    def told(self) -> lockstep.ToFollower:
        return self._told.get(timeout=10)

    def close(self) -> None:
        self.team.close()
        self._channel.close()
        self._thread.join()


@pytest.fixture
def peer() -> Iterator[Peer]:
    one = Peer()
    one.say(lockstep.Here(1, "", "1.2.3.4:5"))
    one.team.meet()
    yield one
    one.close()


def test_followers_are_told_in_order_and_answer(peer: Peer) -> None:
    assert peer.team.kv == ["", "1.2.3.4:5"]
    pages = np.arange(6, dtype=np.int32).reshape(2, 3)
    for id in range(3):
        peer.team.tell(lockstep.Gather(id, lockstep.pack(pages)))
    for id in range(3):
        told = peer.told()
        assert isinstance(told, lockstep.Gather)
        assert told.id == id
        assert (lockstep.unpack(told.pages) == pages).all()
    for error in ("", "no room"):
        id = peer.team.new_id()
        peer.team.expect(id)
        peer.say(lockstep.Answer(id, 1, error))
        assert peer.team.answers(id, 10.0) == error
    id = peer.team.new_id()
    peer.team.expect(id)
    assert peer.team.answers(id, 10.0, lambda: True) is None  # abandoned
    peer.team.forget(id)


@pytest.mark.parametrize("how", ["fails", "falls silent", "talks nonsense"])
def test_a_follower_that_is_lost_ends_every_wait(peer: Peer, how: str) -> None:
    result = peer.team.result(peer.team.new_id())
    if how == "fails":
        peer.say(lockstep.Failed("out of memory"))
    elif how == "falls silent":
        peer.now += SILENCE_S + 1
    else:
        peer._channel.post((b"nonsense",))
    with pytest.raises(RuntimeError, match=r"out of memory|has been silent for 15 s|was refused"):
        result.result(timeout=10)
    with pytest.raises(RuntimeError, match="a process of the instance is lost"):
        peer.team.tell(lockstep.Begin())
    peer.team.expect(7)
    with pytest.raises(RuntimeError, match="a process of the instance is lost"):
        peer.team.answers(7, 10.0)
    assert not peer.team.sound
