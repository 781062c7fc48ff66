"""Every preset of sharding rules is a way to run: an instance gives the same text under each."""

from __future__ import annotations

import asyncio

import pytest

from jdserve.core.plan import Instance
from jdserve.models.checkpoint import LoadedModel
from jdserve.runtime.engine import Engine
from jdserve.runtime.executor import JaxExecutor
from jdserve.runtime.launch import loader, make_engine, plan_devices
from jdserve.runtime.progress import Progress
from jdserve.sharding.presets import PRESETS
from runtime.harness import answer, colocated, decode, plan_of, prefill, request, run


def texts(model: LoadedModel, preset: str) -> list[tuple[int, ...]]:
    """Tokens of two requests under a preset."""
    plan = plan_of(colocated(tp=2, token_budget=32, max_num_seqs=2), longest=32)
    devices, load = plan_devices(plan), loader(plan, model, Progress())
    asked = [request("a", range(3, 29), max_tokens=6), request("b", range(9, 14), max_tokens=6)]

    def make(instance: Instance) -> JaxExecutor:
        return JaxExecutor(plan, instance, model.spec, devices[instance.name], load, PRESETS[preset])

    async def body(engine: Engine) -> list[tuple[int, ...]]:
        return [one.tokens for one in await asyncio.gather(*(answer(engine, one) for one in asked))]

    return run(make_engine(plan, model.spec, make), body)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def wanted(model: LoadedModel) -> list[tuple[int, ...]]:
    return texts(model, "tensor")


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted({*PRESETS} - {"tensor"}))
def test_every_preset_gives_the_same_tokens(preset: str, model: LoadedModel, wanted: list[tuple[int, ...]]) -> None:
    assert [len(tokens) for tokens in wanted] == [6, 6]
    assert texts(model, preset) == wanted


def test_kv_that_moves_is_cut_by_heads(model: LoadedModel) -> None:
    plan = plan_of(prefill(tp=2), decode(tp=2))
    with pytest.raises(ValueError, match=r"rules.kv_heads must not be None: d0 exchanges KV"):
        JaxExecutor(plan, plan.instances[1], model.spec, [], loader(plan, model, Progress()), PRESETS["expert"])
