"""A prefill and a decode process in one ``jax.distributed`` world, and what its deaths and signals do."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import HostedStage, Plan, Worker
from jdserve.models.checkpoint import LoadedModel
from jdserve.runtime.engine import Engine
from jdserve.runtime.worlds import Unit, units_of
from runtime.harness import answer, colocated, decode, prefill, prompt, request, serve, until
from runtime.harness import plan_of as local_plan
from runtime.workers import back, engine_for, hit, plan_of, run, workers


def pair(**changes: object) -> Plan:
    workers = (Worker("d0", (HostedStage("d0", (0,)),)), Worker("p0", (HostedStage("p0", (1,)),)))
    fields = {"instances": (decode(), prefill()), "workers": workers, "transport": "device_put", **changes}
    return Plan(model="tiny", max_model_len=128, **fields)  # type: ignore[arg-type]


def test_a_unit_is_what_restarts_together() -> None:
    plan = pair()
    (unit,) = units_of(plan)
    assert unit.workers == ("p0", "d0")  # prefill is rank 0
    unit.begin(plan)
    first = unit.world(plan.worker("d0"))
    assert first is not None
    assert (first.rank, first.size, len(first.ports)) == (1, 2, 2)
    unit.begin(plan)  # the second worker of the same start
    assert unit.world(plan.worker("d0")) == first
    assert unit.generation == 1
    unit.end()
    unit.begin(plan)
    assert unit.generation == 2
    assert units_of(plan, [unit]) == [unit]


def test_workers_that_share_nothing_need_no_world() -> None:
    plan = pair(transport="pull")
    assert [unit.workers for unit in units_of(plan)] == [("d0",), ("p0",)]
    unit = Unit(("d0",))
    unit.begin(plan)
    assert unit.world(plan.worker("d0")) is None


def test_device_put_wants_one_of_each() -> None:
    many = (prefill("p0"), prefill("p1"), decode())
    three = tuple(Worker(one.name, (HostedStage(one.name, (n,)),)) for n, one in enumerate(many))
    with pytest.raises(InvalidPlan, match="device_put needs one prefill and one decode instance"):
        pair(instances=many, workers=three).check()
    together = (Worker("w", (HostedStage("p0", (0,)), HostedStage("d0", (1,)))),)
    with pytest.raises(InvalidPlan, match="in one worker each"):
        pair(workers=together).check()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["d0", pytest.param("p0", marks=pytest.mark.long)])
def test_jax_04_a_pair_serves_and_restarts_as_a_whole(model: LoadedModel, victim: str) -> None:
    """JAX-04: the death of one takes the other, both come back in a new world, and nobody's text is lost."""
    plan = plan_of(model, prefill(), decode(), transport="device_put")
    asked = [request(f"r{i}", prompt(9 + 13 * i, i), max_tokens=60) for i in range(5)]

    async def body(engine: Engine) -> tuple[list, list]:
        before = await asyncio.gather(*(answer(engine, r) for r in asked))
        running = [asyncio.create_task(answer(engine, r)) for r in asked]
        await until(lambda: engine.stats().transfers.count > len(asked), "some are being decoded")
        other = "d0" if victim == "p0" else "p0"
        pid = workers()[other]
        old = hit(victim)
        after = await asyncio.gather(*running)
        await back(engine, victim, old)
        await back(engine, other, pid)
        return before, after

    before, after = run(engine_for(model, plan), body)
    wanted = [one.tokens for one in serve(model, local_plan(colocated()), asked)]
    assert [one.tokens for one in before] == wanted
    assert [one.tokens for one in after] == wanted


@pytest.mark.slow
def test_jax_05_a_world_ends_on_sigterm(model: LoadedModel) -> None:
    """JAX-05: no notifier of jax's swallows the signal. A worker that is told to end restarts; the server closes."""
    plan = plan_of(model, prefill(), decode(), transport="device_put")

    async def body(engine: Engine) -> None:
        old = workers()
        os.kill(old["p0"], signal.SIGTERM)
        for name in ("p0", "d0"):
            await back(engine, name, old[name])
        assert (await answer(engine, request("r", prompt(20), max_tokens=3))).finish == "length"

    run(engine_for(model, plan), body)
