"""Which transport leads where, and that no two transports share a copy of KV."""

from __future__ import annotations

from typing import Any

import pytest

from jdserve.core.errors import InvalidPlan, TransferError
from jdserve.core.plan import HostedStage, Plan, TransportKind, Worker
from jdserve.runtime.links import Links, layout_of, local_route
from jdserve.transfer.layout import KVHandle, KVLayout
from runtime.harness import decode, prefill


class Fake:
    """A transport that only keeps what it was given."""

    def __init__(self, kind: TransportKind) -> None:
        self.kind = kind
        self.copies: list[object] = []

    def offer(self, request_id: str, source: str, copy: Any, destination: KVLayout, lease_s: float) -> KVHandle:
        self.copies.append(copy)
        return KVHandle(
            id=len(self.copies),
            request_id=request_id,
            source=source,
            layout=destination,
            destination=destination,
            pages=1,
            bytes=0,
            deadline=0,
            transport=self.kind,
        )


@pytest.fixture
def plan() -> Plan:
    """p0 and d0 share a worker; d1 and d2 (TP 2) are elsewhere on the host, d3 on another one."""
    instances = (prefill(), decode("d0"), decode("d1"), decode("d2", tp=2), decode("d3"))
    workers = (
        Worker("w", (HostedStage("p0", (0,)), HostedStage("d0", (1,)))),
        Worker("d1", (HostedStage("d1", (2,)),)),
        Worker("d2", (HostedStage("d2", (3, 4)),)),
        Worker("d3", (HostedStage("d3", (0,)),), "10.0.0.2"),
    )
    return Plan(model="m", max_model_len=128, platform="cpu", instances=instances, workers=workers)


def test_the_transport_follows_from_where_the_two_are(plan: Plan) -> None:
    kinds = {name: plan.transport_between("p0", name) for name in ("d0", "d1", "d2", "d3")}
    assert kinds == {"d0": "local", "d1": "shm", "d2": "shm", "d3": "pull"}
    gpu = Plan(model="m", max_model_len=128, platform="gpu", instances=plan.instances, workers=plan.workers)
    assert [gpu.transport_between("p0", name) for name in ("d0", "d1")] == ["local", "pull"]


def test_each_transport_gets_a_copy_of_its_own(plan: Plan, model: Any) -> None:
    made: dict[TransportKind, Fake] = {}
    links = Links(plan, model.spec, lambda kind: made.setdefault(kind, Fake(kind)), Plan.transport_between)  # type: ignore[arg-type,return-value]
    copies: list[object] = []

    def gather() -> Any:
        copies.append(object())
        return copies[-1]

    handles = links.offer("r", "p0", gather, 1.0)
    assert [(handle.transport, handle.destination.tp) for handle in handles] == [
        ("local", 1),
        ("shm", 1),
        ("shm", 2),
        ("pull", 1),
    ]
    assert len(copies) == 3
    assert made["shm"].copies == [copies[1]] * 2
    wide = layout_of(plan, plan.instance("d2"), model.spec)
    assert links.pick(handles, "p0", "d2", wide) is handles[2]
    with pytest.raises(TransferError, match="p0 has offered no KV by pull that is laid out for d3"):
        links.pick(handles[:3], "p0", "d3", handles[3].destination)


def test_in_one_process_it_is_always_local(plan: Plan, model: Any) -> None:
    links = Links(plan, model.spec, Fake, local_route)  # type: ignore[arg-type]
    assert {handle.transport for handle in links.offer("r", "p0", object, 1.0)} == {"local"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("transport", "why"), [("local", "one worker, there are 4"), ("shm", "all workers on one host")]
)
def test_a_transport_that_cannot_lead_there_is_refused(plan: Plan, transport: Any, why: str) -> None:
    with pytest.raises(InvalidPlan, match=why):
        Plan(model="m", max_model_len=128, transport=transport, instances=plan.instances, workers=plan.workers).check()
