"""The roofline: in each stage the longer of arithmetic and memory traffic, then all-reduces, hand-off and launch."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from jdserve.core.plan import Role
from jdserve.core.spec import DType, ModelSpec, WeightFormat
from jdserve.core.steptime import StepTime
from jdserve.cost.hardware import Hardware
from jdserve.cost.latency import linearised
from jdserve.cost.stepcost import Coefficients, Roofline
from jdserve.cost.work import all_reduce_bytes, flops, hand_off_bytes, traffic

Share = Annotated[float, Meta(gt=0, le=1)]


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What real programs reach of the peaks.

    The defaults are near the medians of published runs of 70B models on A100 and H100: prefill at 45 to 55 % of peak
    arithmetic, decode at 60 to 80 % of peak bandwidth.

    Attributes:
        compute, memory, link: share of the peak.
        step_s: seconds per step and stage that nothing hides: launch, sampling, the way back to the host.
    """

    compute: Share = 0.5
    memory: Share = 0.7
    link: Share = 0.8
    step_s: Annotated[float, Meta(ge=0)] = 5e-4


class RooflineModel(msgspec.Struct, frozen=True, kw_only=True):
    """Step times from the work of a model and the peaks of a device.

    Attributes:
        spec, dtype: the model.
        device: peaks and links.
        per_node: devices of a node; the stages of a larger instance hand off across nodes.
        efficiency: see there.
        weights: how matrices are stored; None for in ``dtype``. Products are computed in ``dtype`` all the same.
    """

    spec: ModelSpec
    dtype: DType
    device: Hardware
    per_node: int = 8
    efficiency: Efficiency = Efficiency()
    weights: WeightFormat | None = None

    @property
    def name(self) -> str:
        """See :class:`~jdserve.cost.latency.LatencyModel`."""
        e = self.efficiency
        return f"roofline of {self.device.name} at {e.compute:.0%} compute, {e.memory:.0%} memory, {e.link:.0%} link"

    def cost(self, role: Role, tp: int, pp: int) -> Roofline:
        """See :class:`~jdserve.cost.latency.LatencyModel`; the same for all roles."""
        spec, dtype, device, e = self.spec, self.dtype, self.device, self.efficiency
        compute = flops(spec, tp, pp).time(device.flops(dtype) * e.compute)
        memory = traffic(spec, dtype, tp, pp, self.weights).time(device.bytes_per_s * e.memory)
        other = Coefficients.of(StepTime(e.step_s))
        if tp > 1:
            # halving and doubling: log2(tp) hops to reduce and as many to gather, in two all-reduces per layer
            hops = 4 * math.ceil(math.log2(tp)) * spec.layers / pp
            reduces = all_reduce_bytes(spec, dtype, tp, pp).time(device.inside.bytes_per_s * e.link)
            other = other.plus(Coefficients.of(reduces)).plus(Coefficients.of(StepTime(hops * device.inside.latency_s)))
        if pp > 1:
            link = device.inside if tp * pp <= self.per_node else device.across
            share = 1 if tp * pp <= self.per_node else device.nic_share
            moved = hand_off_bytes(spec, dtype, tp, pp).time(link.bytes_per_s * e.link / min(share, tp))
            other = other.plus(Coefficients.of(moved)).plus(Coefficients.of(StepTime(link.latency_s * (pp - 1) / pp)))
        return Roofline(Coefficients.of(compute), Coefficients.of(memory), other, pp)

    def steptime(self, role: Role, tp: int, pp: int) -> StepTime:
        """See :class:`~jdserve.cost.latency.LatencyModel`; :func:`~jdserve.cost.latency.linearised` tells the error."""
        return linearised(self.cost(role, tp, pp), role).time
