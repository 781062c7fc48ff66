"""Decode attention over pages as a Triton kernel: flash-decoding (Dao et al., 2023, crfm.stanford.edu/2023/10/12).

One program takes one KV head of one sequence, with all query heads that share it, and one split of its tokens. Splits
are of the *real* context, so a short sequence beside a long one costs what it reads. Programs write float32 partials
and their log-sum-exp, which XLA merges.

The page of a token is looked up before its keys and values are read. This indirection takes stages of Triton's
pipeline: with ``num_stages=3`` nothing would be read ahead, with 5 keys and values are double-buffered. Sizes of blocks
are those that compile for A100 and H100 without spilling registers.
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
from jdserve.ops.flash import MASKED, Softmax, Tile, over_tokens, padded, read_paged

SPLIT_TOKENS = 256
"""Tokens of the smallest split: a shorter one costs more in merging than it gains."""

MAX_SPLITS = 32

PROGRAMS = 512
"""Programs that fill a large GPU, four to a multiprocessor: splits are made until there are as many."""


def splits_of(batch: int, kv_heads: int, longest: int) -> int:
    """Splits of a context of up to ``longest`` tokens, for ``batch`` sequences."""
    wanted = min(-(-PROGRAMS // (batch * kv_heads)), longest // SPLIT_TOKENS, MAX_SPLITS)
    return max(1, wanted)


def decode_attention(
    q: Array,
    pool: KVPool,
    layer: int,
    tables: Array,
    context: Array,
    window: int | None = None,
    *,
    softcap: float | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> Array:
    """Attention of one new token per sequence over its pages; as :func:`jdserve.ops.attention.decode_attention`.

    Args:
        q: ``[B, H, D]``, D at most 256.
        pool: keys and values.
        layer: of the pool.
        tables: ``int32[B, W]``; entries past a context are not read.
        context: ``int32[B]``, 0 for a padding row, whose output is 0.
        window: most tokens to attend to, None for all.
        softcap: bends scores to ``softcap * tanh(score / softcap)``, None for not.
        splits: of a context, None for as many as fill the GPU.
        interpret: run on any device, slowly.

    Returns:
        ``[B, H, D]`` in the dtype of ``q``.
    """
    batch, heads, head_dim = q.shape
    kv_heads, page_size = pool.keys.shape[2:4]
    group = heads // kv_heads
    splits = splits or splits_of(batch, kv_heads, tables.shape[1] * page_size)
    wide = q.dtype == jnp.float32
    tile = Tile(group, head_dim, page_size, layer, padded(group), 32 if wide else 64, window, softcap)
    partial, lse = pl.pallas_call(
        functools.partial(_decode_kernel, tile, splits),
        grid=(batch, kv_heads, splits),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, splits, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, splits), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=8 if wide else 4, num_stages=5),
        interpret=interpret,
        name="jdserve_decode",
    )(q, *pool, tables, context)
    return merge(partial, lse).astype(q.dtype)


def merge(partial: Array, lse: Array) -> Array:
    """Merge partial outputs ``[B, H, splits, D]`` by their log2-sum-exp ``[B, H, splits]``."""
    weights = jnp.where(lse > MASKED / 2, jnp.exp2(lse - lse.max(axis=-1, keepdims=True)), 0.0)
    total = jnp.maximum(weights.sum(axis=-1), 1e-30)
    return (partial * weights[..., None]).sum(axis=2) / total[..., None]


def split_bounds(tile: Tile, splits: int, context: Array, split: Any) -> tuple[Array, Array]:
    """First and last token, exclusive, of a split; the first is past the last where it has none."""
    begin = jnp.int32(0) if tile.window is None else jnp.maximum(context - tile.window, 0)
    share = jnp.maximum(lax.div(context - begin + (splits - 1), jnp.int32(splits)), SPLIT_TOKENS)
    share = lax.div(share + (tile.keys - 1), jnp.int32(tile.keys)) * tile.keys
    low = begin + split * share
    return low, jnp.minimum(low + share, context)


def _decode_kernel(
    tile: Tile, splits: int, q: Any, keys: Any, values: Any, tables: Any, context: Any, partial: Any, lse: Any
) -> None:
    sequence, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    low, high = split_bounds(tile, splits, context[sequence], split)
    columns, inside = tile.columns(tile.rows)
    member = lax.broadcasted_iota(jnp.int32, columns.shape, 0)
    heads, mine = head * tile.group + member, inside & (member < tile.group)
    queries = plt.load(q.at[sequence, heads, columns], mask=mine, other=0)

    def block(tokens: Array, alive: Array, state: Softmax) -> Softmax:
        k, v = read_paged(tile, keys, values, tables, sequence, head, tokens, alive, queries.dtype)
        return state.merge(tile.scores(queries, k), v, alive[None, :])

    out, total = over_tokens(tile, low, high, Softmax.empty(tile), block).output()
    row = lax.iota(jnp.int32, tile.rows)
    plt.store(partial.at[sequence, heads, split, columns], out, mask=mine)
    plt.store(lse.at[sequence, head * tile.group + row, split], total, mask=row < tile.group)
