"""Instances on nodes and devices, and their KV on links."""

from __future__ import annotations

import pytest

from jdserve.core.plan import DecodeInstance, Instance, Plan, PrefillInstance, Worker
from jdserve.cost.cluster import Cluster
from jdserve.cost.network import Network
from jdserve.placement.layout import Group, NoRoom, lay_out, link_loads


def prefill(name: str, tp: int = 1, pp: int = 1) -> PrefillInstance:
    return PrefillInstance(name=name, tp=tp, pp=pp, pages=64, lm_tokens=64)


def decode(name: str, tp: int = 1, pp: int = 1) -> DecodeInstance:
    return DecodeInstance(name=name, tp=tp, pp=pp, pages=64, max_num_seqs=4)


def plan(cluster: Cluster, groups: list[Group], reach="any") -> Plan:
    instances: tuple[Instance, ...] = tuple(i for group in groups for i in group.instances)
    made = Plan(
        model="m",
        max_model_len=512,
        instances=instances,
        workers=lay_out(cluster, groups),
        platform=cluster.device.platform,
        reach=reach,
    )
    made.check()
    return made


def hosts(worker: Worker) -> tuple[str, list[tuple[str, tuple[int, ...], int]]]:
    return worker.host, [(stage.instance, stage.devices, stage.stage) for stage in worker.stages]


TWO = Cluster(hardware="h100-80g", nodes=2, devices_per_node=4)


def test_a_unit_shares_a_worker_on_its_node() -> None:
    made = plan(TWO, [Group((prefill("p0", 2), decode("d0")), 1), Group((prefill("p1", 2), decode("d1")), 1)], "host")
    assert [hosts(worker) for worker in made.workers] == [
        ("node0", [("p0", (0, 1), 0), ("d0", (2,), 0)]),
        ("node1", [("p1", (0, 1), 0), ("d1", (2,), 0)]),
    ]
    assert made.transport_between("p0", "d0") == "local"
    assert made.near("p1") == ("d1",)


def test_segments_of_a_unit_meet_on_each_of_its_nodes() -> None:
    made = plan(TWO, [Group((prefill("p0", 2, 2), decode("d0", 1, 4)), 2)])
    assert made.devices("p0", 0) == (("node0", 0), ("node0", 1))
    assert made.devices("p0", 1) == (("node1", 0), ("node1", 1))
    assert [made.devices("d0", stage)[0] for stage in range(4)] == [
        ("node0", 2),
        ("node0", 3),
        ("node1", 2),
        ("node1", 3),
    ]
    loads = link_loads(made, Network(TWO.device, 1.0), 1.0, 1.0)
    assert not any(load.link.startswith("nic") for load in loads)  # layers stay on their node


def test_single_instances_fill_the_nodes_by_size() -> None:
    made = plan(
        TWO, [Group((prefill(f"p{n}", 3),), 0) for n in range(2)] + [Group((decode(f"d{n}"),), 0) for n in (0, 1)]
    )
    assert {made.devices(f"d{n}")[0][0] for n in (0, 1)} == {"node0", "node1"}
    assert len(made.workers) == 2


def test_an_instance_larger_than_a_node_spans_nodes_stage_by_stage() -> None:
    made = plan(TWO, [Group((prefill("p0", 2, 3),), 0), Group((decode("d0"),), 0)])
    assert [made.devices("p0", stage)[0][0] for stage in range(3)] == ["node0", "node0", "node1"]
    assert len(made.workers_of("p0")) == 2


def test_on_cpu_every_instance_has_its_own_process() -> None:
    cpu = Cluster(hardware="cpu-core", nodes=1, devices_per_node=2)
    made = plan(cpu, [Group((prefill("p0"), decode("d0")), 1)])
    assert [worker.instances for worker in made.workers] == [("p0",), ("d0",)]
    assert made.transport_between("p0", "d0") == "shm"


@pytest.mark.parametrize(
    "groups",
    [
        [Group((prefill("p0", 4), decode("d0")), 1)],
        [Group((prefill("p0", 4),), 0), Group((decode("d0", 4),), 0), Group((decode("d1"),), 0)],
        [Group((prefill("p0", 2, 2), decode("d0", 4, 2)), 2)],
    ],
)
def test_what_does_not_fit_is_named(groups: list[Group]) -> None:
    with pytest.raises(NoRoom, match=r"p0|d1"):
        lay_out(TWO, groups)


def test_kv_traffic_of_links() -> None:
    made = plan(TWO, [Group((prefill("p0", 4),), 0), Group((decode("d0", 2),), 0)])
    loads = {load.link: load for load in link_loads(made, Network(TWO.device, 1.0), rate=10.0, request_bytes=1e9)}
    assert loads["nic in node1/0"].bytes_per_s == pytest.approx(5e9)
    assert loads["nic out node0/3"].bytes_per_s == pytest.approx(2.5e9)
    assert loads["nic in node1/0"].utilisation == pytest.approx(0.1)
