"""Reports as tables for the terminal and for notebooks."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from jdserve.aot.comparing import Comparison, kinds
from jdserve.aot.report import Fit, Program, Report


def size(bytes: float) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if bytes >= 1 << scale:
            return f"{bytes / (1 << scale):.2f} {unit}"
    return f"{bytes:.0f} B"


def report_table(report: Report) -> Group:
    """Programs, then whether each stage fits."""
    title = f"{report.device}, jax {report.jax}, per device; compiled ahead of time, nothing ran"
    table = Table(title=title, title_justify="left", expand=False)
    for head in ("program", "collectives", "on the wire", "arguments", "temporaries", "pool", "copies > 1 MiB"):
        table.add_column(head, justify="left" if head in ("program", "collectives") else "right")
    counted = any(one.flops is not None for one in report.programs)
    resources = any(one.kernels is not None for one in report.programs)
    for head in ["FLOPs", "bytes"] * counted + ["kernels: most registers, spills"] * resources:
        table.add_column(head, justify="right")
    for one in report.programs:
        table.add_row(*_row(one), *_costs(one) * counted, *[_kernels(one)] * resources)
    return Group(table, *(_fit(fit) for fit in report.fits))


def _row(one: Program) -> list[str]:
    stage = f" stage {one.stage}" if one.stage else ""
    extended = " (extrapolated)" if one.extrapolated else ""
    copied = sum(copy.bytes * copy.count for copy in one.copies)
    return [
        f"{one.instance}{stage} {one.name}, {one.layers} layers{extended}",
        "\n".join(f"{count} {kind}" for kind, count in kinds(one).items()) or "none",
        size(one.wire_bytes),
        size(one.memory.arguments),
        size(one.memory.temporaries),
        "in place" if one.pool_aliased else "COPIED",
        f"{sum(copy.count for copy in one.copies)}, {size(copied)}" if one.copies else "none",
    ]


def _costs(one: Program) -> list[str]:
    flops = "" if one.flops is None else f"{one.flops:.3g}"
    return [flops, "" if one.bytes_accessed is None else size(one.bytes_accessed)]


def _kernels(one: Program) -> str:
    if not one.kernels:
        return ""
    most = max(kernel.registers for kernel in one.kernels)
    spills = f"{len(one.spills)} spill" if one.spills else "no spills"
    return f"{len(one.kernels)}: {most}, {spills}"


def _fit(fit: Fit) -> str:
    verdict = "fits" if fit.fits else "does not fit"
    stage = f" stage {fit.stage}" if fit.stage else ""
    return (
        f"{fit.instance}{stage} {verdict}: {fit.program} needs {size(fit.needed)} per device,"
        f" {size(fit.usable)} may be planned with"
    )


def comparison_table(comparison: Comparison) -> Table:
    """Each program under both rules."""
    a, b = (_rules(report) for report in (comparison.a, comparison.b))
    table = Table(title=f"{comparison.a.device}: A = {a}; B = {b}", title_justify="left")
    for head in ("program", "collectives A", "B", "on the wire A", "B", "arguments A", "B", "temporaries A", "B"):
        table.add_column(head, justify="left" if head == "program" else "right")
    for one in comparison.differences:
        stage = f" stage {one.stage}" if one.stage else ""
        table.add_row(
            f"{one.instance}{stage} {one.name}",
            *(
                "\n".join(f"{n[side]} {kind}" for kind, n in one.collectives.items() if n[side]) or "none"
                for side in (0, 1)
            ),
            *map(size, one.wire_bytes),
            *(size(memory.arguments) for memory in one.memory),
            *(size(memory.temporaries) for memory in one.memory),
        )
    return table


def _rules(report: Report) -> str:
    return ", ".join(f"{role} splits {' '.join(split) or 'nothing'}" for role, split in report.rules.items())
