"""A feed-forward of experts, of which a router chooses a few for each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jdserve.core.spec import ModelSpec
from jdserve.models.interface import SCALE
from jdserve.models.layers import Linear, parameter

ROWS = 256
"""Tokens at a time: the experts' results of all tokens at once would be [experts, T, hidden]."""


class SparseFeedForward(nnx.Module):
    """Router and experts; the sum of the chosen experts, weighted by the softmax of their scores.

    Every expert computes every token, and the weights of those that were not chosen are zero. Experts lie along the
    logical axis ``experts``: each device computes its own, and the sum over them is reduced.

    Args:
        spec: of the model.
        dtype: of the weights.
        names: of the tensors of an expert: gate, up and down projection.
    """

    def __init__(self, spec: ModelSpec, dtype: DTypeLike, names: tuple[str, str, str]) -> None:
        self.chosen, self.normalized = spec.experts_per_token, spec.normalized_routing
        # Every device routes every token: what it chooses from must be whole, and a rounded score another choice.
        self.gate = Linear((spec.experts, spec.hidden), ("router", "embed"), dtype, channels=False)
        self.experts = Experts(spec, dtype, names)

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [T, hidden] to [T, hidden] float32."""
        share = self.route(x)
        rows, width = x.shape
        if rows <= ROWS:
            return self.experts(x, share)
        padding = -rows % ROWS
        blocks = (jnp.pad(part, ((0, padding), (0, 0))).reshape(-1, ROWS, part.shape[1]) for part in (x, share))
        return jax.lax.map(lambda block: self.experts(*block), tuple(blocks)).reshape(-1, width)[:rows]

    def route(self, x: jax.Array) -> jax.Array:
        """Weight of each expert for each row of x [T, hidden], [T, experts] float32; zero for all but the chosen."""
        scores = jax.nn.softmax(self.gate(x), axis=-1)
        best, chosen = jax.lax.top_k(scores, self.chosen)
        if self.normalized:
            best = best / best.sum(axis=-1, keepdims=True)
        picked = jax.nn.one_hot(chosen, scores.shape[-1], dtype=jnp.float32)
        return (picked * best[:, :, None]).sum(axis=1)


class Experts(nnx.Module):
    """The weights of all experts of a layer, each projection stacked: gate and up [E, ffn, hidden], down transposed.

    Where one holds integers, its scales [E, out] float32 are beside it.
    """

    def __init__(self, spec: ModelSpec, dtype: DTypeLike, names: tuple[str, str, str]) -> None:
        inward = (spec.experts, spec.ffn, spec.hidden), ("experts", "expert_mlp", "embed")
        outward = (spec.experts, spec.hidden, spec.ffn), ("experts", "embed", "expert_mlp")
        self.names = names
        for name, (shape, axes) in zip(names, (inward, inward, outward), strict=True):
            parts = tuple(f"{expert}.{name}.weight" for expert in range(spec.experts))
            setattr(self, name, parameter(shape, axes, dtype, parts=parts, channels=True))

    def __call__(self, x: jax.Array, share: jax.Array) -> jax.Array:
        """X [T, hidden] through every expert, summed with weights share [T, E], [T, hidden] float32."""
        gate, up, down = self.names
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

        def dot(equation: str, left: jax.Array, name: str) -> jax.Array:
            weight = getattr(self, name)[...].astype(x.dtype)
            out = jnp.einsum(equation, left, weight, precision=precision, preferred_element_type=jnp.float32)
            return out * getattr(self, name + SCALE)[...][:, None, :] if hasattr(self, name + SCALE) else out

        inner = jax.nn.silu(dot("td,efd->etf", x, gate)) * dot("td,efd->etf", x, up)
        out = dot("etf,edf->etd", inner.astype(x.dtype), down)
        return (out * share.T[:, :, None]).sum(axis=0)
