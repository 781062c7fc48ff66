"""Devices that programs can be compiled for without having one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from jdserve.core.errors import InvalidPlan, JdserveError
from jdserve.cost.hardware import HARDWARE, Hardware

TOOLKIT = Path("/usr/local/cuda")
"""Where NVIDIA's own installer puts the compiler."""


class MissingExtra(JdserveError):
    """A compiler is not installed; the message says how to install it."""


class Gpu(msgspec.Struct, frozen=True):
    """What XLA asks about a GPU, from NVIDIA's data sheets and the tables of the CUDA programming guide.

    Attributes:
        title: as the driver names it.
        capability: major version of the compute capability.
        cores: streaming multiprocessors.
        lanes: float32 units of each.
        shared: bytes of shared memory of each.
        shared_block: most bytes of them for one block.
        cache: bytes of level 2 cache.
        clock: GHz.
    """

    title: str
    capability: int
    cores: int
    lanes: int
    shared: int
    shared_block: int
    cache: int
    clock: float


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of device.

    Attributes:
        name: of the target.
        hardware: key of :data:`~jdserve.cost.hardware.HARDWARE`.
        compiler: platform that is lowered for.
        gpu: figures of a GPU, None for others.
        topologies: for TPU, chips and name of slices, ascending.
    """

    name: str
    hardware: str
    compiler: Literal["cuda", "tpu", "cpu"]
    gpu: Gpu | None = None
    topologies: tuple[tuple[int, str], ...] = ()

    @property
    def device(self) -> Hardware:
        """Memory and speed of one device."""
        return HARDWARE[self.hardware]

    def topology(self, devices: int) -> dict[str, str]:
        """How jax's ``get_topology_desc`` is asked for at least ``devices`` devices.

        Raises:
            InvalidPlan: there is no slice of that many.
        """
        if self.gpu is not None:
            return {
                "topology_name": self.gpu.title,
                "topology": f"1x1x{devices}",
                "target_config": _target_config(self.gpu, self.device),
            }
        for chips, name in self.topologies:
            if chips >= devices:
                return {"topology_name": name}
        raise InvalidPlan(
            "$.instances", f"a stage of {devices} devices is above the {self.topologies[-1][0]} of a {self.name} slice"
        )


def _target_config(gpu: Gpu, device: Hardware) -> str:
    """The text form of XLA's GpuTargetConfig."""
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {gpu.capability} }}
          core_count: {gpu.cores}
          fpus_per_core: {gpu.lanes}
          clock_rate_ghz: {gpu.clock}
          memory_bandwidth: {int(device.bytes_per_s)}
          device_memory_size: {device.memory_bytes}
          l2_cache_size: {gpu.cache}
          shared_memory_per_core: {gpu.shared}
          shared_memory_per_block: {48 << 10}
          shared_memory_per_block_optin: {gpu.shared_block}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          threads_per_core_limit: 2048
          threads_per_block_limit: 1024
          threads_per_warp: 32
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 12 }}
        runtime_version {{ major: 13 }}
        device_description_str: "{gpu.title}"
    """


_HOPPER = {"capability": 9, "cores": 132, "lanes": 128, "shared": 228 << 10, "shared_block": 227 << 10, "clock": 1.98}
_FLAT = ((4, "2x2"), (8, "2x4"), (16, "4x4"))
_CUBE = ((4, "2x2x1"), (8, "2x2x2"), (16, "2x2x4"))


def _slices(kind: str, shapes: tuple[tuple[int, str], ...]) -> tuple[tuple[int, str], ...]:
    return tuple((chips, f"{kind}:{shape}") for chips, shape in shapes)


_TABLE = (
    Target(
        name="h100", hardware="h100-80g", compiler="cuda", gpu=Gpu("NVIDIA H100 80GB HBM3", cache=50 << 20, **_HOPPER)
    ),
    Target(
        name="a100",
        hardware="a100-80g",
        compiler="cuda",
        gpu=Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 164 << 10, 163 << 10, 40 << 20, 1.41),
    ),
    Target(name="h200", hardware="h200", compiler="cuda", gpu=Gpu("NVIDIA H200", cache=50 << 20, **_HOPPER)),
    Target(name="v5e", hardware="tpu-v5e", compiler="tpu", topologies=_slices("v5e", _FLAT)),
    Target(name="v5p", hardware="tpu-v5p", compiler="tpu", topologies=_slices("v5p", _CUBE)),
    Target(name="v6e", hardware="tpu-v6e", compiler="tpu", topologies=_slices("v6e", _FLAT)),
    Target(name="cpu", hardware="cpu-core", compiler="cpu"),
)

TARGETS: Mapping[str, Target] = MappingProxyType({target.name: target for target in _TABLE})
"""Known targets by name; ``cpu`` needs no extra."""


def target_of(name: str) -> Target:
    """The target called ``name``.

    Raises:
        InvalidPlan: it is not known; the message lists those that are.
    """
    if name not in TARGETS:
        raise InvalidPlan("$.target", f"{name!r} is not known; known: {', '.join(TARGETS)}")
    return TARGETS[name]


def check_extra(target: Target) -> None:
    """Check that the compiler of ``target`` is installed.

    Raises:
        MissingExtra: it is not.
    """
    missing = ""
    if target.compiler == "tpu" and find_spec("libtpu") is None:
        missing = "libtpu"
    if target.compiler == "cuda":
        if not any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
            missing = "jax's CUDA plugin"
        elif cuda_root() is None:
            missing = "ptxas"
    if missing:
        raise MissingExtra(
            f"target {target.name} needs {missing}: pip install 'jdserve[aot-{target.compiler}]' (no device is needed)"
        )


def cuda_root() -> Path | None:
    """Folder of the CUDA compiler, with ``bin/ptxas``: of NVIDIA's wheels, or of a toolkit; None without."""
    nvidia = find_spec("nvidia")
    homes = [Path(home) for home in nvidia.submodule_search_locations or ()] if nvidia is not None else []
    roots = [root for home in homes for root in (home / "cu13", home / "cuda_nvcc")]
    roots += [Path(folder).parent for folder in os.get_exec_path()] + [TOOLKIT]
    return next((root for root in roots if (root / "bin" / "ptxas").is_file() and (root / "nvvm").is_dir()), None)
