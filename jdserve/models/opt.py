"""OPT (Zhang et al., arXiv:2205.01068), 125M to 175B: learned positions, LayerNorm, ReLU, a bias everywhere.

Layers norm what they read, except in the 350M model, where they norm the sum of what they read and write. That model
also has an embedding table narrower than its layers, with a projection on either side.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jdserve.core.spec import ModelSpec
from jdserve.models.decoder import check_range
from jdserve.models.interface import Attend
from jdserve.models.layers import Embedding, LayerNorm, Linear, add

FIRST_POSITION = 2
"""Rows of the position table before that of position 0; they were those of padding."""


class OptAttention(nnx.Module):
    """The projections around ``attend``."""

    def __init__(self, spec: ModelSpec, kv_heads: int, dtype: DTypeLike) -> None:
        self.head_dim = spec.head_dim
        queries, keys = spec.heads * spec.head_dim, kv_heads * spec.head_dim
        self.q_proj = Linear((queries, spec.hidden), ("heads", "embed"), dtype, bias=True)
        self.k_proj = Linear((keys, spec.hidden), ("kv_heads", "embed"), dtype, bias=True)
        self.v_proj = Linear((keys, spec.hidden), ("kv_heads", "embed"), dtype, bias=True)
        self.out_proj = Linear((spec.hidden, queries), ("embed", "heads"), dtype, bias=True)

    def __call__(self, x: jax.Array, attend: Attend, layer: int, kv: Any) -> tuple[jax.Array, Any]:
        """Attention of x [T, hidden] to itself and what ``kv`` holds, [T, hidden] float32."""
        rows = x.shape[0]
        q, k, v = (
            part(x).reshape(rows, -1, self.head_dim).astype(x.dtype) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        out, kv = attend(layer, q, k, v, kv)
        return self.out_proj(out.reshape(rows, -1)), kv


class OptBlock(nnx.Module):
    """One layer."""

    def __init__(self, spec: ModelSpec, kv_heads: int, dtype: DTypeLike) -> None:
        self.pre_norm = spec.pre_norm
        self.self_attn = OptAttention(spec, kv_heads, dtype)
        self.self_attn_layer_norm = LayerNorm(spec.hidden, spec.norm_eps, dtype)
        self.fc1 = Linear((spec.ffn, spec.hidden), ("mlp", "embed"), dtype, bias=True)
        self.fc2 = Linear((spec.hidden, spec.ffn), ("embed", "mlp"), dtype, bias=True)
        self.final_layer_norm = LayerNorm(spec.hidden, spec.norm_eps, dtype)

    def __call__(self, x: jax.Array, attend: Attend, layer: int, kv: Any) -> tuple[jax.Array, Any]:
        """Residual stream x [T, hidden] through this layer."""
        before, after = (lambda norm, x: norm(x)), (lambda _, x: x)
        if not self.pre_norm:
            before, after = after, before
        out, kv = self.self_attn(before(self.self_attn_layer_norm, x), attend, layer, kv)
        x = after(self.self_attn_layer_norm, add(x, out))
        inner = jax.nn.relu(self.fc1(before(self.final_layer_norm, x)))
        return after(self.final_layer_norm, add(x, self.fc2(inner.astype(x.dtype)))), kv


class OptDecoder(nnx.Module):
    """Everything under ``model.decoder.`` in a checkpoint, as far as the range of layers needs it."""

    def __init__(self, spec: ModelSpec, layers: range, kv_heads: int, dtype: DTypeLike) -> None:
        first, last = layers.start == 0, layers.stop == spec.layers
        if first or (last and spec.tied_embeddings):
            self.embed_tokens = Embedding(spec.vocab, spec.embed_width or spec.hidden, dtype)
        if first:
            rows = spec.context + FIRST_POSITION
            self.embed_positions = Embedding(rows, spec.hidden, dtype, ("positions", "embed"))
        if first and spec.embed_width:
            self.project_in = Linear((spec.hidden, spec.embed_width), ("embed", "word_embed"), dtype)
        self.layers = nnx.Dict({str(layer): OptBlock(spec, kv_heads, dtype) for layer in layers})
        if last and spec.pre_norm:
            self.final_layer_norm = LayerNorm(spec.hidden, spec.norm_eps, dtype)
        if last and spec.embed_width:
            self.project_out = Linear((spec.embed_width, spec.hidden), ("word_embed", "embed"), dtype)


class _Model(nnx.Module):
    """The name ``model`` in the path of a tensor."""

    def __init__(self, decoder: OptDecoder) -> None:
        self.decoder = decoder


class Opt(nnx.Module):
    """Layers ``layers`` of an OPT model; see :class:`~jdserve.models.interface.Model`."""

    def __init__(self, spec: ModelSpec, layers: range, *, kv_heads: int, dtype: DTypeLike) -> None:
        """As :class:`~jdserve.models.decoder.Decoder`."""
        check_range(spec, layers, kv_heads)
        self.spec = spec
        self.range = layers
        self.model = _Model(OptDecoder(spec, layers, kv_heads, dtype))
        if layers.stop == spec.layers and not spec.tied_embeddings:
            self.lm_head = Embedding(spec.vocab, spec.embed_width or spec.hidden, dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [T] int32 to [T, hidden]; the layers add the positions."""
        decoder = self.model.decoder
        x = decoder.embed_tokens(tokens)
        return decoder.project_in(x).astype(x.dtype) if self.spec.embed_width else x

    def layers(
        self, x: jax.Array, positions: jax.Array, attend: Attend, kv: Any, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Run the layers over x [T, hidden] at positions [T] int32; see :class:`~jdserve.models.interface.Model`."""
        decoder = self.model.decoder
        if self.range.start == 0:
            x = add(x, decoder.embed_positions(positions + FIRST_POSITION).astype(jnp.float32))
        for layer, index in enumerate(self.range):
            x, kv = decoder.layers[str(index)](x, attend, layer, kv)
        return x, kv

    def logits(self, x: jax.Array) -> jax.Array:
        """Rows x [N, hidden] of the last layer to logits [N, vocab] float32."""
        decoder = self.model.decoder
        if self.spec.pre_norm:
            x = decoder.final_layer_norm(x)
        if self.spec.embed_width:
            x = decoder.project_out(x).astype(x.dtype)
        head = decoder.embed_tokens if self.spec.tied_embeddings else self.lm_head
        return head.logits(x)
