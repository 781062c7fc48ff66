"""What devices can do: peak arithmetic, memory, links. Vendors' figures, each row with its sources.

Arithmetic is dense (no structured sparsity). Link bandwidths are bytes per second in one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta

from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import Platform
from jdserve.core.spec import DType

Rate = Annotated[float, Meta(gt=0)]
Latency = Annotated[float, Meta(ge=0)]


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A connection between two devices.

    Attributes:
        bytes_per_s: in one direction.
        latency_s: before the first byte arrives.
    """

    bytes_per_s: Rate
    latency_s: Latency = 0.0

    def seconds(self, n_bytes: float) -> float:
        """Time to move ``n_bytes``."""
        return self.latency_s + n_bytes / self.bytes_per_s


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of device.

    Attributes:
        name: key of the table.
        title: for people.
        platform: as in a plan.
        bfloat16, float16, float32: peak FLOP/s of dense matrix products.
        memory_bytes: capacity.
        bytes_per_s: memory bandwidth.
        inside: link of one device to any other of its node.
        across: link of one device to another node.
        nic_share: devices of a node that share one ``across`` link.
        per_node: devices of a usual node.
        sources: where the figures come from.
    """

    name: str
    title: str
    platform: Platform = "gpu"
    bfloat16: Rate
    float16: Rate
    float32: Rate
    memory_bytes: Annotated[int, Meta(ge=1)]
    bytes_per_s: Rate
    inside: Link
    across: Link
    nic_share: Annotated[int, Meta(ge=1)] = 1
    per_node: Annotated[int, Meta(ge=1)] = 8
    sources: tuple[str, ...] = ()

    def flops(self, dtype: DType) -> float:
        """Peak FLOP/s of matrix products in ``dtype``."""
        return getattr(self, dtype)


_GB = 10**9
_MIB = 2**20
_NIC_400G = Link(50e9, 5e-6)

_TABLE = (
    Hardware(
        name="a100-80g",
        title="NVIDIA A100 SXM 80 GB",
        bfloat16=312e12,
        float16=312e12,
        float32=156e12,
        memory_bytes=81_920 * _MIB,
        bytes_per_s=2.039e12,
        inside=Link(300e9, 2e-6),
        across=Link(25e9, 5e-6),
        sources=(
            "NVIDIA A100 80 GB data sheet, 2021: 312 TFLOP/s BF16, 156 TF32, 2,039 GB/s, NVLink 600 GB/s both ways",
            "capacity as nvidia-smi tells it: 81,920 MiB",
            "NVIDIA DGX A100 data sheet: one 200 Gb/s adapter per GPU",
        ),
    ),
    Hardware(
        name="h100-80g",
        title="NVIDIA H100 SXM 80 GB",
        bfloat16=989e12,
        float16=989e12,
        float32=494e12,
        memory_bytes=81_559 * _MIB,
        bytes_per_s=3.35e12,
        inside=Link(450e9, 2e-6),
        across=_NIC_400G,
        sources=(
            "NVIDIA H100 data sheet: 989 TFLOP/s dense BF16, 494 TF32, 3.35 TB/s, NVLink 900 GB/s both ways",
            "capacity as nvidia-smi tells it: 81,559 MiB",
            "NVIDIA DGX H100 data sheet: one 400 Gb/s adapter per GPU",
        ),
    ),
    Hardware(
        name="h200",
        title="NVIDIA H200 SXM 141 GB",
        bfloat16=989e12,
        float16=989e12,
        float32=494e12,
        memory_bytes=143_771 * _MIB,
        bytes_per_s=4.8e12,
        inside=Link(450e9, 2e-6),
        across=_NIC_400G,
        sources=(
            "NVIDIA H200 data sheet: 989 TFLOP/s dense BF16, 494 TF32, 4.8 TB/s, NVLink 900 GB/s both ways",
            "capacity as nvidia-smi tells it: 143,771 MiB",
            "NVIDIA DGX H200 data sheet: one 400 Gb/s adapter per GPU",
        ),
    ),
    Hardware(
        name="b200",
        title="NVIDIA B200 SXM 180 GB",
        bfloat16=2250e12,
        float16=2250e12,
        float32=1100e12,
        memory_bytes=183_359 * _MIB,
        bytes_per_s=7.7e12,
        inside=Link(900e9, 2e-6),
        across=_NIC_400G,
        sources=(
            "NVIDIA HGX B200 data sheet: 2.25 PFLOP/s dense BF16, 1.1 TF32, 7.7 TB/s, NVLink 1.8 TB/s both ways",
            "capacity as nvidia-smi tells it: 183,359 MiB",
            "NVIDIA DGX B200 data sheet: one 400 Gb/s adapter per GPU",
        ),
    ),
    Hardware(
        name="tpu-v5e",
        title="Google TPU v5e",
        platform="tpu",
        bfloat16=197e12,
        float16=197e12,
        float32=98.5e12,
        memory_bytes=16 * _GB,
        bytes_per_s=819e9,
        inside=Link(200e9, 1e-6),
        across=Link(25e9, 20e-6),
        nic_share=8,
        sources=(
            "cloud.google.com/tpu/docs/v5e: 197 TFLOP/s BF16, 16 GB, 819 GB/s, interconnect 400 GB/s both ways per"
            " chip, two 100 Gb/s adapters per host of 8 chips",
            "float32 as half of BF16: not published",
        ),
    ),
    Hardware(
        name="tpu-v5p",
        title="Google TPU v5p",
        platform="tpu",
        bfloat16=459e12,
        float16=459e12,
        float32=229.5e12,
        memory_bytes=95 * _GB,
        bytes_per_s=2.765e12,
        inside=Link(600e9, 1e-6),
        across=Link(25e9, 20e-6),
        nic_share=4,
        per_node=4,
        sources=(
            "cloud.google.com/tpu/docs/v5p: 459 TFLOP/s BF16, 95 GB, 2,765 GB/s, interconnect 1,200 GB/s both ways per"
            " chip, 200 Gb/s per host of 4 chips",
            "float32 as half of BF16: not published",
        ),
    ),
    Hardware(
        name="tpu-v6e",
        title="Google TPU v6e (Trillium)",
        platform="tpu",
        bfloat16=918e12,
        float16=918e12,
        float32=459e12,
        memory_bytes=32 * _GB,
        bytes_per_s=1.64e12,
        inside=Link(400e9, 1e-6),
        across=Link(50e9, 20e-6),
        nic_share=4,
        sources=(
            "cloud.google.com/tpu/docs/v6e: 918 TFLOP/s BF16, 32 GB, 1,640 GB/s, interconnect 800 GB/s both ways per"
            " chip, 4 x 200 Gb/s adapters per host of 8 chips",
            "float32 as half of BF16: not published",
        ),
    ),
    Hardware(
        name="cpu-core",
        title="One core of an AVX-512 + AMX Xeon",
        platform="cpu",
        bfloat16=355e9,
        float16=177e9,
        float32=177e9,
        memory_bytes=8 * _GB,
        bytes_per_s=16.5e9,
        inside=Link(1.1e9, 150e-6),
        across=Link(0.8e9, 500e-6),
        per_node=2,
        sources=(
            "measured for this project with jaxlib 0.10.2: 177 GFLOP/s float32 and 355 bfloat16 without AMX, 16.5 GB/s"
            " read bandwidth, KV pulls between processes at 1.0 to 1.2 GiB/s after 130 to 170 us",
            "across: loopback TCP at 0.85 GiB/s; a real network differs. Capacity: a share of a small host",
        ),
    ),
)

HARDWARE: Mapping[str, Hardware] = MappingProxyType({row.name: row for row in _TABLE})
"""Known devices by name."""


def hardware(name: str) -> Hardware:
    """The row called ``name``.

    Raises:
        InvalidPlan: it is not known; the message lists those that are.
    """
    if name not in HARDWARE:
        raise InvalidPlan("$.hardware", f"{name!r} is not known; known: {', '.join(HARDWARE)}")
    return HARDWARE[name]
