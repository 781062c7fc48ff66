"""Copying pieces out of pools in the memory of the host: one pass, with no program of the device in between."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import numpy as np

from jdserve.transfer.base import Shards, never
from jdserve.transfer.reshard import Piece


def read_piece(
    piece: Piece, shards: Shards, pages: Seq[int], into: Seq[np.ndarray], over: Callable[[], bool] = never
) -> None:
    """Copy keys and values of ``piece`` out of the pool of its stage.

    Args:
        piece: which layers and heads.
        shards: of the stage.
        pages: of the pool.
        into: for keys and for values, ``[layers, pages, heads, page size, head dim]``.
        over: asked on the way; true ends it, because nobody wants the piece any more.
    """
    runs = list(_runs(pages))
    for part, target in zip(_parts(piece, shards), into, strict=True):
        for at, page, count in runs:
            if over():
                return
            target[:, at : at + count] = part[:, page : page + count]


def pool_checksum(piece: Piece, shards: Shards, pages: Seq[int]) -> int:
    """CRC-32 of the piece as it lies in the pool, keys then values."""
    checksum = 0
    for part in _parts(piece, shards):
        checksum = zlib.crc32(np.ascontiguousarray(part[:, list(pages)]).view(np.uint8).data, checksum)
    return checksum


def _parts(piece: Piece, shards: Shards) -> list[np.ndarray]:
    layers, heads = piece.source_layers, piece.source_heads
    return [array[layers.start : layers.stop, :, heads.start : heads.stop] for array in shards[piece.source[1]]]


def _runs(pages: Seq[int]) -> Iterator[tuple[int, int, int]]:
    """Where neighbouring pages begin, the first of them, and how many there are: one long copy beats many short."""
    for _, run in itertools.groupby(enumerate(pages), lambda item: item[1] - item[0]):
        (at, page), *more = run
        yield at, page, 1 + len(more)
