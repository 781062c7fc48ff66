"""Reading the text of an optimized HLO module: its collectives, its copies, and which outputs lie where inputs were."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jdserve.aot.report import Collective, Copy, Where

LEAST_COPY = 1 << 20
"""Bytes of the smallest copy that is told of."""

PARTS = ("embed", "layers", "sample", "score")
"""Scopes of a step program."""

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_COLLECTIVES = {f"{kind}{end}": kind for kind in _KINDS for end in ("", "-start")}
_COPIES = ("copy", "copy-start", "transpose")

_BITS = {"pred": 8, "bf16": 16}
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(body|condition|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ALIAS = re.compile(r"\{(\d+)(?:,\s*\d+)*\}:\s*\(\d+,")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def part(self) -> str:
        """Scope of the step program that it comes from; empty for none."""
        found = _SCOPE.search(self.rest)
        steps = found[1].split("/") if found else []
        return next((step for step in steps if step in PARTS), "")


@dataclass(frozen=True)
class Computation:
    """A function of the module."""

    name: str
    entry: bool
    instructions: tuple[Instruction, ...]


def parse(text: str) -> tuple[Computation, ...]:
    """The computations of a module."""
    found: list[Computation] = []
    head: re.Match[str] | None = None
    body: list[Instruction] = []
    for line in text.splitlines():
        if head is None:
            head, body = _HEAD.match(line), []
        elif line.startswith("}"):
            found.append(Computation(head[2], bool(head[1]), tuple(body)))
            head = None
        elif " = " in line:
            body.append(_instruction(line))
    return tuple(found)


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().partition(" = ")
    root, name = name.startswith("ROOT "), name.removeprefix("ROOT ").removeprefix("%")
    end = _closed(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    op, _, _ = rest.partition("(")
    end = len(op) + _closed(rest[len(op) :])
    return Instruction(name, shape, op, tuple(_NAME.findall(rest[len(op) : end])), rest[end:], root)


def _closed(text: str) -> int:
    """Where the parenthesis that ``text`` begins with is closed."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return index + 1
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")


def shape_bytes(shape: str) -> int:
    """Bytes of an array or a tuple as HLO writes its shape."""
    return sum(_array_bytes(dtype, dims) for dtype, dims, _ in _ARRAY.findall(shape))


def _array_bytes(dtype: str, dims: str) -> int:
    digits = re.search(r"\d+", dtype)
    bits = _BITS.get(dtype) or (int(digits[0]) if digits else 0)  # tokens have none
    return math.prod(_sizes(dims)) * bits // 8


def _sizes(dims: str) -> list[int]:
    return [int(size.removeprefix("<=")) for size in dims.split(",") if size]


def _plain(shape: str) -> str:
    return ", ".join(f"{dtype}[{dims}]" for dtype, dims, _ in _ARRAY.findall(shape))


def _reached(computations: Iterable[Computation]) -> dict[str, tuple[Where, bool]]:
    """Of each computation that is reached from the entry: when it runs, and whether it is a fusion."""
    by_name = {one.name: one for one in computations}
    order: tuple[Where, ...] = ("always", "branch", "loop")
    reached: dict[str, tuple[Where, bool]] = {}
    waiting: list[tuple[str, Where, bool]] = [(one.name, "always", False) for one in by_name.values() if one.entry]
    while waiting:
        name, where, fused = waiting.pop()
        if name not in by_name or (name in reached and order.index(reached[name][0]) >= order.index(where)):
            continue
        reached[name] = where, fused
        for instruction in by_name[name].instructions:
            for inner, called in _calls(instruction):
                later = order[max(order.index(where), order.index(inner))]
                waiting.append((called, later, fused or instruction.op == "fusion"))
    return reached


def _calls(instruction: Instruction) -> Iterator[tuple[Where, str]]:
    for role, called in _CALLED.findall(instruction.rest):
        where: Where = "branch" if role.endswith("computation") else "always"
        if role in ("body", "condition"):
            where = "loop"
        yield where, called
    for names in _BRANCHES.findall(instruction.rest):
        for called in _NAME.findall(names):
            yield "branch", called


def group_size(rest: str, devices: int) -> int:
    """Devices in each group of a collective of a program over ``devices`` devices, from its attributes."""
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[name]) for name, part in parts)
    return devices


def collectives(computations: tuple[Computation, ...], axis: str, devices: int) -> tuple[Collective, ...]:
    """Collectives of a program over one mesh axis, equal ones counted together.

    What a compiler splits into several operations of one channel counts once.
    """
    reached = _reached(computations)
    seen: set[str] = set()
    counts: dict[tuple[object, ...], int] = {}
    for computation in computations:
        if computation.name not in reached:
            continue
        shapes = {one.name: one.shape for one in computation.instructions}
        for one in computation.instructions:
            kind = _COLLECTIVES.get(one.op)
            channel = re.search(r"channel_id=(\d+)", one.rest)
            if kind is None or (channel and channel[1] in seen):
                continue
            if channel:
                seen.add(channel[1])
            operands = [shapes.get(name, "") for name in one.operands]
            group = group_size(one.rest, devices)
            size = sum(shape_bytes(shape) for shape in operands) * (group if kind == "all-gather" else 1)
            key = kind, group, size, ", ".join(map(_plain, operands)), one.part, reached[computation.name][0]
            counts[key] = counts.get(key, 0) + 1
    fields = ("kind", "devices", "bytes", "shape", "part", "where")
    return tuple(Collective(axis=axis, count=n, **dict(zip(fields, key, strict=True))) for key, n in counts.items())  # type: ignore[arg-type]


def copies(computations: tuple[Computation, ...], pool_pages: int, pool_bytes: int) -> tuple[Copy, ...]:
    """Copies of at least :data:`LEAST_COPY` bytes; moves between kinds of memory of a device are none.

    Args:
        computations: of the program.
        pool_pages: pages of the KV pool, which no other axis is as long as.
        pool_bytes: of the keys of one layer on one device.
    """
    reached = _reached(computations)
    counts: dict[tuple[object, ...], int] = {}
    for computation in computations:
        if computation.name not in reached:
            continue
        where, fused = reached[computation.name]
        shapes = {one.name: one.shape for one in computation.instructions}
        for one in computation.instructions:
            if one.op not in _COPIES or (fused and not one.root):
                continue
            to = _ARRAY.findall(one.shape)[:1]
            source = _ARRAY.findall(shapes.get(one.operands[0], ""))[:1] if one.operands else []
            if not to or (source and source[0][2] != to[0][2]) or (bytes := _array_bytes(*to[0][:2])) < LEAST_COPY:
                continue
            dtype, dims, _ = to[0]
            pool = pool_pages in _sizes(dims) and bytes >= pool_bytes
            key = f"{dtype}[{dims}]", bytes, pool, one.part, where
            counts[key] = counts.get(key, 0) + 1
    fields = ("shape", "bytes", "pool", "part", "where")
    return tuple(Copy(count=n, **dict(zip(fields, key, strict=True))) for key, n in counts.items())  # type: ignore[arg-type]


def aliased_outputs(text: str) -> frozenset[int]:
    """Positions of the outputs that lie where an argument was."""
    head = text.partition("\n")[0]
    start = head.find("input_output_alias={")
    if start < 0:
        return frozenset()
    end = head.find("}, entry_computation_layout", start)
    return frozenset(int(position) for position in _ALIAS.findall(head[start:end]))
