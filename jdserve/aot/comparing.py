"""``compare``: two ways to lay the same plan on the same devices, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jdserve.aot.report import Memory, Program, Report
from jdserve.aot.run import dryrun
from jdserve.core.plan import Plan

if TYPE_CHECKING:
    from jdserve.sharding.presets import PhaseRules
    from jdserve.sharding.rules import ShardingRules


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One program under both rules.

    Attributes:
        instance, stage, name: of the program.
        collectives: by kind, how many there are under each.
        wire_bytes: of the collectives that always run, under each.
        memory: under each.
    """

    instance: str
    stage: int
    name: str
    collectives: dict[str, tuple[int, int]]
    wire_bytes: tuple[int, int]
    memory: tuple[Memory, Memory]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two reports and their differences, program by program."""

    a: Report
    b: Report
    differences: tuple[Difference, ...]

    def __rich__(self) -> Any:
        from jdserve.aot.tables import comparison_table

        return comparison_table(self)


def compare(
    rules_a: str | ShardingRules | PhaseRules,
    rules_b: str | ShardingRules | PhaseRules,
    target: str,
    plan: Plan | str | Path,
    **options: Any,
) -> Comparison:
    """Compile a plan under two sets of rules, and say what differs in collectives and memory.

    Args:
        rules_a: one set, as :func:`~jdserve.aot.run.dryrun` takes it.
        rules_b: the other.
        target: as there.
        plan: as there.
        options: the other arguments of it.

    Raises:
        InvalidPlan, MissingExtra, CompilerFailed: as there.
    """
    a, b = (dryrun(plan, target, rules=rules, **options) for rules in (rules_a, rules_b))
    return Comparison(a=a, b=b, differences=tuple(map(_difference, a.programs, b.programs)))


def _difference(a: Program, b: Program) -> Difference:
    counts = [kinds(one) for one in (a, b)]
    return Difference(
        instance=a.instance,
        stage=a.stage,
        name=a.name,
        collectives={
            kind: (counts[0].get(kind, 0), counts[1].get(kind, 0)) for kind in sorted({*counts[0], *counts[1]})
        },
        wire_bytes=(a.wire_bytes, b.wire_bytes),
        memory=(a.memory, b.memory),
    )


def kinds(program: Program) -> dict[str, int]:
    """How many collectives of each kind there are; the kind says so where they do not run once."""
    found: dict[str, int] = {}
    for one in program.collectives:
        kind = one.kind if one.where == "always" else f"{one.kind} in a {one.where}"
        found[kind] = found.get(kind, 0) + one.count
    return found
