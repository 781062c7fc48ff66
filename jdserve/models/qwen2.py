"""Qwen2 and Qwen2.5 (arXiv:2407.10671): LLaMA with a bias on queries, keys and values."""

from __future__ import annotations

from jax.typing import DTypeLike

from jdserve.core.spec import ModelSpec
from jdserve.models.decoder import Block, Decoder
from jdserve.models.layers import Attention


class Qwen2Block(Block):
    """One layer."""

    def make_attention(self, spec: ModelSpec, layer: int, kv_heads: int, dtype: DTypeLike) -> Attention:
        """With biases."""
        return Attention(spec, layer, kv_heads, dtype, bias=True)


class Qwen2(Decoder):
    """Qwen2; see :class:`~jdserve.models.interface.Model`."""

    block = Qwen2Block
