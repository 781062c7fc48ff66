"""What a process must settle about its machine before jax is imported: cores, visible devices, addresses."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import LOCALHOST, Plan, Worker

LOOPBACK = "127.0.0.1"


def platform_here() -> Literal["cpu", "gpu", "tpu"]:
    """The platform that jax would choose on this machine, found without importing it."""
    named = os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    if named:
        return "gpu" if named in ("cuda", "rocm", "gpu") else "tpu" if named == "tpu" else "cpu"
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")
    if any(find_spec(name) for name in plugins) and (Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()):
        return "gpu"
    if find_spec("libtpu") and (Path("/dev/accel0").exists() or Path("/dev/vfio").exists()):
        return "tpu"
    return "cpu"


def address_of(host: str) -> str:
    """The IPv4 address of a host that a plan names.

    Raises:
        OSError: nothing is known of it.
    """
    if host == LOCALHOST:
        return LOOPBACK
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise OSError(f"{host!r} is no known host: {error.strerror}") from None


def is_here(host: str) -> bool:
    """Whether ``host`` is an address of this machine.

    Raises:
        OSError: nothing is known of it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address_of(host), 0))
        except OSError as error:
            if "no known host" in str(error):
                raise
            return False
    return True


def check_hosts(plan: Plan) -> None:
    """Check that every host of the plan is known, and private: the KV that it offers is not authenticated.

    Raises:
        InvalidPlan: names the worker.
    """
    for index, worker in enumerate(plan.workers):
        path = f"$.workers[{index}].host"
        try:
            address = ipaddress.ip_address(address_of(worker.host))
        except OSError as error:
            raise InvalidPlan(path, str(error)) from None
        if address.is_unspecified or not address.is_private:
            raise InvalidPlan(path, f"{worker.host} is no private address; KV transfers are not authenticated")


def check_cores(plan: Plan, workers: Seq[Worker]) -> None:
    """Check that the CPU cores that these workers of this machine are to be pinned to are there.

    Raises:
        InvalidPlan: names the worker and the core.
    """
    have = sorted(os.sched_getaffinity(0))
    for worker in workers:
        missing = [core for core in worker.devices if core not in have]
        if missing:
            raise InvalidPlan(
                f"$.workers[{plan.workers.index(worker)}].stages",
                f"worker {worker.name} wants core {missing[0]}, this machine offers {_ranges(have)}; --oversubscribe"
                " lets workers share cores",
            )


def check_machine(plan: Plan, *, oversubscribe: bool) -> None:
    """Check the hosts of a plan, and that this machine has the cores of its own workers.

    Raises:
        InvalidPlan: names the worker.
    """
    check_hosts(plan)
    if plan.platform == "cpu" and not oversubscribe:
        check_cores(plan, [worker for worker in plan.workers if is_here(worker.host)])


def _ranges(numbers: Seq[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 8 else f"{numbers[0]} to {numbers[-1]}"


def claim_devices(plan: Plan, worker: Worker, *, oversubscribe: bool) -> None:
    """Make this process see the worker's devices only. Call it before jax is imported.

    On CPU every thread that starts later runs on the worker's cores, and jax sizes its thread pool by them.

    Raises:
        InvalidPlan: a core is not there.
    """
    numbers = ",".join(map(str, worker.devices))
    match plan.platform:
        case "cpu":
            os.environ["JAX_PLATFORMS"] = "cpu"
            if not oversubscribe:
                check_cores(plan, [worker])
                os.sched_setaffinity(0, worker.devices)
        case "gpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = numbers
        case "tpu":
            os.environ["TPU_VISIBLE_CHIPS"] = numbers
        case "auto":
            raise AssertionError("the front door settles the platform")
