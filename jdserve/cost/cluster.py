"""The machines that a placement may use, read from a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from jdserve.core import jsonio
from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import LOCALHOST
from jdserve.core.shipped import cluster_file, cluster_names
from jdserve.cost.hardware import Hardware, Link, hardware

Count = Annotated[int, Meta(ge=1)]


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Equal nodes of equal devices.

    Attributes:
        hardware: name of a row of the hardware table, or a whole device inline.
        nodes, devices_per_node: how many.
        inside, across: links, where they are not those of the hardware. ``across`` is the link that ``nic_share``
            devices of a node share.
        nic_share: devices per ``across`` link, where it is not that of the hardware.
        hosts: addresses of the nodes, as the plan shall name them; by default ``localhost`` for one node and
            ``node0``, ``node1``... for several.
    """

    hardware: str | Hardware
    nodes: Count
    devices_per_node: Count
    inside: Link | None = None
    across: Link | None = None
    nic_share: Count | None = None
    hosts: tuple[Annotated[str, Meta(min_length=1)], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.hardware, str):
            hardware(self.hardware)
        if self.nodes < 1 or self.devices_per_node < 1:
            raise InvalidPlan("$.nodes", f"a cluster has at least 1 node of 1 device, got {self.nodes}")
        if self.hosts and len(set(self.hosts)) != self.nodes:
            raise InvalidPlan("$.hosts", f"needs {self.nodes} different names, one per node, got {self.hosts}")

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read the cluster at ``path``, or the one that comes with jdserve under that name.

        Raises:
            InvalidPlan: the file cannot be read, or is refused; with the JSON path and the bound.
        """
        file = cluster_file(path)
        if not file.exists():
            known = ", ".join(cluster_names())
            raise InvalidPlan("$", f"{path} is neither a file nor a cluster that comes with jdserve: {known}")
        return jsonio.read(file, cls)

    @property
    def device(self) -> Hardware:
        """The devices, with the links of this cluster."""
        base = hardware(self.hardware) if isinstance(self.hardware, str) else self.hardware
        return msgspec.structs.replace(
            base,
            inside=self.inside or base.inside,
            across=self.across or base.across,
            nic_share=min(self.nic_share or base.nic_share, self.devices_per_node),
        )

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    @property
    def names(self) -> tuple[str, ...]:
        """Host name of each node."""
        if self.hosts:
            return self.hosts
        return (LOCALHOST,) if self.nodes == 1 else tuple(f"node{index}" for index in range(self.nodes))
