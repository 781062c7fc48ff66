"""int8 weights in the cost model: smaller, sooner read, and in the plan that comes of it."""

from __future__ import annotations

import pytest

from jdserve import search
from jdserve.core.request import SLO
from jdserve.core.steptime import StepTime
from jdserve.cost.cluster import Cluster
from jdserve.cost.hardware import hardware
from jdserve.cost.memory import memory
from jdserve.cost.models import model
from jdserve.cost.roofline import RooflineModel
from jdserve.sim.lengths import Uniform
from jdserve.sim.workload import Source

SPEC = model("llama-2-70b")
LIMITS = {"device_bytes": 80 << 30, "page_size": 16, "max_model_len": 4096, "step_tokens": 2048, "batch": 64}


def test_memory_holds_half_the_weights_and_more_pages():
    plain = memory(SPEC, "bfloat16", 4, 1, **LIMITS)
    small = memory(SPEC, "bfloat16", 4, 1, **LIMITS, weights="int8")
    assert small.weights == plain.weights // 2
    assert (small.activations, small.page_bytes) == (plain.activations, plain.page_bytes)
    assert small.pages - plain.pages == pytest.approx(small.weights / small.page_bytes, abs=1)
    assert not memory(SPEC, "bfloat16", 1, 1, **LIMITS).fits
    assert memory(SPEC, "bfloat16", 1, 1, **LIMITS, weights="int8").fits


def test_a_decode_step_reads_half_the_weights():
    def step(weights) -> StepTime:
        return RooflineModel(spec=SPEC, dtype="bfloat16", device=hardware("h100-80g"), weights=weights).steptime(
            "decode", 4, 1
        )

    read = model("llama-2-70b").parameters * 2 / 4 / hardware("h100-80g").bytes_per_s
    assert step(None).base - step("int8").base > 0.4 * read


@pytest.mark.slow
def test_the_plan_says_so():
    found = search(
        "llama-3-8b",
        Cluster(hardware="h100-80g", nodes=1, devices_per_node=2),
        Source(lengths=Uniform(128, 16), seed=0),
        SLO(1.0, 0.2),
        dtype="bfloat16",
        weights="int8",
        rate=0.5,
        requests=50,
        steady=False,
    )
    assert found.plan is not None
    assert (found.plan.dtype, found.plan.weights) == ("bfloat16", "int8")
