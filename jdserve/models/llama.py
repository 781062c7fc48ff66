"""The LLaMA architecture (LLaMA 2 and 3, Mistral, SmolLM2) over any range of layers.

Pre-norm transformer with RMSNorm, rotary positions (half-split convention of Hugging Face), grouped-query attention
and a SwiGLU feed-forward (Touvron et al., arXiv:2302.13971 and 2307.09288). Attributes are named as the tensors of a
Hugging Face checkpoint, and weights keep its ``[out, in]`` layout, so that no renaming or transposing is ever needed.

Layers are a plain Python loop: under ``lax.scan`` XLA copies the KV pool each step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jdserve.core.errors import InvalidPlan
from jdserve.core.spec import ModelSpec
from jdserve.models.interface import Attend


class Weight(nnx.Module):
    """One parameter with a logical name for each axis.

    Attributes:
        weight: the array; its metadata ``out_sharding`` holds the logical axis names.
    """

    def __init__(self, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike) -> None:
        # Logical names are mapped to a mesh by the loader, not by NNX: hence no eager sharding.
        self.weight = nnx.Param(jnp.zeros(shape, dtype), out_sharding=axes, eager_sharding=False)

    def linear(self, x: jax.Array) -> jax.Array:
        """X [N, in] times the transposed weight [out, in], accumulated and returned in float32 [N, out]."""
        weight = self.weight[...]
        # Accelerators would round float32 operands to fewer bits by default.
        precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
        return jax.lax.dot_general(
            x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    def norm(self, x: jax.Array, eps: float) -> jax.Array:
        """RMSNorm over the last axis of x [N, hidden], computed in float32, in the dtype of x."""
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
        return (wide * scale * self.weight[...].astype(jnp.float32)[None, :]).astype(x.dtype)


class Attention(nnx.Module):
    """Projections around ``attend``."""

    def __init__(self, spec: ModelSpec, kv_heads: int, dtype: DTypeLike) -> None:
        self.head_dim = spec.head_dim
        queries, keys = spec.heads * spec.head_dim, kv_heads * spec.head_dim
        self.q_proj = Weight((queries, spec.hidden), ("heads", "embed"), dtype)
        self.k_proj = Weight((keys, spec.hidden), ("kv_heads", "embed"), dtype)
        self.v_proj = Weight((keys, spec.hidden), ("kv_heads", "embed"), dtype)
        self.o_proj = Weight((spec.hidden, queries), ("embed", "heads"), dtype)

    def __call__(
        self, x: jax.Array, rotary: tuple[jax.Array, jax.Array], attend: Attend, layer: int, kv: Any
    ) -> tuple[jax.Array, Any]:
        """Attention of x [T, hidden] to itself and what ``kv`` holds, [T, hidden] float32."""
        rows = x.shape[0]

        def heads(projection: Weight) -> jax.Array:
            return projection.linear(x).reshape(rows, -1, self.head_dim)

        q = rotate(heads(self.q_proj), *rotary).astype(x.dtype)
        k = rotate(heads(self.k_proj), *rotary).astype(x.dtype)
        v = heads(self.v_proj).astype(x.dtype)
        out, kv = attend(layer, q, k, v, kv)
        return self.o_proj.linear(out.reshape(rows, -1)), kv


class FeedForward(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, dtype: DTypeLike) -> None:
        self.gate_proj = Weight((spec.ffn, spec.hidden), ("mlp", "embed"), dtype)
        self.up_proj = Weight((spec.ffn, spec.hidden), ("mlp", "embed"), dtype)
        self.down_proj = Weight((spec.hidden, spec.ffn), ("embed", "mlp"), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [T, hidden] to [T, hidden] float32."""
        inner = jax.nn.silu(self.gate_proj.linear(x)) * self.up_proj.linear(x)
        return self.down_proj.linear(inner.astype(x.dtype))


