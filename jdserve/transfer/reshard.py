"""Which part of which source shard goes to which destination device, for any pair of TP x PP degrees.

A shard is a box: a range of layers times a range of KV heads. Every destination box is covered by pieces cut out of
source boxes. Where the source repeats heads, the copies are taken in turn, so that no device sends everything.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from jdserve.transfer.layout import KVLayout


@dataclass(frozen=True)
class Shard:
    """What one device stores: layers ``[layers.start, layers.stop)`` of heads ``[heads.start, heads.stop)``."""

    stage: int
    rank: int
    layers: range
    heads: range


@dataclass(frozen=True)
class Piece:
    """One slice that moves.

    Attributes:
        source, destination: (stage, rank) of the devices.
        source_layers, source_heads: the slice, counted from the start of the source shard.
        layer, head: where it goes, counted from the start of the destination shard.
    """

    source: tuple[int, int]
    destination: tuple[int, int]
    source_layers: range
    source_heads: range
    layer: int
    head: int


def shards(layout: KVLayout) -> tuple[Shard, ...]:
    """The box of every device of an instance, stage by stage, in mesh order."""
    layers = layout.layers // layout.pp
    repeats = layout.stored_kv_heads // layout.kv_heads
    per_device = layout.stored_kv_heads // layout.tp
    return tuple(
        Shard(
            stage,
            rank,
            range(stage * layers, (stage + 1) * layers),
            range(rank * per_device // repeats, -(-(rank + 1) * per_device // repeats)),
        )
        for stage in range(layout.pp)
        for rank in range(layout.tp)
    )


@functools.lru_cache(maxsize=1024)
def plan_pieces(source: KVLayout, destination: KVLayout) -> tuple[Piece, ...]:
    """Pieces that cover every destination shard exactly once; both ends of every hand-off ask for the same few.

    Raises:
        TransferError: the layouts describe different models, page sizes or dtypes.
    """
    destination.check_compatible(source)
    pieces: list[Piece] = []
    copies: dict[tuple[range, range], list[Shard]] = {}
    for shard in shards(source):
        copies.setdefault((shard.layers, shard.heads), []).append(shard)
    turns = {box: itertools.cycle(holders) for box, holders in copies.items()}
    for target in shards(destination):
        for (layers, heads), holders in turns.items():
            shared_layers = _overlap(layers, target.layers)
            shared_heads = _overlap(heads, target.heads)
            if not shared_layers or not shared_heads:
                continue
            holder = next(holders)
            pieces.append(
                Piece(
                    source=(holder.stage, holder.rank),
                    destination=(target.stage, target.rank),
                    source_layers=_shift(shared_layers, layers.start),
                    source_heads=_shift(shared_heads, heads.start),
                    layer=shared_layers.start - target.layers.start,
                    head=shared_heads.start - target.heads.start,
                )
            )
    return tuple(sorted(pieces, key=lambda piece: (piece.destination, piece.layer, piece.head)))


def shipments(source: KVLayout, destination: KVLayout) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """Indices of the pieces that leave together: by process and stage of the source, and process of the destination.

    Raises:
        TransferError: as :func:`plan_pieces`.
    """
    together: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for index, piece in enumerate(plan_pieces(source, destination)):
        key = (source.process(*piece.source), piece.source[0], destination.process(*piece.destination))
        together[key] = (*together.get(key, ()), index)
    return together


def _overlap(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


def _shift(values: range, by: int) -> range:
    return range(values.start - by, values.stop - by)
