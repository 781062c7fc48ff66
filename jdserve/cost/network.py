"""How long KV takes from one instance to another, and which links it occupies on the way.

Both instances hold the same KV cut differently: stages by layers, devices of a stage by KV heads. Every pair of devices
moves the part that both hold, all pairs at a time, so a transfer takes as long as its busiest link. A device has one
link inside its node, and ``nic_share`` devices share one to the other nodes.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import NamedTuple

from jdserve.core.plan import Plan
from jdserve.cost.hardware import Hardware
from jdserve.cost.stepcost import FS, femtoseconds


class Route(NamedTuple):
    """A way from one instance to another.

    Attributes:
        links: names of the links it occupies, in a fixed order; two transfers that share one contend for it.
        bytes_per_s: of the whole transfer, when nothing else moves; 0 where source and destination are one device.
        latency: femtoseconds before the first byte arrives.
        across: the busiest link lies between nodes.
    """

    links: tuple[str, ...]
    bytes_per_s: int
    latency: int
    across: bool

    def time(self, n_bytes: int) -> int:
        """Femtoseconds to move ``n_bytes`` alone."""
        return self.latency + (n_bytes * FS // self.bytes_per_s if self.bytes_per_s else 0)


Device = tuple[str, int]
"""(host, device id)."""

Seat = tuple[tuple[Device, ...], ...]
"""Devices of each stage of an instance."""


def seat(plan: Plan, name: str) -> Seat:
    """Where ``plan`` puts instance ``name``."""
    return tuple(plan.devices(name, stage) for stage in range(plan.instance(name).pp))


def _overlap(i: int, n: int, j: int, m: int) -> Fraction:
    """Part of the whole that piece ``i`` of ``n`` and piece ``j`` of ``m`` have in common."""
    return max(Fraction(0), min(Fraction(i + 1, n), Fraction(j + 1, m)) - max(Fraction(i, n), Fraction(j, m)))


class Network:
    """The links between the devices of a cluster.

    Args:
        device: its links count.
        efficiency: share of the nominal bandwidth that a transfer gets.
    """

    def __init__(self, device: Hardware, efficiency: float = 0.8) -> None:
        self._device = device
        self._efficiency = efficiency

    def between(self, plan: Plan, source: str, destination: str) -> Route:
        """The route from instance ``source`` to instance ``destination``."""
        return self.route(seat(plan, source), seat(plan, destination))

    def route(self, source: Seat, destination: Seat) -> Route:
        """The route from the devices of one instance to those of another."""
        load = self.loads(source, destination)
        if not load:
            return Route((), 0, 0, across=False)
        device = self._device
        speeds = {link: self.speed(link) / float(share) for link, share in load.items()}
        slowest = min(sorted(speeds), key=speeds.__getitem__)
        across = any(link.startswith("nic") for link in load)
        latency = (device.across if across else device.inside).latency_s
        return Route(
            tuple(sorted(load)), max(round(speeds[slowest]), 1), femtoseconds(latency), slowest.startswith("nic")
        )

    def loads(self, source: Seat, destination: Seat) -> dict[str, Fraction]:
        """The part of the KV that passes each link on the way."""
        load: dict[str, Fraction] = defaultdict(Fraction)
        for (here, there), share in _pairs(source, destination).items():
            for link in self._links(here, there):
                load[link] += share
        return load

    def speed(self, link: str) -> float:
        """Bytes per second that transfers get from ``link``."""
        chosen = self._device.across if link.startswith("nic") else self._device.inside
        return chosen.bytes_per_s * self._efficiency

    def _links(self, here: Device, there: Device) -> tuple[str, ...]:
        if here == there:
            return ()
        if here[0] == there[0]:
            return (f"out {here[0]}/{here[1]}", f"in {there[0]}/{there[1]}")
        share = self._device.nic_share
        return (f"nic out {here[0]}/{here[1] // share}", f"nic in {there[0]}/{there[1] // share}")


def _pairs(source: Seat, destination: Seat) -> dict[tuple[Device, Device], Fraction]:
    """Part of the KV that moves between each pair of devices."""
    pairs: dict[tuple[Device, Device], Fraction] = defaultdict(Fraction)
    for i, stage in enumerate(source):
        for j, other in enumerate(destination):
            layers = _overlap(i, len(source), j, len(destination))
            if not layers:
                continue
            for k, here in enumerate(stage):
                for n, there in enumerate(other):
                    share = layers * _overlap(k, len(stage), n, len(other))
                    if share:
                        pairs[here, there] += share
    return pairs
