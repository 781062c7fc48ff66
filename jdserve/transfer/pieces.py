"""Cutting pieces out of a sharded copy, and putting landed pieces together: pure device work, no wire.

A bare ``device_put`` between different shardings gathers on the host and blocks until the producer has finished, so
slices are cut on the source devices, moved one by one, and assembled on the destination devices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from typing import Any

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
    """Keys and values of each piece, still on its source device, which must be one of this process.

    Launches only; waits for nothing.
    """
    local = [
        tuple({shard.device: shard.data for shard in array.addressable_shards} for array in stage)
        for stage in copy.stages
    ]
    order = [list(stage[0].sharding.mesh.devices.flat) if stage else [] for stage in copy.stages]  # type: ignore[union-attr]
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
    landed: Landed, source: KVLayout, layout: KVLayout, shardings: Seq[NamedSharding | None]
) -> list[tuple[Array, Array]]:
    """Keys and values of each destination stage, sharded as its pool; runs on the destination's launcher thread.

    Args:
        landed: pieces whose destination is in this process, in the order of the plan.
        source: layout that they were cut from.
        layout: of the destination.
        shardings: of each stage's pool, None for a stage in other processes, which is left out of the result.
    """
    meshes: list[Any] = [None if sharding is None else sharding.mesh for sharding in shardings]
    here = pieces_here(plan_pieces(source, layout), meshes)
    parts: dict[tuple[int, int], list[tuple[Piece, tuple[Array, Array]]]] = {}
    for piece, arrays in zip(here.values(), landed.pieces, strict=True):
        parts.setdefault(piece.destination, []).append((piece, arrays))
    stages: list[tuple[Array, Array]] = []
    for stage, sharding in enumerate(shardings):
        if sharding is None:
            continue
        at = [(shard.stage, shard.rank) for shard in shards(layout) if shard.stage == stage]
        ranks = [parts[place] for place in at if place in parts]
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


def pieces_here(pieces: Seq[Piece], meshes: Seq[Mesh | None]) -> dict[int, Piece]:
    """By index, the pieces whose destination is a device of this process.

    Args:
        pieces: all of them.
        meshes: of the destination's stages, None for one in other processes.
    """
    me = jax.process_index()
    processes = [[] if mesh is None else [device.process_index for device in mesh.devices.flat] for mesh in meshes]
    return {
        index: piece
        for index, piece in enumerate(pieces)
        if processes[piece.destination[0]] and processes[piece.destination[0]][piece.destination[1]] == me
    }


def _whole(parts: Seq[tuple[Piece, tuple[Array, Array]]], which: int) -> Array:
    """One device's shard out of its pieces: joined along heads within equal layers, then along layers."""
    rows: dict[int, list[Array]] = {}
    for piece, arrays in parts:
        rows.setdefault(piece.layer, []).append(arrays[which])
    joined = [row[0] if len(row) == 1 else _join(row, 2) for row in rows.values()]
    return joined[0] if len(joined) == 1 else _join(joined, 0)


def flat(pieces: Seq[tuple[Array, Array]]) -> list[Array]:
    """Keys and values of each piece in turn, as they lie on the wire."""
    return [array for pair in pieces for array in pair]


def flat_shapes(pieces: Seq[Piece], layout: KVLayout, pages: int) -> list[tuple[int, ...]]:
    """Shape of each array of :func:`flat`."""
    return [
        (len(piece.source_layers), pages, len(piece.source_heads), layout.page_size, layout.head_dim)
        for piece in pieces
        for _ in range(2)
    ]


def flat_devices(pieces: Seq[Piece], meshes: Seq[Mesh]) -> list[Device]:
    """Device that each array of :func:`flat` goes to."""
    return [meshes[piece.destination[0]].devices.flat[piece.destination[1]] for piece in pieces for _ in range(2)]
