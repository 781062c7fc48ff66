"""Figures of two systems that do the same work, and how they are shown.

With P prompt tokens and n answer tokens per request, c requests sent at time 0, request i's tokens at t_i1 .. t_in:

- prefill tokens/s = c P / max t_i1
- decode tokens/s = c (n - 1) / (max t_in - min t_i1); prompts still being computed in that time slow it down
- output tokens/s = c n / max t_in
- TTFT = t_i1; TPOT = (t_in - t_i1) / (n - 1)
- KV transfer share = seconds from pull to landing, summed, over sum t_in
- peak memory: most resident bytes of the process during a repetition

A figure is the median over the repetitions; a percentile is taken within a repetition first; a ratio is ours over
theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec
from rich.table import Table

from jdserve.loadgen.metrics import Spread, spread

LABELS = {
    "prefill_tokens_per_s": "prefill tokens/s",
    "decode_tokens_per_s": "decode tokens/s",
    "output_tokens_per_s": "output tokens/s",
    "ttft_p50_s": "TTFT p50 ms",
    "ttft_p90_s": "TTFT p90 ms",
    "ttft_p99_s": "TTFT p99 ms",
    "tpot_p50_s": "TPOT p50 ms",
    "tpot_p90_s": "TPOT p90 ms",
    "tpot_p99_s": "TPOT p99 ms",
    "kv_transfer_share": "KV transfer share",
    "peak_memory_bytes": "peak memory MiB",
}
"""How people read the names of the figures."""


@dataclass(frozen=True)
class Run:
    """One repetition.

    Attributes:
        prompt_tokens: of each request.
        times: per request, seconds from the start to each token.
        tokens: per request.
        peak: resident bytes.
        transfer_s: seconds of KV transfer, None where nothing is transferred.
    """

    prompt_tokens: int
    times: Sequence[Sequence[float]]
    tokens: Sequence[Sequence[int]]
    peak: int
    transfer_s: float | None = None


class Figures(msgspec.Struct, frozen=True):
    """What is reported of one system at one concurrency; see the module for the definitions. Seconds and bytes."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    tpot_p99_s: float
    kv_transfer_share: float | None
    peak_memory_bytes: float

    @classmethod
    def of_run(cls, run: Run) -> Figures:
        """Figures of one repetition."""
        requests, answer = len(run.times), len(run.times[0])
        first, last = [times[0] for times in run.times], [times[-1] for times in run.times]
        ttft = _spread(first)
        tpot = _spread([(b - a) / (answer - 1) for a, b in zip(first, last, strict=True)])
        return cls(
            prefill_tokens_per_s=requests * run.prompt_tokens / max(first),
            decode_tokens_per_s=requests * (answer - 1) / (max(last) - min(first)),
            output_tokens_per_s=requests * answer / max(last),
            ttft_p50_s=ttft.p50,
            ttft_p90_s=ttft.p90,
            ttft_p99_s=ttft.p99,
            tpot_p50_s=tpot.p50,
            tpot_p90_s=tpot.p90,
            tpot_p99_s=tpot.p99,
            kv_transfer_share=None if run.transfer_s is None else run.transfer_s / sum(last),
            peak_memory_bytes=run.peak,
        )

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Figures:
        """Medians over repetitions."""
        rows = [msgspec.structs.asdict(cls.of_run(run)) for run in runs]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        medians: dict[str, Any] = {name: None if None in column else median(column) for name, column in columns.items()}
        return cls(**medians)

    def over(self, other: Figures) -> dict[str, float | None]:
        """Ratio of each figure to that of another system, None where one of them has none."""
        pairs = {name: (mine, getattr(other, name)) for name, mine in msgspec.structs.asdict(self).items()}
        return {name: None if None in pair else pair[0] / pair[1] for name, pair in pairs.items()}


def _spread(values: Sequence[float]) -> Spread:
    found = spread(values)
    assert found is not None
    return found


def table(title: str, ours: Figures, theirs: Figures | None, skipped: str) -> Table:
    """Figures of both systems for people; ``skipped`` says why there are none of the other."""
    rows = Table(title=title, caption=f"transformers {skipped}" if theirs is None else None)
    for column in ("", "jdserve", "transformers", "ratio"):
        rows.add_column(column, justify="right" if column else "left")
    ratios = {} if theirs is None else ours.over(theirs)
    for name, label in LABELS.items():
        other = "skipped" if theirs is None else _shown(name, getattr(theirs, name))
        rows.add_row(label, _shown(name, getattr(ours, name)), other, _shown("ratio", ratios.get(name)))
    return rows


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.0f}"
    if name.endswith("_per_s"):
        return f"{value:,.1f}"
    if name.endswith("_s"):
        return f"{value * 1e3:,.1f}"
    return f"{value:.2%}" if name.endswith("_share") else f"{value:.2f}"
