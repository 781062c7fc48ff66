"""The text model of Gemma 3 (arXiv:2503.19786).

Four norms per layer, of weight 1 + w; a norm over each head of queries and keys; embeddings scaled by the root of the
width; a GELU gate; and five layers with a window and rotary positions of their own for each one without.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jdserve.core.spec import ModelSpec
from jdserve.models.decoder import Decoder
from jdserve.models.interface import Attend
from jdserve.models.layers import Attention, FeedForward, RMSNorm, add
from jdserve.models.rotary import Tables

Norm = partial(RMSNorm, offset=1.0)


def gelu(x: jax.Array) -> jax.Array:
    """GELU by its tanh approximation, with which the model was trained."""
    return jax.nn.gelu(x, approximate=True)


class Gemma3Block(nnx.Module):
    """One layer: what attention and feed-forward give is normed too, before it is added."""

    def __init__(self, spec: ModelSpec, layer: int, kv_heads: int, dtype: DTypeLike) -> None:
        def norm() -> RMSNorm:
            return Norm(spec.hidden, spec.norm_eps, dtype)

        def head_norm() -> RMSNorm:
            return Norm(spec.head_dim, spec.norm_eps, dtype, axis="head_dim")

        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.self_attn = Attention(spec, layer, kv_heads, dtype, qk_norm=head_norm)
        self.mlp = FeedForward(spec, dtype, gelu)

    def __call__(self, x: jax.Array, rotary: Tables, attend: Attend, layer: int, kv: Any) -> tuple[jax.Array, Any]:
        """Residual stream x [T, hidden] through this layer."""
        out, kv = self.self_attn(self.input_layernorm(x), rotary, attend, layer, kv)
        x = add(x, self.post_attention_layernorm(out))
        out = self.mlp(self.pre_feedforward_layernorm(x))
        return add(x, self.post_feedforward_layernorm(out)), kv


class Gemma3(Decoder):
    """Gemma 3; see :class:`~jdserve.models.interface.Model`."""

    block = Gemma3Block
    norm = Norm

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [T] int32 to residual stream [T, hidden], scaled."""
        x = super().embed(tokens)
        # Rounded to the dtype of the weights, as it was in training: 55.5 in bfloat16 for 55.4256.
        return x * jnp.asarray(self.spec.hidden**0.5, x.dtype)
