"""What a comparison ran on, and how much memory a process took; standard library only, so that a peer's own
interpreter can import it.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def describe() -> dict[str, str | int]:
    """CPU model, cores and system of this machine."""
    return {"cpu": _cpu_model(), "cores": cores(), "system": f"{platform.system()} {platform.machine()}"}


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def reset_peak_memory() -> None:
    """Forget the peak so far. Only Linux can; elsewhere the peak is that since the process started."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Most resident bytes of this process since it started, or since :func:`reset_peak_memory` where that works."""
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
