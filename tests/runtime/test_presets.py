"""Every preset of sharding rules is a way to run: an instance gives the same text under each."""

from __future__ import annotations

import asyncio

import pytest

from jdserve.models.checkpoint import LoadedModel
from jdserve.runtime.engine import Engine
from jdserve.runtime.executor import JaxExecutor
from jdserve.runtime.launch import loader, make_engine, plan_devices
from jdserve.runtime.progress import Progress
from jdserve.sharding.presets import PRESETS
from runtime.harness import answer, colocated, decode, plan_of, prefill, request, run


@pytest.mark.slow
def test_every_preset_gives_the_same_tokens(model: LoadedModel) -> None:
    plan = plan_of(colocated(tp=2, token_budget=32, max_num_seqs=2), longest=32)
    devices, load = plan_devices(plan), loader(plan, model, Progress())
    asked = [request("a", range(3, 29), max_tokens=6), request("b", range(9, 14), max_tokens=6)]

    async def body(engine: Engine) -> list[tuple[int, ...]]:
        return [one.tokens for one in await asyncio.gather(*(answer(engine, one) for one in asked))]

    found = {}
    for name, rules in PRESETS.items():
        make = lambda one: JaxExecutor(plan, one, model.spec, devices[one.name], load, rules)  # noqa: B023, E731
        found[name] = run(make_engine(plan, model.spec, make), body)
    assert [len(tokens) for tokens in found["tensor"]] == [6, 6]
    assert found == dict.fromkeys(PRESETS, found["tensor"])


def test_kv_that_moves_is_cut_by_heads(model: LoadedModel) -> None:
    plan = plan_of(prefill(tp=2), decode(tp=2))
    with pytest.raises(ValueError, match=r"rules.kv_heads must not be None: d0 exchanges KV"):
        JaxExecutor(plan, plan.instances[1], model.spec, [], loader(plan, model, Progress()), PRESETS["expert"])
