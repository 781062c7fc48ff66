"""Prefill attention of packed chunks over paged prefixes as one Triton kernel, with no score matrix in memory.

One program takes a block of rows, each a packed token and one of the query heads that share a KV head. For every chunk
that has rows in the block it runs over the chunk's prefix, read by page, and then over the chunk itself, with one
running softmax for both: nothing is gathered, and there are no two outputs to merge. cuDNN's attention would need the
prefixes gathered and the packed chunks padded to the longest; with 32 chunks in 512 tokens that is 32 times the work.

Each chunk has a softmax of its own and writes its own rows, so a NaN in one request stays there. Sizes of blocks are
those that compile for A100 and H100 without spilling registers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jdserve.ops.attention import KVPool
from jdserve.ops.flash import Softmax, Tile, over_tokens, padded, read_packed, read_paged


def prefill_attention(
    q: Array,
    k: Array,
    v: Array,
    pool: KVPool,
    layer: int,
    segments: Array,
    tables: Array,
    prefix: Array,
    window: int | None = None,
    *,
    softcap: float | None = None,
    interpret: bool = False,
) -> Array:
    """Causal attention of packed chunks, each over its prefix and itself; as the XLA
    :func:`jdserve.ops.attention.prefill_attention`.

    Args:
        q: ``[T, H, D]``, D at most 256 and at most 64 query heads to a KV head.
        k: ``[T, K, D]`` keys of the same tokens.
        v: ``[T, K, D]`` values of the same tokens.
        pool: holds the prefixes.
        layer: of the pool.
        segments: ``int32[T]`` ascending: which chunk a token belongs to, R for padding, whose output is 0.
        tables: ``int32[R, W]``; entries past a prefix are not read.
        prefix: ``int32[R]`` tokens before each chunk.
        window: most tokens to attend to, None for all.
        softcap: bends scores to ``softcap * tanh(score / softcap)``, None for not.
        interpret: run on any device, slowly.

    Returns:
        ``[T, H, D]`` in the dtype of ``q``.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, page_size = pool.keys.shape[2:4]
    group = heads // kv_heads
    wide = q.dtype == jnp.float32
    rows, read = (padded(group), 32) if wide else (64, 64 if head_dim <= 128 else 32)
    tile = Tile(group, head_dim, page_size, layer, rows, read, window, softcap)
    order = jnp.arange(tokens, dtype=jnp.int32)
    chunks = prefix.shape[0]
    begins = jnp.full(chunks + 1, tokens, jnp.int32).at[segments].min(order)
    ends = jnp.zeros(chunks + 1, jnp.int32).at[segments].max(order + 1)
    return pl.pallas_call(
        functools.partial(_prefill_kernel, tile),
        grid=(-(-tokens // _tokens_of(tile)), kv_heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=2 if wide else 3),
        interpret=interpret,
        name="jdserve_prefill",
    )(q, k, v, *pool, segments, tables, prefix, begins, ends)


def _tokens_of(tile: Tile) -> int:
    """Packed tokens in a block of rows."""
    return tile.rows // tile.group


def _prefill_kernel(
    tile: Tile,
    q: Any,
    k: Any,
    v: Any,
    keys: Any,
    values: Any,
    segments: Any,
    tables: Any,
    prefix: Any,
    begins: Any,
    ends: Any,
    out: Any,
) -> None:
    head, size = pl.program_id(1), _tokens_of(tile)
    total, chunks = q.shape[0], prefix.shape[0]
    start = pl.program_id(0) * size
    stop = jnp.minimum(start + size, total)
    row = lax.iota(jnp.int32, tile.rows)
    token = start + lax.div(row, jnp.int32(tile.group))
    there = token < stop
    # Rows past the end belong to no chunk, not even to that of padding.
    segment = jnp.where(there, plt.load(segments.at[token], mask=there, other=0), chunks + 1)
    columns, inside = tile.columns(tile.rows)
    heads = head * tile.group + lax.rem(row, jnp.int32(tile.group))
    at = tuple(lax.broadcast_in_dim(index, columns.shape, (0,)) for index in (token, heads))
    at = (*at, columns)

    def rows_of(chunk: Any) -> Array:
        return (segment == chunk)[:, None] & inside

    queries = plt.load(q.at[at], mask=there[:, None] & inside, other=0)
    plt.store(out.at[at], jnp.zeros(columns.shape, out.dtype), mask=rows_of(chunks))

    def one_chunk(chunk: Array, _: None) -> None:
        begin, before = begins[chunk], prefix[chunk]
        first = jnp.maximum(begin, start)
        place = token - begin + before

        def seen(places: Array, alive: Array) -> Array:
            mask = alive[None, :] & (places[None, :] <= place[:, None])
            return mask if tile.window is None else mask & (place[:, None] - places[None, :] < tile.window)

        def in_prefix(tokens: Array, alive: Array, state: Softmax) -> Softmax:
            read = read_paged(tile, keys, values, tables, chunk, head, tokens, alive, queries.dtype)
            return state.merge(tile.scores(queries, read[0]), read[1], seen(tokens, alive))

        def in_chunk(tokens: Array, alive: Array, state: Softmax) -> Softmax:
            read = read_packed(tile, k, v, head, tokens, alive, queries.dtype)
            return state.merge(tile.scores(queries, read[0]), read[1], seen(tokens - begin + before, alive))

        # A chunk without rows, in between, costs nothing.
        last = jnp.minimum(ends[chunk], stop)
        low, own = jnp.int32(0), begin
        if tile.window is not None:
            low = jnp.maximum(first - begin + before - tile.window + 1, 0)
            own = jnp.maximum(begin, first - tile.window + 1)
        state = over_tokens(tile, low, jnp.where(last > first, before, 0), Softmax.empty(tile), in_prefix)
        state = over_tokens(tile, own, last, state, in_chunk)
        plt.store(out.at[at], state.output()[0].astype(out.dtype), mask=rows_of(chunk))

    lax.fori_loop(segments[start], jnp.minimum(segments[stop - 1] + 1, chunks), one_chunk, None)
