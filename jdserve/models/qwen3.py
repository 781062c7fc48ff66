"""Qwen3 (arXiv:2505.09388): LLaMA with a norm over each head of queries and keys."""

from __future__ import annotations

from jax.typing import DTypeLike

from jdserve.core.spec import ModelSpec
from jdserve.models.decoder import Block, Decoder
from jdserve.models.layers import Attention, RMSNorm


class Qwen3Block(Block):
    """One layer."""

    def make_attention(self, spec: ModelSpec, layer: int, kv_heads: int, dtype: DTypeLike) -> Attention:
        """With norms of heads, each over ``head_dim``, before the rotation."""
        return Attention(
            spec,
            layer,
            kv_heads,
            dtype,
            qk_norm=lambda: RMSNorm(spec.head_dim, spec.norm_eps, dtype, axis="head_dim"),
        )


class Qwen3(Decoder):
    """Qwen3; see :class:`~jdserve.models.interface.Model`."""

    block = Qwen3Block
