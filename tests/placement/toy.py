"""A small job that searches in a second."""

from __future__ import annotations

from typing import Any

from jdserve.core.request import SLO
from jdserve.cost.cluster import Cluster
from jdserve.cost.hardware import Link
from jdserve.placement import SearchResult, search
from jdserve.sim.lengths import LogNormal
from jdserve.sim.workload import Source

SLOS = SLO(0.06, 0.012)


def source(seed: int = 0) -> Source:
    return Source(lengths=LogNormal(5.5, 0.8, 2.5, 0.6, 0.2, 1500, 60), seed=seed)


def cluster(nodes: int = 1, per_node: int = 3, across: Link | None = None) -> Cluster:
    return Cluster(hardware="h100-80g", nodes=nodes, devices_per_node=per_node, across=across)


def run(where: Cluster | None = None, slo: SLO = SLOS, **options: Any) -> SearchResult:
    options = {"requests": 80, "steady": False, "confirm": 1, "workers": 1, "tolerance": 0.05} | options
    model = options.pop("model", "llama-3-8b")
    workload = options.pop("workload", source())
    return search(model, where or cluster(), workload, slo, **options)
