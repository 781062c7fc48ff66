"""Cutting pieces out of a sharded copy, and putting landed pieces together: pure device work, no wire.

A bare ``device_put`` between different shardings gathers on the host and blocks until the producer has finished, so
slices are cut on the source devices, moved one by one, and assembled on the destination devices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding

from jdserve.compat import Device
from jdserve.transfer.base import KVCopy, Landed
from jdserve.transfer.layout import KVLayout
from jdserve.transfer.reshard import Piece, plan_pieces, shards


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _cut(array: Array, layer: int, layers: int, head: int, heads: int) -> Array:
    return lax.slice_in_dim(lax.slice_in_dim(array, layer, layer + layers, axis=0), head, head + heads, axis=2)


@functools.partial(jax.jit, static_argnums=(1,))
def _join(pieces: Seq[Array], axis: int) -> Array:
    # As integers: XLA on CPU joins bfloat16 by way of float32, which costs more and changes the bits of a NaN.
    dtype = pieces[0].dtype
    bits = jnp.dtype(f"uint{8 * dtype.itemsize}")
    whole = jnp.concatenate([lax.bitcast_convert_type(piece, bits) for piece in pieces], axis=axis)
    return lax.bitcast_convert_type(whole, dtype)


def cut(copy: KVCopy, pieces: Seq[Piece]) -> list[tuple[Array, Array]]:
    """Keys and values of each piece, still on its source device. Launches only; waits for nothing."""
    local = [
        tuple({shard.device: shard.data for shard in array.addressable_shards} for array in stage)
        for stage in copy.stages
    ]
    order = [list(stage[0].sharding.mesh.devices.flat) for stage in copy.stages]  # type: ignore[union-attr]
    slices: list[tuple[Array, Array]] = []
    for piece in pieces:
        stage, rank = piece.source
        keys, values = (by_device[order[stage][rank]] for by_device in local[stage])
        slices.append((_slice(keys, piece), _slice(values, piece)))
    return slices


def _slice(array: Array, piece: Piece) -> Array:
    layers, heads = piece.source_layers, piece.source_heads
    if (len(layers), len(heads)) == (array.shape[0], array.shape[2]):
        return array
    return _cut(array, layers.start, len(layers), heads.start, len(heads))


def assemble(
    landed: Landed, source: KVLayout, layout: KVLayout, shardings: Seq[NamedSharding]
) -> list[tuple[Array, Array]]:
    """Keys and values of each destination stage, sharded as its pool; runs on the destination's launcher thread.

    Args:
        landed: pieces in the order of the plan.
        source: layout that they were cut from.
        layout: of the destination.
        shardings: of each stage's pool.
    """
    parts: dict[tuple[int, int], list[tuple[Piece, tuple[Array, Array]]]] = {}
    for piece, arrays in zip(plan_pieces(source, layout), landed.pieces, strict=True):
        parts.setdefault(piece.destination, []).append((piece, arrays))
    stages: list[tuple[Array, Array]] = []
    for stage, sharding in enumerate(shardings):
        ranks = [parts[shard.stage, shard.rank] for shard in shards(layout) if shard.stage == stage]
        shape = (
            layout.layers // layout.pp,
            landed.pages,
            layout.stored_kv_heads,
            layout.page_size,
            layout.head_dim,
        )
        keys, values = (
            jax.make_array_from_single_device_arrays(shape, sharding, [_whole(rank, which) for rank in ranks])
            for which in (0, 1)
        )
        stages.append((keys, values))
    return stages


def _whole(parts: Seq[tuple[Piece, tuple[Array, Array]]], which: int) -> Array:
    """One device's shard out of its pieces: joined along heads within equal layers, then along layers."""
    rows: dict[int, list[Array]] = {}
    for piece, arrays in parts:
        rows.setdefault(piece.layer, []).append(arrays[which])
    joined = [row[0] if len(row) == 1 else _join(row, 2) for row in rows.values()]
    return joined[0] if len(joined) == 1 else _join(joined, 0)


def destination_device(piece: Piece, meshes: Seq[Mesh]) -> Device:
    """The device that ``piece`` goes to."""
    stage, rank = piece.destination
    return meshes[stage].devices.flat[rank]
