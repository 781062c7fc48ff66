"""A run's figures as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jdserve.loadgen.client import Record
from jdserve.loadgen.metrics import Slo, Spread, Summary, latency, summarise


class RequestRow(msgspec.Struct, frozen=True):
    """One request: what was recorded, and the latencies that follow from it (None unless it was answered in full).

    Attributes:
        record: times in seconds after the start of the run.
        ttft: seconds.
        tpot: seconds; None for a single token, too.
        e2e: seconds.
    """

    record: Record
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None


class Report(msgspec.Struct, frozen=True):
    """Everything about one run; ``jdserve.core.jsonio.encode`` gives the JSON, with non-finite numbers nowhere.

    Attributes:
        settings: the command's flags.
        summary: all figures.
        requests: one row per request that was sent.
        version: of this format.
    """

    settings: dict[str, str | int | float | bool | None]
    summary: Summary
    requests: tuple[RequestRow, ...]
    version: int = 1

    @classmethod
    def of(
        cls, settings: dict[str, str | int | float | bool | None], records: Sequence[Record], slo: Slo, unsent: int
    ) -> Report:
        """The report of ``records``; arguments as in ``summarise``."""
        return cls(settings, summarise(records, slo, unsent), tuple(_row(record) for record in records))


def _row(record: Record) -> RequestRow:
    one = latency(record)
    return RequestRow(record) if one is None else RequestRow(record, one.ttft, one.tpot, one.e2e)


def show(summary: Summary, console: Console) -> None:
    """Print a run's figures."""
    console.print(_latencies(summary))
    console.print(_counts(summary))
    for message, count in summary.errors.items():
        console.print(f"[red]{count} x[/red] {escape(message)}")


def _latencies(summary: Summary) -> Table:
    table = Table(title="latency (ms)")
    for column in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="right" if column else "left")
    spreads = {
        "TTFT": summary.ttft,
        "TPOT": summary.tpot,
        "inter-token": summary.itl,
        "end to end": summary.e2e,
        "client lag": summary.lag,
    }
    for name, spread in spreads.items():
        table.add_row(name, *_milliseconds(spread))
    return table


def _milliseconds(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["-"] * 5
    return [f"{value * 1e3:.2f}" for value in msgspec.structs.astuple(spread)]


def _counts(summary: Summary) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "completed": f"{summary.completed}",
        "failed": f"{summary.failed}",
        "cut off": f"{summary.cut_off}",
        "not sent": f"{summary.unsent}",
        "prompts of another length": f"{summary.other_input_len}",
        "answers of another length": f"{summary.other_output_len}",
        "duration": f"{summary.duration_s:.2f} s",
        "offered rate": "-" if summary.offered_rate is None else f"{summary.offered_rate:.3f} req/s",
        "throughput": f"{summary.request_throughput:.3f} req/s",
        "input tokens": f"{summary.input_token_throughput:.1f} /s",
        "output tokens": f"{summary.output_token_throughput:.1f} /s",
    }
    if summary.attainment is not None:
        bounds = summary.slo
        rows["attainment, both SLOs"] = f"{summary.attainment.joint:.2%}"
        rows[f"  TTFT {_bound(bounds.ttft)}"] = f"{summary.attainment.ttft:.2%}"
        rows[f"  TPOT {_bound(bounds.tpot)}"] = f"{summary.attainment.tpot:.2%}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _bound(seconds: float | None) -> str:
    return "unbounded" if seconds is None else f"<= {seconds:g} s"
