"""Algorithms 1 and 2 on the closed-form model of the worked example: nothing is simulated.

For a first idea, for teaching, and as a check: every figure of the example follows from these lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

from jdserve.core.errors import InvalidPlan, InvalidWorkload
from jdserve.core.request import SLO
from jdserve.cost.closed_form import ClosedForm


class PhasePlan(msgspec.Struct, frozen=True):
    """Instances of one phase: degrees, goodput of one of them, and how many."""

    tp: int
    pp: int
    goodput: float
    count: int

    @property
    def devices(self) -> int:
        """Of all of them."""
        return self.tp * self.pp * self.count

    @property
    def per_device(self) -> float:
        """Goodput per device."""
        return self.goodput / (self.tp * self.pp)


class ClosedPlan(msgspec.Struct, frozen=True):
    """What carries a rate in closed form.

    Attributes:
        prefill, decode: instances of each phase.
        goodput: of a pair of them, where they are placed in pairs; infinite otherwise.
    """

    prefill: PhasePlan
    decode: PhasePlan
    goodput: float = math.inf

    @property
    def devices(self) -> int:
        """In all."""
        return self.prefill.devices + self.decode.devices


def algorithm_1(model: ClosedForm, slo: SLO, rate: float, nodes: int, per_node: int) -> ClosedPlan:
    """High affinity: the best degrees of each phase apart, an instance over at most ``nodes`` nodes.

    Raises:
        InvalidPlan: the model fits on no instance, or no degrees meet the SLO, with the nearest ones.
        InvalidWorkload: ``rate`` is not a finite number of at least 0.
    """
    _check(rate)
    pairs = [(tp, pp) for tp in range(1, per_node + 1) for pp in range(1, nodes * per_node // tp + 1)]
    valid = _valid(model, pairs)
    tp, pp = _best(valid, lambda tp, pp: model.prefill_goodput(tp, pp, slo.ttft_s) / (tp * pp))
    goodput = model.prefill_goodput(tp, pp, slo.ttft_s)
    if not goodput:
        near = min(valid, key=lambda pair: model.execution(*pair))
        raise InvalidPlan("$.slo.ttft_s", _missed("prefill", near, model.execution(*near), slo.ttft_s))
    tp2, pp2 = _best(valid, lambda tp, pp: model.decode_goodput(tp, pp, slo.tpot_s) / (tp * pp))
    goodput2 = model.decode_goodput(tp2, pp2, slo.tpot_s)
    if not goodput2:
        near = min(valid, key=lambda pair: model.decode_step(1, *pair))
        raise InvalidPlan("$.slo.tpot_s", _missed("decode step", near, model.decode_step(1, *near), slo.tpot_s))
    return ClosedPlan(
        PhasePlan(tp, pp, goodput, _count(rate, goodput)), PhasePlan(tp2, pp2, goodput2, _count(rate, goodput2))
    )


def algorithm_2(model: ClosedForm, slo: SLO, rate: float, nodes: int, per_node: int) -> ClosedPlan:
    """Low affinity: pairs of one prefill and one decode instance, a segment of both on each of up to ``nodes`` nodes.

    Raises:
        InvalidPlan: no pair of segments fits on a node, or none meets the SLO.
        InvalidWorkload: ``rate`` is not a finite number of at least 0.
    """
    _check(rate)
    if per_node < 2:
        raise InvalidPlan("$.devices_per_node", f"a pair needs 2 devices on each node, there is {per_node}")
    best: tuple[float, float, tuple[int, int, int]] | None = None
    for pp in range(1, nodes + 1):
        valid = _valid(model, [(tp, pp) for tp in range(1, per_node)], strict=False)
        for tp, _ in valid:
            for tp2, _ in valid:
                if tp + tp2 > per_node:
                    continue
                prefill = model.prefill_goodput(tp, pp, slo.ttft_s)
                goodput = min(prefill, model.decode_goodput(tp2, pp, slo.tpot_s))
                per_device = goodput / (pp * (tp + tp2))
                if goodput and (best is None or per_device > best[0]):
                    best = per_device, goodput, (tp, tp2, pp)
    if best is None:
        _valid(model, [(tp, pp) for tp in range(1, per_node) for pp in range(1, nodes + 1)])
        raise InvalidPlan("$.slo", f"no pair meets {slo.ttft_s} s TTFT and {slo.tpot_s} s TPOT at any rate")
    _, goodput, (tp, tp2, pp) = best
    count = _count(rate, goodput)
    return ClosedPlan(
        PhasePlan(tp, pp, model.prefill_goodput(tp, pp, slo.ttft_s), count),
        PhasePlan(tp2, pp, model.decode_goodput(tp2, pp, slo.tpot_s), count),
        goodput,
    )


def _valid(model: ClosedForm, pairs: list[tuple[int, int]], strict: bool = True) -> list[tuple[int, int]]:
    def able(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for pair in pairs:
            try:
                model.check(*pair)
            except InvalidPlan as error:
                reasons.append((pair[0] * pair[1], error))
            else:
                yield pair

    reasons: list[tuple[int, InvalidPlan]] = []
    valid = list(able(pairs))
    if strict and not valid:
        fits = [reason for reason in reasons if "fit" in str(reason[1])]
        raise max(fits or reasons, key=lambda reason: reason[0])[1]
    return valid


def _best(pairs: list[tuple[int, int]], value: Callable[[int, int], float]) -> tuple[int, int]:
    return max(pairs, key=lambda pair: (value(*pair), -pair[0] * pair[1]))


def _count(rate: float, goodput: float) -> int:
    return max(math.ceil(rate / goodput), 1)


def _missed(what: str, pair: tuple[int, int], seconds: float, slo: float) -> str:
    return f"no degrees meet {slo} s: one {what} takes {seconds:.4g} s at best, with tp {pair[0]} and pp {pair[1]}"


def _check(rate: float) -> None:
    if not (math.isfinite(rate) and rate >= 0):
        raise InvalidWorkload(f"rate: must be a finite number of at least 0, got {rate}")
