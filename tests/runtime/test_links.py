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
    """A transport that only keeps what it was given.

    Attributes:
        breaks_at: which of its offers fails.
    """

    breaks_at = 0

    def __init__(self, kind: TransportKind) -> None:
        self.kind = kind
        self.reads = kind == "shm"
        self.offered: list[Pages] = []
        self.released: list[int] = []

    def offer(self, request_id: str, source: str, pages: Any, destination: KVLayout, lease_s: float) -> KVHandle:
        self.offered.append(pages)
        if len(self.offered) == self.breaks_at:
            raise TransferError("no more")
        return KVHandle(
            id=len(self.offered),
            request_id=request_id,
            source=source,
            layout=destination,
            destination=destination,
            pages=1,
            bytes=0,
            deadline=0,
            transport=self.kind,
        )

    def release(self, handle: KVHandle) -> None:
        self.released.append(handle.id)


class Pages:
    """What leaves a pool: counts what is asked of it."""

    def __init__(self) -> None:
        self.gathered = self.dropped = 0

    def gather(self) -> None:
        self.gathered += 1

    def drop(self) -> None:
        self.dropped += 1


Made = dict[TransportKind, Fake]


@pytest.fixture
def made() -> Made:
    return {}


@pytest.fixture
def links(plan: Plan, model: Any, made: Made) -> Links:
    return Links(plan, model.spec, lambda kind: made.setdefault(kind, Fake(kind)), Plan.transport_between)  # type: ignore[arg-type,return-value]


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


def test_each_transport_gets_a_copy_of_its_own(plan: Plan, model: Any, links: Links, made: Made) -> None:
    leaving: list[Pages] = []

    def pages() -> Any:
        leaving.append(Pages())
        return leaving[-1]

    offering = links.begin("r", "p0", pages, 1.0)
    # shm reads the pools by itself, so its offers need not wait for the end of the step
    assert [(handle.transport, handle.destination.tp) for handle in offering.handles] == [("shm", 1), ("shm", 2)]
    assert [one.gathered for one in leaving] == [1, 0, 1]
    assert not made["local"].offered
    links.complete(offering)
    handles = offering.handles
    assert [(handle.transport, handle.destination.tp) for handle in handles[2:]] == [("local", 1), ("pull", 1)]
    assert made["shm"].offered == [leaving[1]] * 2
    assert [made[kind].offered for kind in ("local", "pull")] == [[leaving[0]], [leaving[2]]]
    wide = layout_of(plan, plan.instance("d2"), model.spec)
    assert links.pick(handles, "p0", "d2", wide) is handles[1]
    with pytest.raises(TransferError, match="p0 has offered no KV by pull that is laid out for d3"):
        links.pick(handles[:3], "p0", "d3", handles[3].destination)
    links.drop(offering)
    assert [made[kind].released for kind in ("local", "shm", "pull")] == [[1], [1, 2], [1]]
    assert [one.dropped for one in leaving] == [0, 0, 0]


def test_what_is_not_parked_leaves_nothing_behind(links: Links, made: Made) -> None:
    leaving = [Pages() for _ in range(3)]
    given = iter(leaving)
    links.drop(links.begin("r", "p0", lambda: next(given), 1.0))  # type: ignore[arg-type,return-value]
    assert made["shm"].released == [1, 2]
    assert [one.dropped for one in leaving] == [1, 0, 1]


def test_an_offer_that_fails_takes_back_those_before_it(links: Links, made: Made, monkeypatch: Any) -> None:
    monkeypatch.setattr(Fake, "breaks_at", 2)
    leaving = [Pages() for _ in range(3)]
    given = iter(leaving)
    with pytest.raises(TransferError, match="no more"):
        links.begin("r", "p0", lambda: next(given), 1.0)  # type: ignore[arg-type,return-value]
    assert made["shm"].released == [1]
    assert [one.dropped for one in leaving] == [1, 0, 0]


def test_in_one_process_it_is_always_local(plan: Plan, model: Any) -> None:
    links = Links(plan, model.spec, Fake, local_route)  # type: ignore[arg-type]
    offering = links.begin("r", "p0", Pages, 1.0)  # type: ignore[arg-type]
    links.complete(offering)
    assert {handle.transport for handle in offering.handles} == {"local"}


@pytest.mark.parametrize(
    ("transport", "why"), [("local", "one worker, there are 4"), ("shm", "all workers on one host")]
)
def test_a_transport_that_cannot_lead_there_is_refused(plan: Plan, transport: Any, why: str) -> None:
    with pytest.raises(InvalidPlan, match=why):
        Plan(model="m", max_model_len=128, transport=transport, instances=plan.instances, workers=plan.workers).check()
