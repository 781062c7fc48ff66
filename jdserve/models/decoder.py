"""The frame that the rotary families share: an embedding, pre-norm layers, a norm and a head, over a range of layers.

Attributes are named as the tensors of a Hugging Face checkpoint, so that no renaming is ever needed. Layers are a plain
Python loop: under ``lax.scan`` XLA copies the KV pool each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jdserve.core.errors import InvalidPlan
from jdserve.core.spec import ModelSpec
from jdserve.models.interface import Attend
from jdserve.models.layers import Attention, Embedding, FeedForward, RMSNorm, add
from jdserve.models.rotary import Tables, rotary_tables

MakeBlock = Callable[[ModelSpec, int, int, DTypeLike], nnx.Module]
"""``block(spec, layer, stored KV heads, dtype)``, called as :meth:`Block.__call__`."""


class Block(nnx.Module):
    """One layer of LLaMA; families override the ``make`` functions."""

    def __init__(self, spec: ModelSpec, layer: int, kv_heads: int, dtype: DTypeLike) -> None:
        self.input_layernorm = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self.self_attn = self.make_attention(spec, layer, kv_heads, dtype)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self.mlp = self.make_feed_forward(spec, dtype)

    def make_attention(self, spec: ModelSpec, layer: int, kv_heads: int, dtype: DTypeLike) -> Attention:
        """The attention of this layer."""
        return Attention(spec, layer, kv_heads, dtype)

    def make_feed_forward(self, spec: ModelSpec, dtype: DTypeLike) -> Any:
        """The feed-forward of this layer."""
        return FeedForward(spec, dtype)

    def __call__(self, x: jax.Array, rotary: Tables, attend: Attend, layer: int, kv: Any) -> tuple[jax.Array, Any]:
        """Residual stream x [T, hidden] through this layer; sums are rounded to the dtype of x once each."""
        out, kv = self.self_attn(self.input_layernorm(x), rotary, attend, layer, kv)
        x = add(x, out)
        return add(x, self.mlp(self.post_attention_layernorm(x))), kv


class Trunk(nnx.Module):
    """Everything under ``model.`` in a checkpoint, as far as the range of layers needs it."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: range,
        kv_heads: int,
        dtype: DTypeLike,
        block: MakeBlock,
        norm: Callable[[int, float, DTypeLike], RMSNorm],
    ) -> None:
        last = layers.stop == spec.layers
        if layers.start == 0 or (last and spec.tied_embeddings):
            self.embed_tokens = Embedding(spec.vocab, spec.hidden, dtype)
        self.layers = nnx.Dict({str(layer): block(spec, layer, kv_heads, dtype) for layer in layers})
        if last:
            self.norm = norm(spec.hidden, spec.norm_eps, dtype)


class Decoder(nnx.Module):
    """Layers ``layers`` of a model; see :class:`~jdserve.models.interface.Model`.

    Attributes:
        block: makes a layer; what a family sets.
        norm: makes the norm after the last layer.
        spec: of the whole model.
        range: the layers in here.
    """

    block: MakeBlock = Block
    norm: Callable[[int, float, DTypeLike], RMSNorm] = RMSNorm

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
        check_range(spec, layers, kv_heads)
        self.spec = spec
        self.range = layers
        self.model = Trunk(spec, layers, kv_heads, dtype, type(self).block, type(self).norm)
        if layers.stop == spec.layers and not spec.tied_embeddings:
            self.lm_head = Embedding(spec.vocab, spec.hidden, dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [T] int32 to residual stream [T, hidden]."""
        return self.model.embed_tokens(tokens)

    def layers(
        self, x: jax.Array, positions: jax.Array, attend: Attend, kv: Any, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Run the layers over x [T, hidden] at positions [T] int32; see :class:`~jdserve.models.interface.Model`."""
        spec = self.spec
        if lengths is None:
            lengths = jnp.broadcast_to(positions.max() + 1, positions.shape)
        far = rotary_tables(positions, lengths, spec.head_dim, spec.rope_theta, spec.rope_scaling)
        near = far
        if spec.local_rope_theta is not None:
            near = rotary_tables(positions, lengths, spec.head_dim, spec.local_rope_theta)
        for layer, index in enumerate(self.range):
            rotary = far if spec.window_of(index) is None else near
            x, kv = self.model.layers[str(index)](x, rotary, attend, layer, kv)
        return x, kv

    def logits(self, x: jax.Array) -> jax.Array:
        """Rows x [N, hidden] of the last layer to logits [N, vocab] float32."""
        head = self.model.embed_tokens if self.spec.tied_embeddings else self.lm_head
        return head.logits(self.model.norm(x))


def check_range(spec: ModelSpec, layers: range, kv_heads: int) -> None:
    """Check what a model is built for against its spec.

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
