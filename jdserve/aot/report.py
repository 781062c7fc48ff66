"""What a dry run says, as data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from jdserve.core import jsonio

Where = Literal["always", "branch", "loop"]
"""When an operation runs: once a launch, only where a branch is taken, or each time around a loop."""


class Collective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Collectives of one kind and size.

    Attributes:
        kind: as HLO names it.
        axis: of the mesh.
        devices: that take part, in each group.
        bytes: of the whole operand, or for an all-gather of the whole result, on one device.
        shape: of the operand.
        part: of the step: ``embed``, ``layers``, ``sample``, ``score``, or empty.
        where: see :data:`Where`.
        count: how many there are in the program.
    """

    kind: str
    axis: str
    devices: int
    bytes: int
    shape: str
    part: str
    where: Where
    count: int = 1


class Copy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies (and transpositions) in the memory of a device.

    Attributes:
        shape: of the result.
        bytes: of it.
        pool: whether it is as large as the KV pool of a layer or more, and has its pages for an axis.
        part, where, count: as of :class:`Collective`.
    """

    shape: str
    bytes: int
    pool: bool
    part: str
    where: Where
    count: int = 1


class Kernel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A CUDA kernel.

    Attributes:
        name: of its entry.
        registers: per thread.
        spill_bytes: stored to and loaded from local memory per thread, for want of registers.
        shared_bytes: shared memory of a block, what the launch adds included; None where no launch was seen.
        threads: of a block; None where no launch was seen.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int | None = None
    threads: int | None = None


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of a program on one device, in bytes.

    Attributes:
        arguments: weights, KV pool, state and inputs.
        outputs: with those that lie where an argument was.
        aliased: outputs that lie where an argument was.
        temporaries: in between.
        code: of the program.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """Bytes that a device must have free for the program and all that it takes."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One compiled program.

    Attributes:
        instance, stage: whose it is.
        name: of the bucket, such as ``decode-64``, ``prefill-512x32`` (tokens x chunks) or ``gather-8`` (pages).
        layers: in the stage.
        extrapolated: whether the figures are extended from programs of one and two layers.
        memory: of it.
        pool_aliased: whether the KV pool, where it is an output, stays where it is.
        collectives, copies: in it; copies below 1 MiB are left out.
        kernels: in it, None where the target has none to tell.
        flops, bytes_accessed: as the compiler counts them, None where it does not.
        seconds: that compiling took.
    """

    instance: str
    stage: int
    name: str
    layers: int
    extrapolated: bool = False
    memory: Memory
    pool_aliased: bool
    collectives: tuple[Collective, ...] = ()
    copies: tuple[Copy, ...] = ()
    kernels: tuple[Kernel, ...] | None = None
    flops: float | None = None
    bytes_accessed: float | None = None
    seconds: float

    @property
    def wire_bytes(self) -> int:
        """Bytes of all collectives that always run."""
        return sum(one.bytes * one.count for one in self.collectives if one.where == "always")

    @property
    def spills(self) -> tuple[Kernel, ...]:
        """Kernels that spill registers."""
        return tuple(kernel for kernel in self.kernels or () if kernel.spill_bytes)


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the largest program of a stage fits.

    Attributes:
        instance, stage: which.
        program: the largest.
        needed: bytes per device.
        usable: bytes of a device that may be planned with.
    """

    instance: str
    stage: int
    program: str
    needed: int
    usable: int

    @property
    def fits(self) -> bool:
        """It does."""
        return self.needed <= self.usable


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a dry run says.

    Attributes:
        target: name of the target.
        device: for people.
        jax: version that compiled.
        rules: per phase, the mesh axis of each logical axis that is split.
        programs: in the order of the plan. Of equal instances only the first is compiled.
        fits: of each stage.
    """

    target: str
    device: str
    jax: str
    rules: dict[str, dict[str, str]]
    programs: tuple[Program, ...]
    fits: tuple[Fit, ...]

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        Path(path).write_bytes(jsonio.encode(self))

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report that was saved.

        Raises:
            InvalidPlan: it is none.
        """
        return jsonio.read(path, cls)

    def __rich__(self) -> Any:
        from jdserve.aot.tables import report_table

        return report_table(self)


def fits_of(programs: Iterable[Program], usable: int) -> tuple[Fit, ...]:
    """The fit of each stage that has programs."""
    largest: dict[tuple[str, int], Program] = {}
    for program in programs:
        at = program.instance, program.stage
        if at not in largest or program.memory.total > largest[at].memory.total:
            largest[at] = program
    return tuple(
        Fit(instance=instance, stage=stage, program=one.name, needed=one.memory.total, usable=usable)
        for (instance, stage), one in largest.items()
    )
