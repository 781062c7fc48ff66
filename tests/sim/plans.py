"""Small plans and workloads for the tests of the simulator."""

from __future__ import annotations

import random

from jdserve.core.plan import ColocatedInstance, DecodeInstance, HostedStage, Instance, Plan, PrefillInstance, Worker
from jdserve.core.steptime import StepTime
from jdserve.sim.links import Route
from jdserve.sim.workload import Workload

PREFILL = StepTime(base=0.0147, per_new_token=6.86e-5, per_new_pair=2.4e-9)
DECODE = StepTime(base=0.0199, per_decode_seq=3.85e-5, per_context_token=6.27e-7)


def plan_of(*instances: Instance, page_size: int = 16, max_model_len: int = 16, **options: object) -> Plan:
    """A plan with every instance in its own worker."""
    workers = tuple(
        Worker(
            f"w{index}",
            tuple(
                HostedStage(instance.name, tuple(stage * instance.tp + k for k in range(instance.tp)), stage)
                for stage in range(instance.pp)
            ),
            f"h{index}",
        )
        for index, instance in enumerate(instances)
    )
    return Plan(
        model="opt-13b",
        page_size=page_size,
        max_model_len=max_model_len,
        instances=instances,
        workers=workers,
        **options,  # type: ignore[arg-type]
    )


def _times(rng: random.Random) -> StepTime:
    # multiples of a millisecond, so that many events fall on the same moment
    whole = rng.random() < 0.5
    scale = 1e-3 if whole else 1.1234e-3
    return StepTime(
        base=rng.choice((0, 1, 2)) * scale,
        per_new_token=rng.choice((0, 1)) * scale,
        per_decode_seq=rng.choice((0, 1)) * scale,
        per_context_token=rng.choice((0, 1e-4)) * scale,
    )


def random_plan(rng: random.Random) -> Plan:
    """Any topology, with pools small enough to preempt."""
    size = rng.choice((1, 2, 4))
    instances: list[Instance] = []
    kind = rng.choice(("disaggregated", "disaggregated", "colocated", "mixed"))
    stages = (1, 1, 1, 2, 3)
    if kind != "colocated":
        for index in range(rng.randint(1, 2)):
            instances.append(
                PrefillInstance(
                    name=f"p{index}",
                    pp=rng.choice(stages),
                    pages=rng.randint(48, 90) // size,
                    batching=rng.choice(("lm", "kv_capacity")),
                    lm_tokens=rng.randint(8, 60),
                    max_batch=rng.randint(1, 6),
                    lease_s=rng.choice((0.02, 300.0)),
                    steptime=_times(rng),
                )
            )
        for index in range(rng.randint(1, 2)):
            pp = rng.choice(stages)
            instances.append(
                DecodeInstance(
                    name=f"d{index}",
                    pp=pp,
                    pull=rng.choice(("overlapped", "overlapped", "between_steps")),
                    in_flight=rng.choice((None, rng.randint(1, pp))),
                    pages=rng.randint(48, 120) // size,
                    max_num_seqs=rng.randint(1, 8),
                    watermark=rng.choice((0.0, 0.0, 0.2)),
                    steptime=_times(rng),
                )
            )
    if kind != "disaggregated":
        instances += [
            ColocatedInstance(
                name=f"c{index}",
                pp=rng.choice(stages),
                mode=rng.choice(("prefill_first", "chunked")),
                pages=rng.randint(48, 90) // size,
                token_budget=rng.randint(8, 40),
                max_num_seqs=rng.randint(1, 8),
                watermark=rng.choice((0.0, 0.0, 0.2)),
                steptime=_times(rng),
            )
            for index in range(rng.randint(1, 2))
        ]
    rng.shuffle(instances)
    return plan_of(*instances, page_size=size, max_model_len=48, max_open_requests=rng.choice((8, 1024)))


def random_workload(rng: random.Random) -> Workload:
    """Up to 40 requests, some at the same moment, some with a common prefix, some too long for any pool."""
    count = rng.randint(1, 40)
    at, arrivals = 0, []
    for _ in range(count):
        at += rng.choice((0, 1, 3, 10)) * 10**12 + rng.choice((0, 0, 12345))
        arrivals.append(at)
    inputs = [rng.choice((rng.randint(1, 12), rng.randint(1, 40))) for _ in range(count)]
    outputs = [rng.choice((0, 1, 2, *(rng.randint(3, 40) for _ in range(6)))) for _ in range(count)]
    blocks: list[tuple[int, ...]] = []
    if rng.random() < 0.3:
        blocks = [tuple(rng.choice(((1, 2), (1, 3), (4,), ()))) for _ in range(count)]
    return Workload(
        arrivals=tuple(arrivals), inputs=tuple(inputs), outputs=tuple(outputs), blocks=tuple(blocks), block_tokens=6
    )


class Wires:
    """A network whose routes share one link."""

    def __init__(self, rng: random.Random) -> None:
        self._route = Route(("wire",), rng.choice((0, 10**12)), rng.choice((0, 10**11, 10**12)))

    def route(self, source: str, destination: str) -> Route:
        """All alike."""
        return self._route
