"""Registers, spills and shared memory of CUDA kernels: what the assembler says while XLA has it assemble them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from jdserve.aot.report import Kernel

_KERNEL = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")
_LAUNCH = re.compile(r"kCustomKernel .*\] (\S+) grid: .* threads: \[([\d, ]+)\]\s+shared_memory: (\d+) bytes")


def toolkit(folder: Path, root: Path) -> Path:
    """Make ``folder`` a CUDA toolkit like ``root``, but for a ptxas that also writes down what it says; returns logs.

    XLA and jax find it by ``CUDA_ROOT``, older ones by PATH.
    """
    logs, bin = folder / "logs", folder / "bin"
    logs.mkdir(parents=True)
    bin.mkdir()
    for tool in root.iterdir():
        if tool.name != "bin":
            (folder / tool.name).symlink_to(tool)
    for tool in (root / "bin").iterdir():
        if tool.name != "ptxas":
            (bin / tool.name).symlink_to(tool)
    real, log = shlex.quote(str(root / "bin" / "ptxas")), shlex.quote(str(logs))
    wrapper = bin / "ptxas"
    wrapper.write_text(f'#!/bin/sh\n{real} -v "$@" 2> {log}/$$\ncode=$?\ncat {log}/$$ >&2\nexit $code\n')
    wrapper.chmod(0o755)
    return logs


def kernels(told: str, launches: str = "") -> tuple[Kernel, ...]:
    """The kernels that ptxas told of, by name.

    Args:
        told: by ``ptxas -v``.
        launches: the thunk sequence of XLA's dump, for threads and shared memory.
    """
    launched = {name: (threads, int(shared)) for name, threads, shared in _LAUNCH.findall(launches)}
    found: dict[str, Kernel] = {}
    name, spills = "", 0
    for line in told.splitlines():
        if match := _KERNEL.search(line):
            name, spills = match[1], 0
        elif match := _SPILLS.search(line):
            spills = int(match[1]) + int(match[2])
        elif (match := _USED.search(line)) and name:
            static = _SHARED.search(match[2])
            shared = int(static[1]) if static else 0
            threads, added = launched.get(name, (None, None))
            found[name] = Kernel(
                name=name,
                registers=int(match[1]),
                spill_bytes=spills,
                shared_bytes=None if added is None and not shared else max(shared, added or 0),
                threads=None if threads is None else _product(threads),
            )
            name = ""
    return tuple(found[name] for name in sorted(found))


def _product(threads: str) -> int:
    x, y, z = (int(size) for size in threads.split(","))
    return x * y * z
