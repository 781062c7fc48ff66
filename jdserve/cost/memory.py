"""What an instance keeps on each of its devices, and what is left for KV pages."""

from __future__ import annotations

import msgspec

from jdserve.core.pages import pages_for
from jdserve.core.spec import DTYPE_BYTES, DType, ModelSpec, WeightFormat, weight_bytes
from jdserve.cost.work import kv_bytes

GIB = 2**30

USABLE = 0.92
"""Share of the memory that may be planned with: driver, fragmentation and compiled programs take the rest."""


EXPERT_ROWS = 256
"""Tokens that the experts compute at a time, in float32."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the fullest device of an instance, in bytes.

    Attributes:
        usable: what may be planned with.
        weights: of the largest stage.
        activations: of the largest step, logits included.
        workspace: for kernels and transfers in flight.
        page_bytes: of one KV page.
        pages: KV pages that fit, the null page not counted.
        needed_pages: pages of the longest request.
    """

    usable: int
    weights: int
    activations: int
    workspace: int
    page_bytes: int
    pages: int
    needed_pages: int

    @property
    def needed(self) -> int:
        """Bytes that the smallest useful pool needs in all."""
        return self.weights + self.activations + self.workspace + (self.needed_pages + 1) * self.page_bytes

    @property
    def fits(self) -> bool:
        """The longest request fits."""
        return self.pages >= self.needed_pages

    @property
    def reason(self) -> str:
        """Why it does not fit; empty where it does."""
        if self.fits:
            return ""
        kv = (self.needed_pages + 1) * self.page_bytes
        return (
            f"does not fit: needs {self.needed / GIB:.2f} GiB per device ({self.weights / GIB:.2f} weights,"
            f" {kv / GIB:.2f} KV of one longest request,"
            f" {(self.activations + self.workspace) / GIB:.2f} activations and workspace), have {self.usable / GIB:.2f}"
        )


def memory(
    spec: ModelSpec,
    dtype: DType,
    tp: int,
    pp: int,
    *,
    device_bytes: int,
    page_size: int,
    max_model_len: int,
    step_tokens: int,
    batch: int,
    weights: WeightFormat | None = None,
    usable: float = USABLE,
) -> Memory:
    """Memory of an instance of ``tp`` x ``pp`` devices.

    Args:
        spec: the model.
        dtype: of weights, activations and KV.
        tp: tensor-parallel degree.
        pp: pipeline stages.
        device_bytes: capacity of one device.
        page_size: token positions per page.
        max_model_len: tokens of the longest request.
        step_tokens: most new tokens of one step.
        batch: most sequences that get logits in one step.
        weights: how matrices are stored; None for in ``dtype``.
        usable: share of the capacity that may be planned with.
    """
    width = DTYPE_BYTES[dtype]
    held = _stage_weights(spec, pp) * weight_bytes(dtype, weights) // tp
    row = 4 * spec.hidden + ((spec.heads + 2 * spec.kv_heads) * spec.head_dim + 2 * spec.ffn) // tp
    experts = min(step_tokens, EXPERT_ROWS) * spec.experts * (2 * spec.ffn + spec.hidden) * 4 // tp
    activations = step_tokens * row * width + batch * spec.vocab * 4 // tp + experts
    workspace = device_bytes // 64
    page = int(kv_bytes(spec, dtype, tp, pp) * page_size)
    room = int(device_bytes * usable)
    left = room - held - activations - workspace
    return Memory(
        usable=room,
        weights=held,
        activations=activations,
        workspace=workspace,
        page_bytes=page,
        pages=max(left // page - 1, 0),
        needed_pages=pages_for(max_model_len, page_size),
    )


def _stage_weights(spec: ModelSpec, pp: int) -> int:
    """Weights of the largest stage: the first one embeds tokens, the last one has the output projection."""
    table = spec.table_weights
    positions = spec.hidden * spec.context if spec.learned_positions else 0
    ends = table + positions if pp > 1 or spec.tied_embeddings else 2 * table + positions
    return spec.layers // pp * (spec.layer_weights + 2 * spec.hidden) + spec.hidden + ends
