"""Logical axis names of models and pools, mapped to the axes of an instance's mesh by one dataclass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdserve.compat import Device

TENSOR_AXIS = "tp"
"""Name of the tensor-parallel axis of every instance's mesh."""


@dataclass(frozen=True)
class ShardingRules:
    """Mesh axis of each logical axis, None for replicated. The default is Megatron-style tensor parallelism.

    Column-parallel projections split ``heads``, ``kv_heads`` and ``mlp``, row-parallel ones contract over them, so a
    layer costs two all-reduces. ``vocab`` splits the embedding table and the output projection. ``experts`` splits
    the experts of a layer, each whole (``expert_mlp``), while every device routes every token (``router``).
    ``head_dim`` is inside a head, ``positions`` counts the rows of a table of positions, and ``word_embed`` is the
    width of an embedding table where it is not ``embed``. ``tokens`` counts the rows of the residual stream.
    """

    vocab: str | None = TENSOR_AXIS
    embed: str | None = None
    heads: str | None = TENSOR_AXIS
    kv_heads: str | None = TENSOR_AXIS
    mlp: str | None = TENSOR_AXIS
    experts: str | None = TENSOR_AXIS
    expert_mlp: str | None = None
    router: str | None = None
    head_dim: str | None = None
    positions: str | None = None
    word_embed: str | None = None
    tokens: str | None = None

    def sharding(self, mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Sharding of an array of ``shape`` whose dimensions have the logical names ``axes``.

        A ``vocab`` that the mesh axis does not divide is replicated, and so are ``tokens``: vocabularies are odd
        numbers often enough, some programs have one row, and a sharding in JAX is even. Every other axis must divide,
        which the plan has checked.

        Raises:
            ValueError: a dimension other than ``vocab`` or ``tokens`` does not divide by its mesh axis.
        """
        names: list[str | None] = []
        for axis, size in zip(axes, shape, strict=True):
            name = getattr(self, axis) if axis is not None else None
            if name is not None and size % mesh.shape[name]:
                if axis not in ("vocab", "tokens"):
                    raise ValueError(f"axis {axis!r} of size {size} does not divide by {mesh.shape[name]} devices")
                name = None
            names.append(name)
        return NamedSharding(mesh, PartitionSpec(*names))

    def replicated(self, mesh: Mesh) -> NamedSharding:
        """The sharding that gives every device of ``mesh`` the whole array."""
        return NamedSharding(mesh, PartitionSpec())


def instance_mesh(devices: list[Device]) -> Mesh:
    """The mesh of one pipeline stage: ``len(devices)`` tensor-parallel devices."""
    return Mesh(np.array(devices), (TENSOR_AXIS,))
