"""``jdserve hardware``: the devices that are known."""

from __future__ import annotations

import argparse

from jdserve.core import jsonio
from jdserve.core.shipped import cluster_names
from jdserve.cost.cluster import Cluster
from jdserve.cost.hardware import HARDWARE

HEAD = ("name", "bf16 TFLOP/s", "f32", "memory GiB", "GB/s", "link GB/s", "across", "devices per link")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--json", action="store_true", help="print everything, with sources, as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    if args.json:
        print(jsonio.encode(list(HARDWARE.values())).decode(), end="")
        return 0
    rows = [
        (
            row.name,
            f"{row.bfloat16 / 1e12:.4g}",
            f"{row.float32 / 1e12:.4g}",
            f"{row.memory_bytes / 2**30:.4g}",
            f"{row.bytes_per_s / 1e9:.4g}",
            f"{row.inside.bytes_per_s / 1e9:.4g}",
            f"{row.across.bytes_per_s / 1e9:.4g}",
            f"{row.nic_share}",
        )
        for row in HARDWARE.values()
    ]
    print(columns([HEAD, *rows]))
    print("\nClusters that come with jdserve:")
    for name in cluster_names():
        cluster = Cluster.load(name)
        across = f", {cluster.device.across.bytes_per_s / 1e9:.4g} GB/s across" if cluster.nodes > 1 else ""
        print(f"  {name}: {cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}{across}")
    return 0


def columns(rows: list[tuple[str, ...]]) -> str:
    """Rows as aligned text, the first column to the left."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
