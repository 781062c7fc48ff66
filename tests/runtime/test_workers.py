"""Instances in processes of their own: the same texts, and nothing lost when one of them dies, hangs or leaves."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from jdserve.core.errors import InvalidPlan, JdserveError, Overloaded
from jdserve.core.plan import HostedStage, Plan, Worker
from jdserve.core.request import Request
from jdserve.models.checkpoint import LoadedModel
from jdserve.policy.record import replay
from jdserve.runtime.engine import Engine
from runtime import workers
from runtime.harness import Answer, answer, colocated, decode, prefill, prompt, request, serve, until
from runtime.harness import plan_of as local_plan
from runtime.workers import ask, back, engine_for, hit, long_ones, plan_of, run

pytestmark = pytest.mark.slow


def requests(count: int = 6, tokens: int = 12, salt: int = 0) -> list[Request]:
    sampled = [{"temperature": 0.8, "seed": 5}, {}]
    return [request(f"r{i}", prompt(5 + 11 * i, salt + i), max_tokens=tokens, **sampled[i % 2]) for i in range(count)]


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> dict[str, Answer]:
    """What one device gives for all requests of this module."""
    asked = requests() + long_ones()
    return {r.id: a for r, a in zip(asked, serve(model, local_plan(colocated()), asked), strict=True)}


def check(asked: list[Request], answers: list[Answer], expected: dict[str, Answer]) -> None:
    for r, a in zip(asked, answers, strict=True):
        assert (a.error, a.finish, a.tokens) == (None, expected[r.id].finish, expected[r.id].tokens), r.id


@pytest.mark.parametrize("transport", ["auto", "pull"])
def test_the_texts_of_one_device_and_a_log_that_replays(
    model: LoadedModel, expected: dict[str, Answer], tmp_path: Path, transport: str
) -> None:
    plan = plan_of(model, prefill(), decode(), transport=transport)

    async def body(engine: Engine) -> None:
        check(requests(), await ask(engine, requests()), expected)
        stats = {one.name: one for one in engine.stats().instances}
        assert stats["d0"].transfers == len(requests())
        assert stats["d0"].transfer_bytes > 0
        assert stats["p0"].transfers == 0

    run(engine_for(model, plan, record=tmp_path), body)
    for name in ("router", "p0", "d0"):
        result = replay((tmp_path / f"{name}.jsonl").read_text().splitlines())
        assert result.identical
        assert result.events


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("p0", signal.SIGKILL),
        ("d0", signal.SIGSTOP),
        pytest.param("p0", signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param("d0", signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_a_worker_that_dies_or_hangs_costs_no_token(
    model: LoadedModel, expected: dict[str, Answer], victim: str, number: signal.Signals
) -> None:
    """CAN-04, the part of it that is below HTTP."""
    plan = plan_of(model, prefill(), decode())

    async def body(engine: Engine) -> None:
        first = [asyncio.create_task(answer(engine, r)) for r in long_ones()]
        await until(lambda: engine.stats().transfers.count >= 2, "some are being decoded")
        old = hit(victim, number)
        more = [asyncio.create_task(answer(engine, r)) for r in requests()]
        await until(lambda: victim in engine.stats().dead, "the death is noticed", 20)
        assert victim in engine.progress.error
        assert not engine.ready
        check(long_ones(), await asyncio.gather(*first), expected)
        check(requests(), await asyncio.gather(*more), expected)
        await back(engine, victim, old)
        assert engine.ready
        assert engine.progress.error is None
        assert engine.stats().restarts == 1
        again = requests()
        check(again, await ask(engine, again), expected)

    run(engine_for(model, plan), body)


@pytest.mark.long
def test_streams_that_hold_their_kv_outlive_the_prefill_instance(
    model: LoadedModel, expected: dict[str, Answer]
) -> None:
    plan = plan_of(model, prefill("p0"), prefill("p1"), decode())

    async def body(engine: Engine) -> None:
        first = [asyncio.create_task(answer(engine, r)) for r in long_ones()]
        await until(lambda: engine.stats().transfers.count == 4, "all are being decoded")
        retries = engine.stats().retries
        old = hit("p0")
        check(long_ones(), await asyncio.gather(*first), expected)
        assert engine.stats().retries == retries  # nobody had to begin anew
        check(requests(), await ask(engine, requests()), expected)
        assert engine.ready  # there is p1
        await back(engine, "p0", old)
        await ask(engine, [request(f"n{i}", prompt(20, i), max_tokens=2) for i in range(8)])
        steps = {one.name: one.steps for one in engine.stats().instances}
        assert steps["p0"] > 0  # it was given work again

    run(engine_for(model, plan), body)


def test_draining_and_adding_lose_nothing(model: LoadedModel, expected: dict[str, Answer]) -> None:
    plan = plan_of(model, prefill(), decode("d0"))

    async def body(engine: Engine) -> None:
        with pytest.raises(InvalidPlan, match="d0 is the last live instance of its role"):
            await engine.drain_instance("d0")
        with pytest.raises(InvalidPlan, match="no instance 'x'"):
            await engine.drain_instance("x")
        first = [asyncio.create_task(answer(engine, r)) for r in long_ones()]
        await until(lambda: engine.stats().transfers.count >= 1, "one is being decoded")
        with pytest.raises(InvalidPlan, match="used twice"):
            await engine.add_instance(decode("d0"), Worker("d9", (HostedStage("d0", (9,)),)))
        with pytest.raises(InvalidPlan, match="already taken"):
            await engine.add_instance(decode("d1"), Worker("d1", (HostedStage("d1", (0,)),)))
        await engine.add_instance(decode("d1"), Worker("d1", (HostedStage("d1", (2,)),)))
        assert set(workers.workers()) == {"p0", "d0", "d1"}
        more = [asyncio.create_task(answer(engine, r)) for r in requests()]
        await engine.drain_instance("d0")
        check(long_ones(), await asyncio.gather(*first), expected)
        check(requests(), await asyncio.gather(*more), expected)
        await until(lambda: set(workers.workers()) == {"p0", "d1"}, "d0 is gone")
        check(requests(), await ask(engine, requests()), expected)
        assert [one.name for one in engine.stats().instances] == ["p0", "d1"]
        assert engine.ready
        with pytest.raises(InvalidPlan, match="d1 is the last"):
            await engine.drain_instance("d1")

    run(engine_for(model, plan), body)


def test_a_full_decode_side_parks_then_stops_prefill_then_sheds(
    model: LoadedModel, expected: dict[str, Answer]
) -> None:
    plan = plan_of(model, prefill(pages=12), decode(pages=9, max_num_seqs=2), max_open_requests=10)

    async def body(engine: Engine) -> None:
        asked = long_ones() + requests()
        running = [asyncio.create_task(answer(engine, r)) for r in asked]
        await until(lambda: engine.stats().transfers.count >= 1, "the first is being decoded")
        with pytest.raises(Overloaded, match="10 requests are open already"):
            await answer(engine, request("late", prompt(4), max_tokens=2))
        check(asked, await asyncio.gather(*running), expected)

    run(engine_for(model, plan), body)


def started(engine: Engine) -> None:
    async def body() -> None:
        try:
            await engine.start()
        finally:
            await engine.close()

    asyncio.run(body())


def test_what_is_wrong_is_told_at_once(model: LoadedModel) -> None:
    plan = plan_of(model, prefill(), decode())

    def elsewhere(host: str) -> Plan:
        p0, d0 = plan.workers
        return Plan(
            model=plan.model, max_model_len=128, instances=plan.instances, workers=(p0, Worker("d0", d0.stages, host))
        )

    with pytest.raises(InvalidPlan, match=r"\$\.workers\[1\]\.host.*no known host"):
        engine_for(model, elsewhere("no-such-host.invalid"))
    with pytest.raises(InvalidPlan, match=r"is not this machine.*--control"):
        engine_for(model, elsewhere("10.255.0.9"))
    with pytest.raises(InvalidPlan, match="no private address"):
        started(engine_for(model, elsewhere("8.8.8.8"), host="0.0.0.0"))
    with pytest.raises(JdserveError, match=r"worker d0 on 10\.255\.0\.9 has not joined within 1 s.*--name d0 --join"):
        started(engine_for(model, elsewhere("10.255.0.9"), host="0.0.0.0", join_timeout_s=1.0))
    assert workers.workers() == {}
    far = Plan(
        model=plan.model,
        max_model_len=128,
        instances=plan.instances,
        workers=(plan.workers[0], Worker("d0", (HostedStage("d0", (4000,)),))),
    )
    with pytest.raises(InvalidPlan, match="worker d0 wants core 4000, this machine offers"):
        started(engine_for(model, far, oversubscribe=False))
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1:.* for workers"),
    ):
        started(engine_for(model, plan, port=taken.getsockname()[1]))


def test_a_worker_that_cannot_start_says_why(model: LoadedModel) -> None:
    plan = plan_of(model, prefill(), decode())
    broken = Plan(
        model=str(model.folder / "no-such-model"), max_model_len=128, instances=plan.instances, workers=plan.workers
    )
    with pytest.raises(JdserveError, match=r"worker .0 could not start: .*no model"):
        started(engine_for(model, broken))
    assert workers.workers() == {}