class Block(nnx.Module):
    """One layer."""

    def __init__(self, spec: ModelSpec, kv_heads: int, dtype: DTypeLike) -> None:
        self.eps = spec.norm_eps
        self.input_layernorm = Weight((spec.hidden,), ("embed",), dtype)
        self.self_attn = Attention(spec, kv_heads, dtype)
        self.post_attention_layernorm = Weight((spec.hidden,), ("embed",), dtype)
        self.mlp = FeedForward(spec, dtype)

    def __call__(
        self, x: jax.Array, rotary: tuple[jax.Array, jax.Array], attend: Attend, layer: int, kv: Any
    ) -> tuple[jax.Array, Any]:
        """Residual stream x [T, hidden] through this layer; sums are rounded to the dtype of x once each."""
        out, kv = self.self_attn(self.input_layernorm.norm(x, self.eps), rotary, attend, layer, kv)
        x = (x.astype(jnp.float32) + out).astype(x.dtype)
        out = self.mlp(self.post_attention_layernorm.norm(x, self.eps))
        return (x.astype(jnp.float32) + out).astype(x.dtype), kv


class Trunk(nnx.Module):
    """Everything under ``model.`` in a checkpoint, as far as the range of layers needs it."""

    def __init__(self, spec: ModelSpec, layers: range, kv_heads: int, dtype: DTypeLike) -> None:
        last = layers.stop == spec.layers
        if layers.start == 0 or (last and spec.tied_embeddings):
            self.embed_tokens = Weight((spec.vocab, spec.hidden), ("vocab", "embed"), dtype)
        self.layers = nnx.Dict({str(layer): Block(spec, kv_heads, dtype) for layer in layers})
        if last:
            self.norm = Weight((spec.hidden,), ("embed",), dtype)


class Llama(nnx.Module):
    """Layers ``layers`` of a LLaMA model; see :class:`~jdserve.models.interface.Model`.

    Attributes:
        spec: of the whole model.
        range: the layers in here.
    """

    def __init__(self, spec: ModelSpec, layers: range, *, kv_heads: int, dtype: DTypeLike) -> None:
        """Build with zero weights; under :func:`flax.nnx.eval_shape` with none at all.

        Args:
            spec: of the whole model.
            layers: consecutive layers. The embedding comes with the first layer, norm and head with the last.
            kv_heads: KV heads as stored: those of the spec, each repeated kv_heads / spec.kv_heads times in a row.
            dtype: of the weights and the residual stream.

        Raises:
            InvalidPlan: ``layers`` or ``kv_heads`` does not fit the spec.
        """
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= spec.layers:
            raise InvalidPlan("$.layers", f"{layers} is no range of consecutive layers within {spec.layers}")
        if kv_heads < 1 or kv_heads % spec.kv_heads or spec.heads % kv_heads:
            raise InvalidPlan(
                "$.kv_heads",
                f"{kv_heads} stored KV heads do not lie between {spec.kv_heads} KV and {spec.heads} query heads,"
                " dividing and divided",
            )
        self.spec = spec
        self.range = layers
        self.model = Trunk(spec, layers, kv_heads, dtype)
        if layers.stop == spec.layers and not spec.tied_embeddings:
            self.lm_head = Weight((spec.vocab, spec.hidden), ("vocab", "embed"), dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [T] int32 to residual stream [T, hidden]."""
        return self.model.embed_tokens.weight[tokens]

    def layers(self, x: jax.Array, positions: jax.Array, attend: Attend, kv: Any) -> tuple[jax.Array, Any]:
        """Run the layers over x [T, hidden] at positions [T] int32; ``kv`` goes from one ``attend`` to the next."""
        rotary = rotary_tables(positions, self.spec.head_dim, self.spec.rope_theta)
        for layer, index in enumerate(self.range):
            x, kv = self.model.layers[str(index)](x, rotary, attend, layer, kv)
        return x, kv

    def logits(self, x: jax.Array) -> jax.Array:
        """Rows x [N, hidden] of the last layer to logits [N, vocab] float32."""
        head = self.model.embed_tokens if self.spec.tied_embeddings else self.lm_head
        return head.linear(self.model.norm.norm(x, self.spec.norm_eps))


def rotary_tables(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of position * theta ** (-2 i / head_dim) (Su et al., arXiv:2104.09864), [T, head_dim / 2].

    Float32 throughout; the frequencies are rounded to it once, from float64.
    """
    frequencies = np.float64(theta) ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [T, heads, head_dim]: the pairs are element i of the first half and element i of the second."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
