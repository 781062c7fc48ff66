"""Small helpers that draw SVG: line charts, a bar in parts, and the devices of a node.

Colours are CSS classes of the page, so that they follow its light and dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 24, 14, 44


class Line(NamedTuple):
    """A series.

    Attributes:
        label: in the legend of the page.
        css: classes that give its colour and dashes.
        points: (x, y), by x.
        band: (x, low, high) of the interval around it.
        dots: mark the points.
    """

    label: str
    css: str
    points: Seq[tuple[float, float]]
    band: Seq[tuple[float, float, float]] = ()
    dots: bool = False


class Mark(NamedTuple):
    """A straight line across the chart at a value, with a few words."""

    at: float
    text: str
    vertical: bool = True


class Axis(NamedTuple):
    """An axis from ``low`` to ``high``.

    Attributes:
        low, high: its ends.
        label: what it shows.
        text: of a tick.
        log: logarithmic; ``low`` is above 0 then.
    """

    low: float
    high: float
    label: str
    text: Callable[[float], str] = "{:g}".format
    log: bool = False

    def place(self, value: float) -> float:
        """0 at ``low``, 1 at ``high``; values outside stay at the ends."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """A handful of round values."""
        if self.log:
            values = [
                digit * 10.0**power
                for power in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
                for digit in ((1, 2, 5) if self.high / self.low < 200 else (1,))
            ]
            return [value for value in values if self.low <= value * (1 + 1e-9) and value <= self.high * (1 + 1e-9)]
        step = nice((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice(step: float) -> float:
    """The least of 1, 2, 2.5 and 5 times a power of ten that is at least ``step``."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= step * (1 - 1e-9))


def chart(title: str, x: Axis, y: Axis, lines: Iterable[Line], marks: Iterable[Mark] = ()) -> str:
    """A line chart; ``title`` is for those who cannot see it."""

    def across(value: float) -> float:
        return LEFT + x.place(value) * (WIDTH - LEFT - RIGHT)

    def down(value: float) -> float:
        return HEIGHT - BOTTOM - y.place(value) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in y.ticks():
        at = down(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y.text(tick)}</text>')
    for tick in x.ticks():
        at = across(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x.text(tick)}</text>'
        )
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>'
        f'<text class="axis" x="12" y="{TOP + (HEIGHT - TOP - BOTTOM) / 2:.0f}" text-anchor="middle"'
        f' transform="rotate(-90 12 {TOP + (HEIGHT - TOP - BOTTOM) / 2:.0f})">{escape(y.label)}</text>'
    )
    for line in lines:
        if line.band:
            upper = [f"{across(at):.1f},{down(high):.1f}" for at, _, high in line.band]
            lower = [f"{across(at):.1f},{down(low):.1f}" for at, low, _ in reversed(line.band)]
            parts.append(f'<polygon class="band {line.css}" points="{" ".join(upper + lower)}"/>')
        points = " ".join(f"{across(a):.1f},{down(b):.1f}" for a, b in line.points)
        parts.append(f'<polyline class="line {line.css}" points="{points}"/>')
        if line.dots:
            parts += [
                f'<circle class="dot {line.css}" cx="{across(a):.1f}" cy="{down(b):.1f}" r="3.2">'
                f"<title>{escape(line.label)}: {x.text(a)}, {y.text(b)}</title></circle>"
                for a, b in line.points
            ]
    parts += [_mark(mark, across, down) for mark in marks]
    return "".join([*parts, "</svg>"])


def _mark(mark: Mark, across: Callable[[float], float], down: Callable[[float], float]) -> str:
    text = escape(mark.text)
    if mark.vertical:
        at = across(mark.at)
        end = at > WIDTH - 110
        return (
            f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="note" x="{at - 5 if end else at + 5:.1f}" y="{HEIGHT - BOTTOM - 8}"'
            f' text-anchor="{"end" if end else "start"}">{text}</text>'
        )
    at = down(mark.at)
    return (
        f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="note" x="{LEFT + 5}" y="{at - 5:.1f}">{text}</text>'
    )


def parts_bar(title: str, parts: Seq[tuple[str, str, float]]) -> str:
    """One bar of (label, class, size) parts, side by side."""
    total = sum(size for _, _, size in parts) or 1.0
    drawn = [
        f'<svg class="strip" viewBox="0 0 1000 40" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
    ]
    at = 0.0
    for label, css, size in parts:
        wide = 1000 * size / total
        drawn.append(
            f'<rect class="{css}" x="{at:.2f}" y="0" width="{wide:.2f}" height="40">'
            f"<title>{escape(label)}</title></rect>"
        )
        at += wide
    return "".join([*drawn, "</svg>"])


class Chip(NamedTuple):
    """A device of a node: two lines of text, its colour, and what it tells on being pointed at."""

    top: str
    bottom: str
    css: str
    title: str


def node(name: str, chips: Seq[Chip]) -> str:
    """The devices of a node in rows of four, or as few as there are."""
    columns = min(len(chips), 4)
    rows = -(-len(chips) // columns)
    width, height = 8 + 76 * columns, 32 + 54 * rows
    drawn = [
        f'<svg class="node" style="max-width:{width * 1.15:.0f}px" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{escape(name)}">'
        f'<rect class="case" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="9"/>'
        f'<text class="host" x="12" y="20">{escape(name)}</text>'
    ]
    for number, chip in enumerate(chips):
        x, y = 8 + 76 * (number % columns), 29 + 54 * (number // columns)
        drawn.append(
            f"<g><title>{escape(chip.title)}</title>"
            f'<rect class="chip {chip.css}" x="{x}" y="{y}" width="68" height="46" rx="6"/>'
            f'<text class="chip-top" x="{x + 34}" y="{y + 20}" text-anchor="middle">{escape(chip.top)}</text>'
            f'<text class="chip-low" x="{x + 34}" y="{y + 36}" text-anchor="middle">{escape(chip.bottom)}</text></g>'
        )
    return "".join([*drawn, "</svg>"])
