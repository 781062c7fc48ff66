"""Whether the links between nodes can carry KV: Algorithm 1 or Algorithm 2."""

from __future__ import annotations

from typing import Literal

from jdserve.placement.job import Job
from jdserve.placement.layout import LinkLoad
from jdserve.placement.result import Affinity

BUSIEST = 0.8
"""Mean utilisation of a link beyond which transfers wait for each other too long to be planned with."""


def request_bytes(job: Job) -> float:
    """KV of a mean prompt."""
    return job.sample.mean_input * job.spec.kv_bytes_per_token(job.dtype)


def affinity(job: Job, asked: Literal["auto", "high", "low"]) -> Affinity:
    """What the cluster allows before any plan is known: one mean request must cross within one TPOT."""
    if job.cluster.nodes == 1:
        return Affinity(level="inside", reason="there is one node, so no KV crosses")
    across = job.cluster.device.across
    speed = across.bytes_per_s * job.link_share
    seconds = across.latency_s + request_bytes(job) / speed
    figure = (
        f"the KV of a mean prompt ({request_bytes(job) / 2**20:.0f} MiB) takes {seconds * 1e3:.1f} ms over one link"
        f" between nodes ({speed / 1e9:.3g} GB/s), one TPOT is {job.slo.tpot_s * 1e3:.0f} ms"
    )
    if asked != "auto":
        return Affinity(level=asked, reason=f"asked for; {figure}", transfer_s=seconds)
    return Affinity(level="low" if seconds > job.slo.tpot_s else "high", reason=figure, transfer_s=seconds)


def overloaded(found: Affinity, loads: tuple[LinkLoad, ...]) -> Affinity | None:
    """The low affinity that follows when a plan's KV would fill a link between nodes; None where it does not."""
    busiest = next((load for load in loads if load.link.startswith("nic")), None)
    if busiest is None or busiest.utilisation <= BUSIEST:
        return None
    return Affinity(
        level="low",
        reason=(
            f"spread over the nodes, KV would load {busiest.link} with {busiest.bytes_per_s / 1e9:.3g} GB/s of"
            f" {busiest.capacity / 1e9:.3g}, more than {BUSIEST:.0%}"
        ),
        transfer_s=found.transfer_s,
        busiest=busiest,
    )
