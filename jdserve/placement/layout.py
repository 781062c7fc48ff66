"""Which device hosts what: instances and their stages on nodes, and nodes' devices in workers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from jdserve.core.plan import DecodeInstance, HostedStage, Instance, Plan, PrefillInstance, Worker
from jdserve.cost.cluster import Cluster
from jdserve.cost.network import Network, seat


class NoRoom(Exception):
    """The instances do not fit on the nodes; the message says which."""


class Group(NamedTuple):
    """Instances that belong together.

    Attributes:
        instances: on the same nodes.
        span: on how many, the stages of each instance dealt evenly; 0 for one instance that may lie anywhere.
    """

    instances: tuple[Instance, ...]
    span: int


class _Node(NamedTuple):
    host: str
    free: list[int]

    def take(self, count: int) -> tuple[int, ...]:
        taken = tuple(self.free[:count])
        del self.free[:count]
        return taken


def lay_out(cluster: Cluster, groups: Seq[Group]) -> tuple[Worker, ...]:
    """Workers for ``groups``, the largest first, each on the first nodes with room.

    On GPUs and TPUs the instances of a group that lie on one node share a worker, so that their KV stays inside the
    process; single instances share one with all other single ones of their node. On CPU every instance has its own
    worker, and so has, on each of its nodes, an instance of several nodes.

    Raises:
        NoRoom: a group finds no place.
    """
    nodes = [_Node(host, list(range(cluster.devices_per_node))) for host in cluster.names]
    share = cluster.device.platform != "cpu"
    order = sorted(range(len(groups)), key=lambda n: -sum(i.tp * i.pp for i in groups[n].instances))
    hosted: dict[tuple[str, str], list[HostedStage]] = {}
    for number in order:
        group = groups[number]
        for instance, places in _place(group, nodes, cluster):
            several = len({node.host for node in places}) > 1
            for stage, node in enumerate(places):
                part = HostedStage(instance.name, node.take(instance.tp), stage)
                if several or not share:
                    key = (node.host, instance.name)
                else:
                    key = (node.host, f"u{number}" if group.span else "all")
                hosted.setdefault(key, []).append(part)
    rank = {instance.name: n for n, instance in enumerate(i for group in groups for i in group.instances)}
    ordered = sorted(hosted.items(), key=lambda item: min((rank[s.instance], s.stage) for s in item[1]))
    return tuple(Worker(f"w{n}", tuple(stages), host) for n, ((host, _), stages) in enumerate(ordered))


def _place(group: Group, nodes: Seq[_Node], cluster: Cluster) -> list[tuple[Instance, list[_Node]]]:
    """For each instance, the node of each of its stages."""
    if group.span:
        each = sum(i.tp * i.pp for i in group.instances) // group.span
        chosen = [node for node in nodes if len(node.free) >= each][: group.span]
        if len(chosen) < group.span:
            what = " + ".join(f"{i.name} tp{i.tp} pp{i.pp}" for i in group.instances)
            raise NoRoom(
                f"{what} needs {each} free devices on each of {group.span} node{'s' * (group.span > 1)}, there are"
                f" {cluster.nodes} of {cluster.devices_per_node} devices"
            )
        return [(i, [chosen[stage * group.span // i.pp] for stage in range(i.pp)]) for i in group.instances]
    (instance,) = group.instances
    size = instance.tp * instance.pp
    whole = next((node for node in nodes if len(node.free) >= size), None)
    if whole is not None:
        return [(instance, [whole] * instance.pp)]
    places: list[_Node] = []
    # what fits into a node is not cut: its step times are those of links inside one
    for node in nodes if size > cluster.devices_per_node else ():
        places += [node] * min(len(node.free) // instance.tp, instance.pp - len(places))
    if len(places) < instance.pp:
        raise NoRoom(
            f"{instance.name} needs {instance.pp} x {instance.tp} free devices, on one node where it fits into one;"
            f" there are {cluster.nodes} nodes of {cluster.devices_per_node} devices"
        )
    return [(instance, places)]


class LinkLoad(NamedTuple):
    """KV traffic on one link.

    Attributes:
        link: its name.
        bytes_per_s: mean traffic.
        capacity: what transfers get from the link, in bytes per second.
    """

    link: str
    bytes_per_s: float
    capacity: float

    @property
    def utilisation(self) -> float:
        """Share of the capacity."""
        return self.bytes_per_s / self.capacity


def link_loads(plan: Plan, network: Network, rate: float, request_bytes: float) -> tuple[LinkLoad, ...]:
    """Mean KV traffic at ``rate`` requests per second on each link, the busiest first.

    Requests are taken as spread over prefill instances by their devices, and over the decode instances in reach evenly.
    """
    prefills = [i for i in plan.instances if isinstance(i, PrefillInstance)]
    decodes = [i.name for i in plan.instances if isinstance(i, DecodeInstance)]
    devices = sum(i.tp * i.pp for i in prefills)
    load: dict[str, float] = {}
    for source in prefills:
        reached = plan.near(source.name) or tuple(decodes)
        flow = rate * request_bytes * source.tp * source.pp / devices / len(reached)
        for name in reached:
            for link, share in network.loads(seat(plan, source.name), seat(plan, name)).items():
                load[link] = load.get(link, 0.0) + flow * float(share)
    loads = (LinkLoad(link, flow, network.speed(link)) for link, flow in load.items())
    return tuple(sorted(loads, key=lambda one: (-one.utilisation, one.link)))
