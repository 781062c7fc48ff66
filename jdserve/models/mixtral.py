"""Mixtral (arXiv:2401.04088): Mistral with experts in every layer."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from jdserve.core.spec import ModelSpec
from jdserve.models.decoder import Decoder
from jdserve.models.interface import Attend
from jdserve.models.layers import Attention, RMSNorm, add
from jdserve.models.moe import SparseFeedForward
from jdserve.models.rotary import Tables


class MixtralBlock(nnx.Module):
    """One layer; its feed-forward has a name of its own in checkpoints."""

    def __init__(self, spec: ModelSpec, layer: int, kv_heads: int, dtype: DTypeLike) -> None:
        self.input_layernorm = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self.self_attn = Attention(spec, layer, kv_heads, dtype)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self.block_sparse_moe = SparseFeedForward(spec, dtype, ("w1", "w3", "w2"))

    def __call__(self, x: jax.Array, rotary: Tables, attend: Attend, layer: int, kv: Any) -> tuple[jax.Array, Any]:
        """Residual stream x [T, hidden] through this layer."""
        out, kv = self.self_attn(self.input_layernorm(x), rotary, attend, layer, kv)
        x = add(x, out)
        return add(x, self.block_sparse_moe(self.post_attention_layernorm(x))), kv


class Mixtral(Decoder):
    """Mixtral; see :class:`~jdserve.models.interface.Model`."""

    block = MixtralBlock
