"""What may be placed: instances by role and degrees, and units of instances that are replicated together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import Role
from jdserve.core.spec import ModelSpec

Family = Literal["high", "low", "mixed", "colocated"]

Mode = Literal["prefill_first", "chunked"]

MODES: tuple[tuple[Mode, int], ...] = (("prefill_first", 0), ("chunked", 256), ("chunked", 512), ("chunked", 2048))
"""How a colocated instance may batch: mode and token budget; 0 takes what saturates the devices."""


class Part(msgspec.Struct, frozen=True):
    """Instances that are alike.

    Attributes:
        role: what they do.
        tp, pp: their degrees.
        count: how many.
        mode, budget: of colocated ones.
    """

    role: Role
    tp: int
    pp: int
    count: int = 1
    mode: Mode = "prefill_first"
    budget: int = 0

    @property
    def devices(self) -> int:
        """Of all of them."""
        return self.tp * self.pp * self.count

    @property
    def label(self) -> str:
        """For people."""
        how = "" if self.role != "colocated" else f" {self.mode}{f' {self.budget}' if self.budget else ''}"
        return f"{self.count} x {self.role}{how} tp{self.tp} pp{self.pp}"


class Unit(msgspec.Struct, frozen=True):
    """Instances that share a node, or ``span`` nodes with the stages of each dealt evenly to them.

    Attributes:
        family: the search that it belongs to.
        parts: its instances.
        span: nodes that it takes.
    """

    family: Family
    parts: tuple[Part, ...]
    span: int = 1

    @property
    def devices(self) -> int:
        """Devices in all."""
        return sum(part.devices for part in self.parts)

    @property
    def label(self) -> str:
        """For people."""
        across = f" over {self.span} nodes" if self.span > 1 else ""
        return " + ".join(part.label for part in self.parts) + across


class Degrees(msgspec.Struct, frozen=True):
    """Degrees that a model allows, and why others do not.

    Attributes:
        pairs: (tp, pp), by size.
        skipped: (what, why) of the others.
    """

    pairs: tuple[tuple[int, int], ...]
    skipped: tuple[tuple[str, str], ...]


def degrees(spec: ModelSpec, per_node: int, most: int) -> Degrees:
    """Degrees of an instance of at most ``most`` devices, whose stages each lie on one node of ``per_node``."""
    skipped: list[tuple[str, str]] = []
    tps, pps = [], []
    for name, largest, found in (("tp", min(per_node, most), tps), ("pp", min(most, spec.layers), pps)):
        for degree in range(1, largest + 1):
            try:
                spec.check_parallel(degree if name == "tp" else 1, degree if name == "pp" else 1)
            except InvalidPlan as error:
                skipped.append((f"{name} {degree}", str(error).removeprefix(f"{error.path}: ")))
            else:
                found.append(degree)
    pairs = sorted((tp * pp, tp, pp) for tp in tps for pp in pps if tp * pp <= most)
    return Degrees(tuple((tp, pp) for _, tp, pp in pairs), tuple(skipped))


def low_units(
    prefill: list[tuple[int, int]], decode: list[tuple[int, int]], per_node: int, nodes: int, most: int
) -> Iterator[Unit]:
    """Units of Algorithm 2: one instance of each phase, cut into as many segments, a segment of both on each node."""
    for span in range(1, nodes + 1):
        for tp, pp in prefill:
            for tp2, pp2 in decode:
                if pp % span or pp2 % span or tp * pp + tp2 * pp2 > most:
                    continue
                if tp * pp // span + tp2 * pp2 // span <= per_node:
                    yield Unit("low", (Part("prefill", tp, pp), Part("decode", tp2, pp2)), span)


def mixed_units(prefill: list[tuple[int, int]], decode: list[tuple[int, int]], most: int) -> Iterator[Unit]:
    """Units inside one node with any numbers of prefill and decode instances, none of which is a multiple of another.

    1:1 units are those of Algorithm 2 and left out.
    """
    for tp, pp in prefill:
        for tp2, pp2 in decode:
            size, size2 = tp * pp, tp2 * pp2
            for count in range(1, (most - size2) // size + 1):
                for count2 in range(1, (most - count * size) // size2 + 1):
                    if math.gcd(count, count2) == 1 and count + count2 > 2:
                        yield Unit("mixed", (Part("prefill", tp, pp, count), Part("decode", tp2, pp2, count2)))


def colocated_units(pairs: list[tuple[int, int]]) -> Iterator[Unit]:
    """One colocated instance each, in every mode."""
    for tp, pp in pairs:
        for mode, budget in MODES:
            yield Unit("colocated", (Part("colocated", tp, pp, 1, mode, budget),))


def phase_counts(
    rates: tuple[float, float], devices: tuple[int, int], rate: float | None, most: int, whole: bool
) -> tuple[int, int]:
    """How many instances of each phase.

    Args:
        rates: goodput of one instance of each.
        devices: of one instance of each; one of each fits.
        rate: to carry; None for the mix of the highest goodput.
        most: devices in all.
        whole: the goodput of all devices together counts, not that per device.
    """
    if rate is not None:
        return math.ceil(rate / rates[0]), math.ceil(rate / rates[1])
    mixes = [
        (n, m) for n in range(1, most // devices[0] + 1) for m in range(1, (most - n * devices[0]) // devices[1] + 1)
    ]

    def value(mix: tuple[int, int]) -> float:
        used = mix[0] * devices[0] + mix[1] * devices[1]
        return min(mix[0] * rates[0], mix[1] * rates[1]) / (1 if whole else used)

    return max(mixes, key=value)
