"""JAX-03: a pool that does not fit is refused with the numbers and the field to change."""

from __future__ import annotations

import re

import pytest

from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import HostedStage, Plan, Worker
from jdserve.models.checkpoint import LoadedModel
from jdserve.runtime.budget import RESERVED, check_pool
from jdserve.transfer.layout import KVLayout
from runtime.harness import colocated, engine_for, plan_of, run

PAGE = 2 * 4 * 4 * 16 * 8 * 4
"""Bytes of a page of the tiny model: keys and values of 4 layers, 4 heads, 16 positions, head dim 8, float32."""


def layout(tp: int = 1, pp: int = 1) -> KVLayout:
    return KVLayout(4, 4, 8, 16, "float32", tp, pp)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2), (8, 1)])
def test_the_most_pages_that_fit_are_named(tp: int, pp: int) -> None:
    plan = plan_of(colocated(pages=1000, tp=tp, pp=1))
    instance = plan.instances[0]
    free = 10 * 2**20
    repeats = max(1, tp // 4)
    most = int(free * (1 - RESERVED)) // (PAGE * repeats // (tp * pp)) - 1
    fits = colocated(pages=most, tp=tp)
    check_pool(plan_of(fits), fits, layout(tp, pp), [free] * tp, layout(tp, pp).head_dim)
    over = colocated(pages=most + 1, tp=tp)
    with pytest.raises(InvalidPlan, match=re.escape("$.instances[0].pages")) as refused:
        check_pool(plan_of(over), over, layout(tp, pp), [free, None], layout(tp, pp).head_dim)
    assert f"at most {most} pages" in str(refused.value)
    check_pool(plan, instance, layout(tp, pp), [None], layout(tp, pp).head_dim)


def test_a_pool_larger_than_the_machine_is_refused_at_the_start(model: LoadedModel) -> None:
    async def body(engine: object) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(InvalidPlan, match=r"pages need .* GiB per device, .* GiB are free"):
        run(engine_for(model, plan_of(colocated(pages=10**10))), body)


def test_two_processes_on_one_card_are_refused_with_the_plan() -> None:
    shared = (Worker("a", (HostedStage("c0", (0,)),)), Worker("b", (HostedStage("c1", (0,)),)))
    plan = Plan(model="m", max_model_len=64, instances=(colocated(), colocated(name="c1")), workers=shared)
    with pytest.raises(InvalidPlan, match="device 0 of localhost is already taken"):
        plan.check()
