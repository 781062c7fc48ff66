"""Whether weights and KV pool of an instance fit its devices, told before the pool is made."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence as Seq
from pathlib import Path

from jdserve.compat import Device
from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import Instance, Plan
from jdserve.transfer.layout import KVLayout

logger = logging.getLogger(__name__)

RESERVED = 0.08
"""Share of a device's memory that stays free for the temporaries of the step programs."""


def free_bytes(devices: Seq[Device]) -> list[int | None]:
    """Bytes that this process may still take on each device, None where nobody knows. CPU devices share the memory."""
    if devices[0].platform == "cpu":
        if sys.platform != "linux":
            return [None]
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        return [available // len(devices)]
    stats = [device.memory_stats() or {} for device in devices]
    return [one["bytes_limit"] - one["bytes_in_use"] if "bytes_limit" in one else None for one in stats]


def check_pool(plan: Plan, instance: Instance, layout: KVLayout, free: Seq[int | None], head_dim: int) -> None:
    """Check that the pool fits beside what is on the devices already, the weights among it.

    Args:
        plan: that the instance is part of.
        instance: which one.
        layout: of its KV.
        free: bytes, from :func:`free_bytes` after the weights were loaded.
        head_dim: as stored.

    Raises:
        InvalidPlan: names the instance's ``pages``, what is needed, what there is, and the most pages that would fit.
    """
    known = [value for value in free if value is not None]
    if not known:
        return
    whole = layout.page_bytes() * layout.stored_kv_heads // layout.kv_heads * head_dim // layout.head_dim
    per_page = whole // (layout.tp * layout.pp)
    usable = int(min(known) * (1 - RESERVED))
    needed = per_page * (instance.pages + 1)
    logger.info(
        "%s: a pool of %.2f GiB per device, %.2f GiB are free after the weights",
        instance.name,
        _gib(needed),
        _gib(usable),
    )
    if needed > usable:
        index = plan.instances.index(instance)
        raise InvalidPlan(
            f"$.instances[{index}].pages",
            f"{instance.pages} pages need {_gib(needed):.2f} GiB per device, {_gib(usable):.2f} GiB are free after the"
            f" weights and {RESERVED:.0%} for temporaries: at most {max(0, usable // per_page - 1)} pages",
        )


def _gib(value: int) -> float:
    return value / 2**30
