"""Requests that are cancelled, refused or broken, in every state: nothing else notices, and no page is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jdserve.core.errors import InvalidPlan, InvalidRequest, Overloaded
from jdserve.core.plan import PrefillInstance
from jdserve.models.checkpoint import LoadedModel
from jdserve.runtime.engine import Engine
from runtime.harness import (
    Breaking,
    Held,
    answer,
    colocated,
    decode,
    engine_for,
    plan_of,
    prefill,
    prompt,
    request,
    run,
    settled,
    until,
)

PD = plan_of(prefill(), decode())


def stats(engine: Engine, name: str) -> Any:
    return next(instance for instance in engine.stats().instances if instance.name == name)


async def acquired(semaphore: Any) -> None:
    assert await asyncio.to_thread(semaphore.acquire, timeout=20)


def holding(role: str, **what: bool) -> tuple[dict[str, Held], Any]:
    held: dict[str, Held] = {}

    def wrap(instance: Any, executor: Any) -> Any:
        if instance.name.startswith(role):
            held[instance.name] = Held(executor, **what)
            return held[instance.name]
        return executor

    return held, wrap


def test_a_client_that_goes_while_prefilling(model: LoadedModel) -> None:
    """PD-01 (a): pages of a step in flight come back when it ends, the queued neighbour is served."""
    held, wrap = holding("p", launch=True)

    async def body(engine: Engine) -> None:
        first = asyncio.create_task(answer(engine, request("a", prompt(40), max_tokens=5)))
        await acquired(held["p0"].reached)
        second = asyncio.create_task(answer(engine, request("b", prompt(40, 1), max_tokens=5)))
        third = asyncio.create_task(answer(engine, request("c", prompt(40, 2), max_tokens=5)))
        await asyncio.sleep(0)
        first.cancel()
        third.cancel()  # still queued
        await asyncio.wait({first, third})
        held["p0"].go.release(2)
        assert len((await second).tokens) == 5
        await settled(engine)
        assert stats(engine, "d0").transfers == 1

    run(engine_for(model, PD, wrap), body)


def test_a_client_that_goes_while_its_kv_is_parked(model: LoadedModel) -> None:
    """PD-01 (b): KV that waits on the prefill mesh is freed when nobody wants it any more."""
    plan = plan_of(prefill(), decode(max_num_seqs=1))
    held, wrap = holding("d", launch=True)

    async def body(engine: Engine) -> None:
        first = asyncio.create_task(answer(engine, request("a", prompt(40), max_tokens=3)))
        await acquired(held["d0"].reached)
        second = asyncio.create_task(answer(engine, request("b", prompt(40, 1), max_tokens=5)))
        await until(lambda: stats(engine, "p0").parked == 1, "the second request is parked")
        second.cancel()
        await asyncio.wait({second})
        await until(lambda: stats(engine, "p0").pages_owned == 0, "parked pages are freed")
        held["d0"].go.release(2)
        assert len((await first).tokens) == 3

    run(engine_for(model, plan, wrap), body)


def test_a_client_that_goes_during_the_pull(model: LoadedModel) -> None:
    """PD-01 (c): pages that are being written are not reused before the pull has ended."""
    held, wrap = holding("d", pull=True)

    async def body(engine: Engine) -> None:
        first = asyncio.create_task(answer(engine, request("a", prompt(40), max_tokens=5)))
        await acquired(held["d0"].reached)
        first.cancel()
        await asyncio.wait({first})
        await until(lambda: stats(engine, "p0").pages_owned == 0, "the source is free")
        await until(lambda: stats(engine, "d0").pages_owned == 3, "the destination holds its pages")
        held["d0"].go.release()
        await until(lambda: stats(engine, "d0").pages_owned == 0, "the destination is free")
        held["d0"].go.release()
        assert len((await answer(engine, request("b", prompt(40), max_tokens=5))).tokens) == 5

    run(engine_for(model, PD, wrap), body)


def test_a_parked_kv_whose_lease_ends_is_computed_again(model: LoadedModel) -> None:
    held, wrap = holding("d", pull=True)

    async def body(engine: Engine) -> None:
        task = asyncio.create_task(answer(engine, request("a", prompt(40), max_tokens=5)))
        await acquired(held["d0"].reached)
        await until(lambda: stats(engine, "p0").pages_owned == 0, "the lease ends")
        held["d0"].go.release()  # comes too late: the offer is gone
        await acquired(held["d0"].reached)
        held["d0"].go.release()
        whole = await task
        assert len(whole.tokens) == 5
        assert stats(engine, "p0").steps == 2
        assert stats(engine, "d0").transfers == 1

    run(engine_for(model, plan_of(prefill(lease_s=0.5), decode()), wrap), body)


@pytest.mark.parametrize(("role", "at"), [("d", 3), ("p", 0)])
def test_a_step_that_raises_fails_its_requests_only(role: str, at: int, model: LoadedModel) -> None:
    """API-09 and PD-04: an error with its reason, at once; the next request is served."""

    def wrap(instance: Any, executor: Any) -> Any:
        return Breaking(executor, at) if instance.name.startswith(role) else executor

    async def body(engine: Engine) -> None:
        broken = await answer(engine, request("a", prompt(20), max_tokens=10))
        assert broken.finish == "error"
        assert broken.error == "RuntimeError: injected fault"
        assert len(broken.tokens) == (0 if role == "p" else 1 + at)
        await settled(engine)
        assert len((await answer(engine, request("b", prompt(20), max_tokens=10))).tokens) == 10

    run(engine_for(model, PD, wrap), body)


def test_an_instance_that_loses_its_pool_dies_and_says_so(model: LoadedModel) -> None:
    def wrap(instance: Any, executor: Any) -> Any:
        return Breaking(executor, 2, lose_pool=True) if isinstance(instance, PrefillInstance) else executor

    async def whole() -> None:
        engine = engine_for(model, PD, wrap)
        await engine.start()
        try:
            for id in "ab":
                assert (await answer(engine, request(id, prompt(20), max_tokens=4))).finish == "length"
            with pytest.raises(Overloaded, match="no live prefill"):
                await answer(engine, request("c", prompt(20), max_tokens=4))
            assert engine.stats().dead == {"p0": "RuntimeError: injected fault"}
            assert not engine.ready
            with pytest.raises(Overloaded, match="p0 died: RuntimeError: injected fault"):
                await answer(engine, request("d", prompt(20), max_tokens=4))
        finally:
            await engine.close()

    asyncio.run(whole())


def test_requests_that_end_with_prefill_move_no_kv(model: LoadedModel) -> None:
    """PD-07: one token, or a first token that ends the text, or none at all."""

    async def body(engine: Engine) -> None:
        one = await answer(engine, request("a", prompt(20), max_tokens=1))
        assert (len(one.tokens), one.finish) == (1, "length")
        stop = await answer(engine, request("b", prompt(20), max_tokens=9, stop_token_ids=one.tokens))
        assert (stop.tokens, stop.finish) == (one.tokens, "stop")
        none = await answer(engine, request("c", prompt(20), max_tokens=0, prompt_logprobs=1))
        assert (none.tokens, none.finish) == ((), "length")
        assert none.prompt_logprobs is not None
        assert [entry.token for entry in none.prompt_logprobs] == list(prompt(20)[1:])
        assert stats(engine, "d0").transfers == 0
        later = await answer(engine, request("d", prompt(20), max_tokens=9, stop_token_ids=one.tokens, min_tokens=4))
        assert not set(later.tokens[:4]) & set(one.tokens)
        assert stats(engine, "d0").transfers == 1

    run(engine_for(model, PD), body)


def test_requests_that_can_never_be_served_are_refused_with_the_bound(model: LoadedModel) -> None:
    wrong = {
        "together they exceed the 128 tokens": request("a", prompt(100), max_tokens=29),
        "at least one token": request("b", (), max_tokens=2),
        "outside 0..1099": request("c", (5, 1100), max_tokens=2),
        "temperature must be between": request("d", prompt(3), temperature=-1.0),
        "stop_token_ids takes at most 63 ids": request("e", prompt(3), stop_token_ids=tuple(range(64))),
    }

    async def body(engine: Engine) -> None:
        for message, bad in wrong.items():
            with pytest.raises(InvalidRequest, match=message):
                await answer(engine, bad)
        twice = engine.generate(request("x", prompt(20), max_tokens=50))
        await anext(twice)
        with pytest.raises(InvalidRequest, match="in use"):
            await answer(engine, request("x", prompt(20)))
        await twice.aclose()
        assert stats(engine, "p0").steps == 1
        assert len((await answer(engine, request("f", prompt(100), max_tokens=28))).tokens) == 28

    run(engine_for(model, PD), body)


def test_nothing_compiles_after_ready(model: LoadedModel) -> None:
    """JAX-01: a sweep over batch sizes, lengths and options."""
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
        {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.1, "logit_bias": {3: 5.0}},
        {"logprobs": 5, "min_tokens": 2},
        {"prompt_logprobs": 2},
    ]

    async def body(engine: Engine) -> None:
        for batch in (1, 2, 3, 4, 7):
            for n, length in enumerate((1, 16, 33, 100)):
                some = [
                    request(f"{batch}-{length}-{i}", prompt(length, i), max_tokens=6, **options[(n + i) % 5])
                    for i in range(batch)
                ]
                await asyncio.gather(*(answer(engine, one) for one in some))
        assert engine.stats().recompilations == 0
        assert stats(engine, "d0").transfers == 68

    run(engine_for(model, plan_of(prefill(), decode())), body)


def test_draining_ends_open_requests_and_takes_no_new_ones(model: LoadedModel) -> None:
    held, wrap = holding("d", pull=True)

    async def body(engine: Engine) -> None:
        first = asyncio.create_task(answer(engine, request("a", prompt(40), max_tokens=5)))
        await acquired(held["d0"].reached)  # its hand-off is in flight
        draining = asyncio.create_task(engine.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="draining"):
            await answer(engine, request("b", prompt(40), max_tokens=5))
        assert not draining.done()
        held["d0"].go.release()
        assert len((await first).tokens) == 5
        await draining

    run(engine_for(model, PD, wrap), body)


def test_a_drain_that_takes_too_long_fails_what_is_open(model: LoadedModel) -> None:
    held, wrap = holding("d", launch=True)

    async def body(engine: Engine) -> None:
        first = asyncio.create_task(answer(engine, request("a", prompt(40), max_tokens=5)))
        await acquired(held["d0"].reached)
        await engine.drain(0.0)
        assert (await first).finish == "error"
        held["d0"].go.release()

    run(engine_for(model, PD, wrap), body)


def test_plans_that_cannot_run_here_are_refused(model: LoadedModel) -> None:
    with pytest.raises(InvalidPlan, match=r"instances\[0\].tp: 3 does not fit 8 query heads"):
        engine_for(model, plan_of(colocated(tp=3)))
    with pytest.raises(InvalidPlan, match=r"device 4 is named"):
        engine_for(model, plan_of(prefill(tp=4), decode()))
    with pytest.raises(InvalidPlan, match=r"max_model_len: 4096 is above the 256"):
        engine_for(model, plan_of(colocated(pages=256), longest=4096))


def test_where_the_time_went(model: LoadedModel) -> None:
    """Each output says how far its request has come, in an order that can be."""

    async def body(engine: Engine) -> None:
        seen = [output.phases async for output in engine.generate(request("a", prompt(40), max_tokens=5))]
        assert all(phases is not None and (phases.prefill, phases.runs) == ("p0", 1) for phases in seen)
        first, last = seen[0], seen[-1]
        assert first is not None
        assert last is not None
        assert (first.handed_off, first.decode, last.decode) == (0.0, "", "d0")
        times = (last.arrived, last.dispatched, last.launched, last.prefilled, last.handed_off, last.landed)
        assert list(times) == sorted(times)
        assert stats(engine, "p0").prefix_queries == 40
        assert stats(engine, "d0").pulling == 0

    run(engine_for(model, PD), body)
