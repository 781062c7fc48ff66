"""The latency model of DistServe's simulator (OSDI'24, appendix A), with its five constants C1 to C5."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec

from jdserve.core.plan import Role
from jdserve.core.spec import ModelSpec
from jdserve.core.steptime import StepFeatures, StepTime
from jdserve.cost.fit import nonnegative_least_squares
from jdserve.cost.latency import both
from jdserve.cost.stepcost import Linear


class PaperModel(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill T = C1 (4 t h^2 + 2 t h m) + C2 3 h t2 / b + C3; decode T = C4 (4 h^2 + 2 h m) + C5 3 h t.

    t is the sum of the lengths, t2 the sum of their squares, h the hidden and m the FFN width, b the block of the
    attention kernel. Tensor parallelism divides the width of each matrix, so it divides each term once; pipeline stages
    share the time evenly.

    Attributes:
        spec: h and m.
        c1, c2, c3, c4, c5: seconds per unit of each term.
        block: b, 16 or 32.
    """

    spec: ModelSpec
    c1: float
    c2: float
    c3: float
    c4: float
    c5: float
    block: int = 32

    @property
    def name(self) -> str:
        """See :class:`~jdserve.cost.latency.LatencyModel`."""
        return "DistServe, appendix A"

    @classmethod
    def fit(
        cls,
        spec: ModelSpec,
        prefill: Seq[tuple[StepFeatures, float]],
        decode: Seq[tuple[StepFeatures, float]],
        block: int = 32,
    ) -> PaperModel:
        """The constants that explain measured (features, seconds) on one device best, in relative error."""
        h = spec.hidden
        gemm = 4 * h * h + 2 * h * spec.ffn
        c1, c2, c3 = nonnegative_least_squares(
            [[gemm * f.new_tokens / s, 3 * h * f.new_pairs / block / s, 1 / s] for f, s in prefill],
            [1.0] * len(prefill),
        )
        c4, c5 = nonnegative_least_squares(
            [[gemm / s, 3 * h * f.decode_context / s] for f, s in decode], [1.0] * len(decode)
        )
        return cls(spec=spec, c1=c1, c2=c2, c3=c3, c4=c4, c5=c5, block=block)

    def steptime(self, role: Role, tp: int, pp: int) -> StepTime:
        """See :class:`~jdserve.cost.latency.LatencyModel`."""
        h = self.spec.hidden
        gemm = (4 * h * h + 2 * h * self.spec.ffn) / tp
        pair = self.c2 * 3 * h / self.block / tp
        prefill = StepTime(self.c3, self.c1 * gemm, pair, 2 * pair)
        decode = StepTime(self.c4 * gemm, per_context_token=self.c5 * 3 * h / tp)
        return {"prefill": prefill, "decode": decode, "colocated": both(prefill, decode)}[role]

    def cost(self, role: Role, tp: int, pp: int) -> Linear:
        """See :class:`~jdserve.cost.latency.LatencyModel`."""
        return Linear.of(self.steptime(role, tp, pp), pp)
