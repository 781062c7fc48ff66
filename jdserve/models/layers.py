"""What the families are built of: projections, norms, embedding, attention, feed-forward.

Weights keep the ``[out, in]`` layout of a Hugging Face checkpoint, so that nothing is ever transposed. Every parameter
carries a logical name for each axis, which the loader maps to a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jdserve.core.spec import ModelSpec
from jdserve.models.interface import SCALE, Attend
from jdserve.models.rotary import Tables, rotate


def parameter(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    dtype: DTypeLike,
    *,
    parts: tuple[str, ...] = (),
    channels: bool = False,
) -> nnx.Param[jax.Array]:
    """A zero array with a logical name for each axis.

    Args:
        shape: of the array.
        axes: their logical names.
        dtype: of the array.
        parts: names, from the module that holds it, of checkpoint tensors that are stacked on a new first axis; empty
            where the parameter is one tensor of its own name.
        channels: whether its module can also compute with integers [..., out, in] in its place and a parameter of
            float32 scales [..., out] beside it, whose name ends in :data:`SCALE`.
    """
    # Logical names are mapped to a mesh by the loader, not by NNX: hence no eager sharding.
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=axes, eager_sharding=False, parts=parts, channels=channels)


def store_int8(model: nnx.Module) -> None:
    """Have a model that was just built store its matrices as integers, where its modules can compute with them.

    Vectors stay as they are, and so does what modules of other origin hold.
    """
    for _, module in list(nnx.iter_modules(model)):
        for name, weight in list(vars(module).items()):
            if isinstance(weight, nnx.Param) and weight.get_metadata().get("channels"):
                shape, metadata = weight.get_value().shape, weight.get_metadata()
                axes = metadata["out_sharding"]
                setattr(module, name, parameter(shape, axes, jnp.int8, parts=metadata["parts"]))
                setattr(module, name + SCALE, parameter(shape[:-1], axes[:-1], jnp.float32))


def wide_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """X [N, in] times the transposed weight [out, in], accumulated and returned in float32 [N, out].

    Integers are exact in the dtype of x. They are widened inside the product, so that accelerators read 8 bits of each.
    """
    # Accelerators would round float32 operands to fewer bits by default.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, weight.astype(x.dtype), (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


class Linear(nnx.Module):
    """A projection, with a bias if asked for.

    Attributes:
        weight: [out, in].
        weight_scale: [out] float32; only there where ``weight`` holds integers.
        bias: [out]; only there with ``bias``.

    ``channels`` is that of :func:`parameter`.
    """

    weight_scale: nnx.Param[jax.Array]

    def __init__(
        self,
        shape: tuple[int, int],
        axes: tuple[str, str],
        dtype: DTypeLike,
        *,
        bias: bool = False,
        channels: bool = True,
    ) -> None:
        self.weight = parameter(shape, axes, dtype, channels=channels)
        if bias:
            self.bias = parameter(shape[:1], axes[:1], dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [N, in] to [N, out] float32."""
        out = wide_dot(x, self.weight[...])
        if hasattr(self, "weight_scale"):
            out = out * self.weight_scale[...][None, :]
        # Added to the sum over all devices, also where the contraction is split among them.
        return out + self.bias[...].astype(jnp.float32)[None, :] if hasattr(self, "bias") else out


