"""Latency models: from a role and parallel degrees to the time of a step, behind one interface."""

from __future__ import annotations

from typing import Protocol

from jdserve.core.errors import JdserveError
from jdserve.core.plan import Role
from jdserve.core.steptime import StepFeatures, StepTime
from jdserve.cost.fit import Fit, fit_steps
from jdserve.cost.stepcost import FS, Coefficients, Linear, StepCost


class Unmeasured(JdserveError):
    """The model cannot say how long steps take with these degrees; the message says what it knows."""


class LatencyModel(Protocol):
    """How long steps take, for any role and degrees."""

    @property
    def name(self) -> str:
        """What the figures rest on, in a few words."""
        ...

    def cost(self, role: Role, tp: int, pp: int) -> StepCost:
        """Time of the steps of one instance.

        Raises:
            Unmeasured: nothing is known about these degrees.
        """
        ...

    def steptime(self, role: Role, tp: int, pp: int) -> StepTime:
        """The same as plan coefficients, which are for one whole pass through all stages; linearised where needed.

        Raises:
            Unmeasured: as :meth:`cost`.
        """
        ...


def both(prefill: StepTime, decode: StepTime) -> StepTime:
    """Coefficients of a mixed step: both parts, and one constant, the larger one."""
    return StepTime(
        max(prefill.base, decode.base),
        prefill.per_new_token,
        prefill.per_new_pair,
        prefill.per_prefix_pair,
        decode.per_decode_seq,
        decode.per_context_token,
    )


def linearised(cost: StepCost, role: Role, *, tokens: int = 4096, batch: int = 256, context: int = 2048) -> Fit:
    """Plan coefficients nearest to ``cost`` over a grid of steps, with their error.

    Args:
        cost: of the steps.
        role: decides which steps: prompts, decode batches, or both and mixtures.
        tokens: most new tokens of a step.
        batch: most decoding sequences.
        context: longest mean context.
    """
    prompts = [
        StepFeatures.of([(start, count)])
        for count in _powers(16, tokens)
        for start in (0, tokens // 2)
        if start + count <= tokens
    ]
    decodes = [
        StepFeatures(decode_seqs=seqs, decode_context=seqs * length)
        for seqs in _powers(1, batch)
        for length in _powers(64, context)
    ]
    steps: list[StepFeatures] = []
    if role != "decode":
        steps += prompts
    if role != "prefill":
        steps += decodes
    if role == "colocated":
        steps += [
            StepFeatures(a.new_tokens, a.new_pairs, a.prefix_pairs, b.decode_seqs, b.decode_context)
            for a in prompts[::3]
            for b in decodes[::5]
        ]
    return fit_steps(steps, [sum(cost.stages(f)) / FS for f in steps])


def _powers(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first... up to and with ``last``."""
    values = [first]
    while values[-1] * 2 < last:
        values.append(values[-1] * 2)
    return [*values, last] if last > values[-1] else values


def linear_cost(time: StepTime, pp: int, hand_off_s: float = 0.0) -> Linear:
    """A cost from coefficients of a whole pass, evenly over ``pp`` stages, and ``hand_off_s`` in each of several."""
    stage = Coefficients.of(time, 1 / pp)
    if pp > 1:
        stage = stage.plus(Coefficients.of(StepTime(base=hand_off_s)))
    return Linear(stage, pp)
