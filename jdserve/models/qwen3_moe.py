"""Qwen3 with experts in every layer (arXiv:2505.09388)."""

from __future__ import annotations

from jax.typing import DTypeLike

from jdserve.core.spec import ModelSpec
from jdserve.models.decoder import Decoder
from jdserve.models.moe import SparseFeedForward
from jdserve.models.qwen3 import Qwen3Block


class Qwen3MoeBlock(Qwen3Block):
    """One layer."""

    def make_feed_forward(self, spec: ModelSpec, dtype: DTypeLike) -> SparseFeedForward:
        """A router and experts."""
        return SparseFeedForward(spec, dtype, ("gate_proj", "up_proj", "down_proj"))


class Qwen3Moe(Decoder):
    """Qwen3-MoE; see :class:`~jdserve.models.interface.Model`."""

    block = Qwen3MoeBlock
