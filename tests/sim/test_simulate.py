"""The event loop: what it must not change, and what it must compute."""

from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from jdserve.sim.simulate import simulate
from sim.plans import Wires, random_plan, random_workload


@given(seed=st.integers(0, 2**32 - 1))
@example(seed=7050643)  # steps that take no time end at one moment with others
@settings(max_examples=150, deadline=None)
def test_jumping_gives_what_stepping_gives(seed: int) -> None:
    rng = random.Random(seed)
    plan, workload = random_plan(rng), random_workload(rng)
    network = Wires(rng) if rng.random() < 0.7 else None
    jumped = simulate(plan, workload, network=network)
    stepped = simulate(plan, workload, network=network, jump=False)
    assert jumped == stepped
    assert jumped.to_json() == stepped.to_json()
    assert jumped.complete
    for index, end in enumerate(jumped.ends):
        assert (end < 0) == (index in jumped.rejected)
        if end >= 0:
            assert jumped.arrivals[index] <= jumped.first[index] <= end
            assert jumped.generated[index] == workload.outputs[index]