class Embedding(nnx.Module):
    """A table of rows, [rows, width]: token embeddings, positions, and the output projection.

    Attributes:
        weight: [rows, width].
        weight_scale: [rows] float32; only there where ``weight`` holds integers.
    """

    weight_scale: nnx.Param[jax.Array]

    def __init__(self, rows: int, width: int, dtype: DTypeLike, axes: tuple[str, str] = ("vocab", "embed")) -> None:
        self.dtype = dtype
        self.weight = parameter((rows, width), axes, dtype, channels=True)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Rows [T, width] of ids [T] int32."""
        rows = self.weight[ids]
        if hasattr(self, "weight_scale"):
            rows = (rows.astype(jnp.float32) * self.weight_scale[ids][:, None]).astype(self.dtype)
        return rows

    def logits(self, x: jax.Array) -> jax.Array:
        """X [N, width] times the transposed table, [N, rows] float32."""
        out = wide_dot(x, self.weight[...])
        return out * self.weight_scale[...][None, :] if hasattr(self, "weight_scale") else out


class RMSNorm(nnx.Module):
    """x / rms(x) * (offset + weight) over the last axis (Zhang and Sennrich, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike, *, axis: str = "embed", offset: float = 0.0) -> None:
        self.eps, self.offset = eps, offset
        self.weight = parameter((size,), (axis,), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [..., size], computed in float32, in the dtype of x."""
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(jnp.float32) + self.offset
        return (wide * scale * weight.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / std(x) * weight + bias over the last axis (Ba et al., arXiv:1607.06450)."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike) -> None:
        self.eps = eps
        self.weight = parameter((size,), ("embed",), dtype)
        self.bias = parameter((size,), ("embed",), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [N, size], computed in float32, in the dtype of x."""
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        weight, bias = (leaf[...].astype(jnp.float32)[None, :] for leaf in (self.weight, self.bias))
        return (centred * scale * weight + bias).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions: the projections around ``attend``.

    Args:
        spec: of the model.
        layer: which one, counted in the whole model.
        kv_heads: stored KV heads.
        dtype: of the weights.
        bias: whether queries, keys and values have one.
        qk_norm: makes the norm over each head of queries and keys; None for none.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        kv_heads: int,
        dtype: DTypeLike,
        *,
        bias: bool = False,
        qk_norm: Callable[[], RMSNorm] | None = None,
    ) -> None:
        self.head_dim, self.window = spec.head_dim, spec.window_of(layer)
        # What is left to do about the scale, which ``attend`` takes for 1 / sqrt(head_dim).
        self.scale = math.sqrt(spec.head_dim / spec.query_scalar) if spec.query_scalar else 1.0
        queries, keys = spec.heads * spec.head_dim, kv_heads * spec.head_dim
        self.q_proj = Linear((queries, spec.hidden), ("heads", "embed"), dtype, bias=bias)
        self.k_proj = Linear((keys, spec.hidden), ("kv_heads", "embed"), dtype, bias=bias)
        self.v_proj = Linear((keys, spec.hidden), ("kv_heads", "embed"), dtype, bias=bias)
        self.o_proj = Linear((spec.hidden, queries), ("embed", "heads"), dtype)
        if qk_norm is not None:
            self.q_norm, self.k_norm = qk_norm(), qk_norm()

    def __call__(self, x: jax.Array, rotary: Tables, attend: Attend, layer: int, kv: Any) -> tuple[jax.Array, Any]:
        """Attention of x [T, hidden] to itself and what ``kv`` holds, [T, hidden] float32."""
        rows = x.shape[0]
        q, k, v = (part(x).reshape(rows, -1, self.head_dim) for part in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(heads, *rotary).astype(x.dtype) for heads in (q * self.scale, k))
        out, kv = attend(layer, q, k, v.astype(x.dtype), kv, self.window)
        return self.o_proj(out.reshape(rows, -1)), kv


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202)."""

    def __init__(
        self, spec: ModelSpec, dtype: DTypeLike, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
    ) -> None:
        self.activation = activation
        self.gate_proj = Linear((spec.ffn, spec.hidden), ("mlp", "embed"), dtype)
        self.up_proj = Linear((spec.ffn, spec.hidden), ("mlp", "embed"), dtype)
        self.down_proj = Linear((spec.hidden, spec.ffn), ("embed", "mlp"), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [T, hidden] to [T, hidden] float32."""
        inner = self.activation(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner.astype(x.dtype))


def add(x: jax.Array, out: jax.Array) -> jax.Array:
    """Residual stream x plus ``out`` of a layer, summed in float32 and rounded once to the dtype of x."""
    return (x.astype(jnp.float32) + out).astype(x.dtype)
