"""From programs of one and of two layers to the same programs of any number of equal layers."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TypeVar

import msgspec

from jdserve.aot.report import Collective, Copy, Memory, Program

Counted = TypeVar("Counted", Collective, Copy)


def extended(programs: Seq[Program], layers: Mapping[str, int]) -> list[Program]:
    """One program from each pair of one layer and two.

    What a second layer adds is what every further one adds. Temporaries are taken to grow like that too, which is never
    less than what they need: later layers use the memory of earlier ones again.

    Args:
        programs: compiled.
        layers: of a stage of each instance.
    """
    pairs: dict[tuple[str, int, str], dict[int, Program]] = {}
    for program in programs:
        pairs.setdefault((program.instance, program.stage, program.name), {})[program.layers] = program
    return [_extended(pair[1], pair[2], layers[name]) for (name, _, _), pair in pairs.items()]


def _extended(one: Program, two: Program, layers: int) -> Program:
    def grow(first: float, second: float) -> int:
        return round(first + (layers - 1) * (second - first))

    memory = Memory(
        arguments=grow(one.memory.arguments, two.memory.arguments),
        outputs=grow(one.memory.outputs, two.memory.outputs),
        aliased=grow(one.memory.aliased, two.memory.aliased),
        temporaries=max(two.memory.temporaries, grow(one.memory.temporaries, two.memory.temporaries)),
        code=grow(one.memory.code, two.memory.code),
    )
    return msgspec.structs.replace(
        two,
        layers=layers,
        extrapolated=True,
        memory=memory,
        pool_aliased=one.pool_aliased and two.pool_aliased,
        collectives=_counts(one.collectives, two.collectives, layers),
        copies=_counts(one.copies, two.copies, layers),
        flops=None if one.flops is None or two.flops is None else float(grow(one.flops, two.flops)),
        bytes_accessed=None
        if one.bytes_accessed is None or two.bytes_accessed is None
        else float(grow(one.bytes_accessed, two.bytes_accessed)),
        seconds=one.seconds + two.seconds,
    )


def _counts(one: Seq[Counted], two: Seq[Counted], layers: int) -> tuple[Counted, ...]:
    first = {msgspec.structs.replace(item, count=1): item.count for item in one}
    second = {msgspec.structs.replace(item, count=1): item.count for item in two}
    found = []
    for item in dict.fromkeys((*first, *second)):
        before = first.get(item, 0)
        count = before + (layers - 1) * (second.get(item, 0) - before)
        if count > 0:
            found.append(msgspec.structs.replace(item, count=count))
    return tuple(found)
