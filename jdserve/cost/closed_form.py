"""The closed-form model of the worked example: a 70B model with grouped queries on H100s.

Prefill is an M/D/1 queue of requests of one length. A decode step is bound by memory traffic or by arithmetic,
whichever is longer, and ``pp`` micro-batches keep a pipeline full. Tensor parallelism speeds up by a power of its
degree, and each further stage costs 2 %.
"""

from __future__ import annotations

import math

import msgspec

from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import Role
from jdserve.core.steptime import StepTime
from jdserve.cost.latency import both, linearised
from jdserve.cost.queueing import largest_rate, mean_ttft
from jdserve.cost.stepcost import Coefficients, Linear, Phased, Roofline, StepCost


class ClosedForm(msgspec.Struct, frozen=True, kw_only=True):
    """Model, device and workload in one; the defaults are the example.

    Attributes:
        layers, heads: sizes that degrees must divide.
        parameters, weight_bytes, kv_bytes: of the model; KV per token.
        inputs, outputs: tokens of every request.
        prefill_s: seconds to prefill one request on one device.
        prefill_exponent, decode_exponent: tensor parallelism speeds up by tp to this power.
        stage_cost: share that each stage after the first adds.
        memory_bytes, bytes_per_s, flops: of one device, as far as they are reached.
    """

    layers: int = 80
    heads: int = 64
    parameters: float = 70e9
    weight_bytes: float = 140e9
    kv_bytes: float = 327_680
    inputs: int = 512
    outputs: int = 256
    prefill_s: float = 0.145
    prefill_exponent: float = 0.678
    decode_exponent: float = 0.9
    stage_cost: float = 0.02
    memory_bytes: float = 80e9
    bytes_per_s: float = 3.35e12
    flops: float = 989e12 * 0.5

    @property
    def name(self) -> str:
        """See :class:`~jdserve.cost.latency.LatencyModel`."""
        return "closed form of the 70B example"

    @property
    def context(self) -> int:
        """Context that every decode step is counted with."""
        return self.inputs + self.outputs

    def check(self, tp: int, pp: int) -> None:
        """Check that the degrees divide the model and that its weights fit.

        Raises:
            InvalidPlan: with the bound.
        """
        if self.layers % pp:
            raise InvalidPlan("$.pp", f"{pp} does not divide {self.layers} layers")
        if self.heads % tp:
            raise InvalidPlan("$.tp", f"{tp} does not divide {self.heads} heads")
        if self.weight_bytes / (pp * tp) >= self.memory_bytes:
            raise InvalidPlan(
                "$.tp",
                f"does not fit: needs {self.weight_bytes / (pp * tp) / 2**30:.2f} GiB per device for weights alone,"
                f" have {self.memory_bytes / 2**30:.2f}",
            )

    def _stages(self, pp: int) -> float:
        return 1 + self.stage_cost * (pp - 1)

    def execution(self, tp: int, pp: int) -> float:
        """D_s: seconds of one prefill through all stages."""
        return self.prefill_s / tp**self.prefill_exponent * self._stages(pp)

    def ttft(self, rate: float, tp: int, pp: int) -> float:
        """Mean TTFT in seconds at ``rate``."""
        d = self.execution(tp, pp)
        return mean_ttft(rate, d, d / pp)

    def prefill_goodput(self, tp: int, pp: int, ttft_s: float) -> float:
        """Highest rate of one prefill instance within a mean TTFT."""
        d = self.execution(tp, pp)
        return largest_rate(ttft_s, d, d / pp)

    def decode_step(self, batch: int, tp: int, pp: int) -> float:
        """Seconds of one pass of a micro-batch of ``batch`` sequences through all stages."""
        speed = tp**self.decode_exponent
        memory = (self.weight_bytes + batch * self.context * self.kv_bytes) / (self.bytes_per_s * speed)
        compute = 2 * self.parameters * batch / (self.flops * speed)
        return max(memory, compute) * self._stages(pp)

    def decode_batch(self, tp: int, pp: int, tpot_s: float) -> int:
        """Largest micro-batch whose step is within ``tpot_s`` and whose KV fits ``pp`` times."""
        room = pp * tp * self.memory_bytes - self.weight_bytes
        batch = math.floor(room / (pp * self.context * self.kv_bytes))
        low, high = 0, max(batch, 0)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.decode_step(middle, tp, pp) <= tpot_s else (low, middle - 1)
        return low

    def decode_goodput(self, tp: int, pp: int, tpot_s: float) -> float:
        """Highest rate of one decode instance within a TPOT: pp full micro-batches, each a token per step."""
        batch = self.decode_batch(tp, pp, tpot_s)
        return pp * batch / (self.outputs * self.decode_step(batch, tp, pp)) if batch else 0.0

    def cost(self, role: Role, tp: int, pp: int) -> StepCost:
        """See :class:`~jdserve.cost.latency.LatencyModel`; exact for requests of the example's length."""
        prefill = Linear(Coefficients.of(StepTime(0.0, self.execution(tp, pp) / self.inputs / pp)), pp)
        if role == "prefill":
            return prefill
        factor = self._stages(pp) / tp**self.decode_exponent / pp
        memory = StepTime(self.weight_bytes / self.bytes_per_s, per_context_token=self.kv_bytes / self.bytes_per_s)
        compute = StepTime(0.0, per_decode_seq=2 * self.parameters / self.flops)
        decode = Roofline(Coefficients.of(compute, factor), Coefficients.of(memory, factor), pp=pp)
        if role == "decode":
            return decode
        mixed = both(self.steptime("prefill", tp, pp), self.steptime("decode", tp, pp))
        return Phased(prefill, decode, Linear.of(mixed, pp))

    def steptime(self, role: Role, tp: int, pp: int) -> StepTime:
        """See :class:`~jdserve.cost.latency.LatencyModel`."""
        return linearised(self.cost(role, tp, pp), role).time
