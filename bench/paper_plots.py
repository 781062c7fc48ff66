"""Pictures of ``paper_figures.py``: theirs dashed, ours solid, the same colour for the same system."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

matplotlib.use("agg")

COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#8d6a9f", "#edae49", "#2e4057")

SYSTEMS = {"DistServe": COLOURS[0], "vLLM": COLOURS[1], "DeepSpeed-MII": COLOURS[2]}

DPI = 80

COLOUR_COUNT = 48


def draw(report: Mapping[str, Any], folder: Path) -> None:
    """Write all pictures into ``folder``."""
    for name, figure in (
        ("fig1", _fig1(report["fig1"])),
        ("fig4", _fig4(report["fig4"])),
        ("fig8_9", _fig8_9(report["fig8_9"])),
        ("fig10", _fig10(report["fig10"])),
        ("fig11_12", _fig11_12(report["fig11"], report["fig12"])),
        ("tables", _tables(report["table2"], report["table3"])),
    ):
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=DPI)
        # few colours make a small file
        Image.open(drawn).convert("RGB").quantize(COLOUR_COUNT).save(folder / f"{name}.png", optimize=True)


def _figure(columns: int, rows: int = 1, width: float = 4.6, height: float = 3.2) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [axis for row in axes for axis in row]


def _lines(axis: Axes, curves: Mapping[str, Any], style: str, whose: str, colours: Mapping[str, str]) -> None:
    for name, points in curves.items():
        x, y = zip(*points, strict=True)
        axis.plot(x, y, style, color=colours[name], label=f"{name}, {whose}", markersize=3, linewidth=1.4)


def _dress(axis: Axes, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=7)


def _fig1(data: Mapping[str, Any]) -> Figure:
    figure, (first, second, third) = _figure(3)
    colours = {
        "existing_vLLM": COLOURS[1],
        "colocated": COLOURS[1],
        "prefill_only": COLOURS[0],
        "decode_only": COLOURS[0],
    }
    for axis, key, limit in ((first, "ttft_p90_s", 0.4), (second, "tpot_p90_s", 0.04)):
        _lines(axis, data[key]["ours"], "o-", "ours", colours)
        _lines(axis, data[key]["theirs"], "--", "theirs", colours)
        axis.axhline(limit, color="#444444", linewidth=0.8, linestyle=":")
        axis.set_ylim(0, 2.5 * limit)
        _dress(axis, f"Fig 1: P90 {key.split('_')[0].upper()}, OPT-13B 512/64", "requests/s on one GPU", "seconds")
    names = list(data["goodput_per_gpu"]["ours"])
    for shift, whose, colour in ((-0.2, "ours", COLOURS[0]), (0.2, "theirs", "#bbbbbb")):
        values = [data["goodput_per_gpu"][whose][name] for name in names]
        third.bar([place + shift for place in range(len(names))], values, 0.4, color=colour, label=whose)
    third.set_xticks(range(len(names)), names)
    _dress(third, "Fig 1: goodput at 90 %", "", "requests/s per GPU")
    return figure


def _fig4(data: Mapping[str, Any]) -> Figure:
    figure, axes = _figure(2)
    for axis, (key, curves) in zip(axes, data["ours"].items(), strict=True):
        colours = dict(zip(curves, COLOURS, strict=False))
        _lines(axis, curves, "-", "Eqs 2, 3", colours)
        for name, points in data["theirs"][key].items():
            axis.plot(*zip(*points, strict=True), "x", color=colours[name], markersize=5)
        _dress(axis, f"Fig 4{'a' if '4a' in key else 'b'}: mean TTFT of two devices (x: theirs)", "req/s per GPU", "s")
    return figure


def _fig8_9(data: Mapping[str, Any]) -> Figure:
    figure, axes = _figure(2, len(data), height=2.8)
    for row, (name, curves) in enumerate(data.items()):
        for axis, key, x in ((axes[2 * row], "rate", "requests/s per GPU"), (axes[2 * row + 1], "scale", "SLO scale")):
            _lines(axis, curves[key]["ours"], "o-", "ours", SYSTEMS)
            _lines(axis, curves[key]["theirs"], "--", "theirs", SYSTEMS)
            axis.axhline(90, color="#444444", linewidth=0.8, linestyle=":")
            axis.set_ylim(0, 104)
            if key == "scale":
                axis.invert_xaxis()
            _dress(axis, f"Figs 8, 9: {name}", x, "attainment, %")
    return figure


def _fig10(data: Mapping[str, Any]) -> Figure:
    figure, (left, right) = _figure(2, width=5.5)
    parts = ("prefill_queue", "prefill_exec", "transmission", "decode_queue", "decode_exec")
    rates = list(data["percent"]["ours"])
    for shift, whose, faint in ((-0.2, "ours", 1.0), (0.2, "theirs", 0.45)):
        bottom = [0.0] * len(rates)
        for colour, part in zip(COLOURS, parts, strict=False):
            values = [data["percent"][whose][rate][part] for rate in rates]
            places = [place + shift for place in range(len(rates))]
            label = part.replace("_", " ") if whose == "ours" else None
            left.bar(places, values, 0.38, bottom=bottom, color=colour, alpha=faint, label=label)
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    left.set_xticks(range(len(rates)), rates)
    left.set_ylim(0, 125)
    _dress(left, "Fig 10: where the time goes (left bar ours, right theirs)", "requests/s per GPU", "%")
    left.legend(fontsize=7, ncols=3, loc="upper center")
    for colour, name in zip(COLOURS, data["moving_ms_p50_p90_p95_p99"]["ours"], strict=False):
        for whose, style in (("ours", "o-"), ("theirs", "--")):
            values = data["moving_ms_p50_p90_p95_p99"][whose][name]
            right.plot(values, (50, 90, 95, 99), style, color=colour, label=f"{name}, {whose}", markersize=3)
    right.set_xscale("log")
    _dress(right, "Fig 10: time to move KV", "milliseconds", "percentile")
    return figure


def _fig11_12(high_low: Mapping[str, Any], runtime: Mapping[str, Any]) -> Figure:
    figure, (left, right) = _figure(2)
    names = list(high_low["ours"])
    for shift, whose, colour in ((-0.2, "ours", COLOURS[0]), (0.2, "theirs", "#bbbbbb")):
        values = [
            high_low["ours"][name]["goodput_per_gpu"] if whose == "ours" else high_low["theirs_goodput_per_gpu"][name]
            for name in names
        ]
        left.bar([place + shift for place in range(len(names))], values, 0.4, color=colour, label=whose)
    left.set_xticks(range(len(names)), names)
    _dress(left, "Fig 11: OPT-66B, ShareGPT", "", "requests/s per GPU at 90 %")
    for colour, name in zip(COLOURS, runtime["cpu_s"], strict=False):
        for key, style, whose in (
            ("cpu_s", "o-", "ours, CPU-s"),
            ("theirs_s_on_96_cores", "--", "theirs, s on 96 cores"),
        ):
            points = sorted((int(devices), seconds) for devices, seconds in runtime[key][name].items())
            right.plot(*zip(*points, strict=True), style, color=colour, label=f"{name}, {whose}", markersize=3)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    _dress(right, "Fig 12: time of a search", "GPUs", "seconds")
    return figure


def _tables(errors: Mapping[str, Any], placements: Mapping[str, Any]) -> Figure:
    figure, (left, right) = _figure(2, width=5.5)
    bars = {f"theirs: {name}": found for name, found in errors["theirs"].items()}
    bars |= {f"ours: {name}": found for name, found in errors.get("ours", {}).items()}
    for place, found in enumerate(bars.values()):
        left.barh(place + 0.2, found["mean"], 0.4, color=COLOURS[0], label="" if place else "mean")
        left.barh(place - 0.2, found["worst"], 0.4, color="#bbbbbb", label="" if place else "worst")
    left.set_yticks(range(len(bars)), list(bars), fontsize=7)
    _dress(left, "Table 2: error of attainment, real against simulated", "points", "")
    names = list(placements)
    right.bar(names, [100 * placements[name]["share_of_best"] for name in names], color=COLOURS[0])
    right.axhline(97, color=COLOURS[1], linestyle=":", label="within 3 %")
    right.set_ylim(80, 101)
    _dress(right, "Table 3: the paper's placement against our best", "", "% of our best")
    return figure
