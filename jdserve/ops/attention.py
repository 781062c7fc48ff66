"""Attention over a paged KV pool: one pure function for decode, one for prefill with a paged prefix.

The functions here are plain XLA. They run on every platform and are the oracle of every kernel; which of them runs
where is said in :mod:`jdserve.ops.backends`.

Shapes, with T packed prompt tokens, B decoding sequences, R prompt segments, L layers, P pages (page 0 is the null
page), S tokens per page, H query heads, K stored KV heads, D head dimension, W pages per block table:

- a pool (one for keys, one for values) is ``[L, P, K, S, D]``; where a back end wants a longer last axis, the rest of
  it is zero;
- a block table is ``int32[W]``, zero (the null page) past its end.

Both work through the pool in chunks of pages with a running log-sum-exp, and the number of chunks follows the longest
*real* context, not the width of the table: one program serves every length. A layer with a window of W tokens attends
to the new token and the W - 1 before it, and chunks that lie before every window are not read; their pages stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

CHUNK_TOKENS = 256
"""Tokens per pass over the pool: large enough to amortise the loop, small enough that scores stay in cache."""

MASKED = -1e30
"""Score of what must not be attended to; finite, so that a row that is masked whole gives no NaN."""


class KVPool(NamedTuple):
    """The KV of one instance: keys and values, each ``[L, P, K, S, D]``."""

    keys: Array
    values: Array


class _Softmax(NamedTuple):
    """Running softmax: row maximum, sum of exponentials, and weighted sum of values, all float32."""

    maximum: Array
    total: Array
    weighted: Array

    def merge(self, q: Array, keys: Array, values: Array, mask: Array, per_row: int) -> _Softmax:
        """Attend to more keys.

        Args:
            q: ``[N, rows, D]`` scaled queries, N problems at a time.
            keys: ``[N, places, D]``.
            values: ``[N, places, D]``, zero where dead: 0 * NaN is NaN.
            mask: ``bool[N or 1, rows / per_row, places]`` what may be attended to.
            per_row: consecutive queries that share a row of the mask.
        """
        problems, rows, _ = q.shape
        # Transposed by hand: contracting two last axes, XLA on CPU leaves its fast matmul (2.3 ms against 0.6).
        scores = jnp.einsum("nrd,ndp->nrp", q, keys.swapaxes(1, 2), preferred_element_type=jnp.float32)
        scores = scores.reshape(problems, rows // per_row, per_row, -1)
        scores = jnp.where(mask[:, :, None, :], scores, MASKED).reshape(problems, rows, -1)
        maximum = jnp.maximum(self.maximum, scores.max(-1))
        # A row that is masked whole has maximum MASKED: shift by 0 there, so that its weights come out 0 and not 1.
        weights = jnp.exp(scores - jnp.where(maximum > MASKED / 2, maximum, 0.0)[..., None])
        decay = jnp.exp(self.maximum - maximum)
        added = jnp.einsum("nrp,npd->nrd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return _Softmax(maximum, self.total * decay + weights.sum(-1), self.weighted * decay[..., None] + added)

    def output(self) -> Array:
        """Softmax-weighted values; zero where nothing was attended to."""
        return self.weighted / jnp.maximum(self.total, 1e-30)[..., None]


def _empty_softmax(q: Array) -> _Softmax:
    rows = q.shape[:-1]
    return _Softmax(jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros(q.shape, jnp.float32))


def _scaled(q: Array) -> Array:
    return q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)


def _pages_per_chunk(tables: Array, page_size: int) -> tuple[Array, int]:
    """Block tables padded to whole chunks, and the pages of a chunk."""
    step = max(1, min(CHUNK_TOKENS // page_size, tables.shape[1]))
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % step))), step


def _read_pages(pool: KVPool, layer: int, pages: Array, alive: Array, like: Array) -> tuple[Array, Array]:
    """Keys and values of ``pages[N, C]`` as ``[N, K, C * S, D]``, the values blank where not ``alive[N, C * S]``; D and
    dtype are those of ``like``."""
    kv_heads, page_size, stored = pool.keys.shape[2:]
    head_dim, dtype = like.shape[-1], like.dtype
    at = (layer, pages[:, None, :], jnp.arange(kv_heads)[None, :, None])
    shape = (pages.shape[0], kv_heads, pages.shape[1] * page_size, stored)
    keys = pool.keys.at[at].get(mode="promise_in_bounds").reshape(shape)[..., :head_dim].astype(dtype)
    values = pool.values.at[at].get(mode="promise_in_bounds").reshape(shape)[..., :head_dim].astype(dtype)
    return keys, jnp.where(alive[:, None, :, None], values, jnp.zeros((), dtype))


def write_kv(pool: KVPool, layer: int, k: Array, v: Array, pages: Array, rows: Array) -> KVPool:
    """Write keys and values ``[N, K, D]`` to rows ``rows[i]`` of pages ``pages[i]``, in place in a donated pool."""
    heads = jnp.arange(k.shape[1])[None, :]
    at = (layer, pages[:, None], heads, rows[:, None])
    k, v = fit(k, pool.keys), fit(v, pool.values)
    return KVPool(
        pool.keys.at[at].set(k.astype(pool.keys.dtype), mode="promise_in_bounds"),
        pool.values.at[at].set(v.astype(pool.values.dtype), mode="promise_in_bounds"),
    )


def fit(new: Array, pool: Array) -> Array:
    """``new [..., D]`` with zeros to the length of the pool's last axis."""
    missing = pool.shape[-1] - new.shape[-1]
    return jnp.pad(new, [(0, 0)] * (new.ndim - 1) + [(0, missing)]) if missing else new


def decode_attention(
    q: Array, pool: KVPool, layer: int, tables: Array, context: Array, window: int | None = None
) -> Array:
    """Attention of one new token per sequence over its pages.

    Args:
        q: ``[B, H, D]`` queries; the KV of the new tokens is in the pool already.
        pool: keys and values.
        layer: which layer of the pool.
        tables: ``int32[B, W]`` block tables.
        context: ``int32[B]`` tokens to attend to, the new one included; 0 for a padding row.
        window: most tokens to attend to, None for all.

    Returns:
        ``[B, H, D]`` in the dtype of ``q``.
    """
    batch, heads, head_dim = q.shape
    kv_heads, page_size = pool.keys.shape[2:4]
    tables, step = _pages_per_chunk(tables, page_size)
    grouped = _scaled(q).reshape(batch * kv_heads, heads // kv_heads, head_dim)
    places = step * page_size
    first: Array | int = 0
    start = None if window is None else jnp.maximum(context - window, 0)
    if start is not None:
        # A padding row begins nowhere: it must not hold the others back.
        first = jnp.where(context > 0, start, context.max()).min() // places

    def chunk(index: Array, state: _Softmax) -> _Softmax:
        pages = lax.dynamic_slice_in_dim(tables, index * step, step, axis=1)
        place = (index * places + jnp.arange(places, dtype=jnp.int32))[None, :]
        alive = place < context[:, None]
        if start is not None:
            alive &= place >= start[:, None]
        keys, values = _read_pages(pool, layer, pages, alive, q)
        mask = jnp.repeat(alive, kv_heads, axis=0)[:, None, :]
        flat = (batch * kv_heads, places, head_dim)
        return state.merge(grouped, keys.reshape(flat), values.reshape(flat), mask, heads // kv_heads)

    state = lax.fori_loop(first, -(-context.max() // places), chunk, _empty_softmax(grouped))
    return state.output().astype(q.dtype).reshape(batch, heads, head_dim)


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
) -> Array:
    """Causal attention of packed prompt chunks, each over its own paged prefix and itself.

    Prefix and chunk are attended to apart and merged by log-sum-exp, so the chunk never travels through the pool.

    Args:
        q: ``[T, H, D]`` queries, the chunks one after another.
        k: ``[T, K, D]`` keys of the same tokens.
        v: ``[T, K, D]`` values of the same tokens.
        pool: holds the prefixes.
        layer: which layer of the pool.
        segments: ``int32[T]`` which chunk a token belongs to; R for padding.
        tables: ``int32[R, W]`` block tables of the chunks.
        prefix: ``int32[R]`` tokens before each chunk.
        window: most tokens to attend to, None for all.

    Returns:
        ``[T, H, D]`` in the dtype of ``q``.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, page_size = pool.keys.shape[2:4]
    tables, step = _pages_per_chunk(tables, page_size)
    group = heads // kv_heads
    grouped = _scaled(q).reshape(tokens, kv_heads, group, head_dim).swapaxes(0, 1)
    grouped = grouped.reshape(kv_heads, tokens * group, head_dim)
    places = step * page_size
    order = jnp.arange(tokens, dtype=jnp.int32)
    # Rows of a chunk lie together, so a token's offset in it is its distance from the first of them.
    begins = jnp.full(prefix.shape[0] + 1, tokens, jnp.int32).at[segments].min(order)
    offset = order - begins[segments]

    def one_segment(segment: Array, state: _Softmax) -> _Softmax:
        def chunk(index: Array, state: _Softmax) -> _Softmax:
            pages = lax.dynamic_slice(tables, (segment, index * step), (1, step))
            place = (index * places + jnp.arange(places, dtype=jnp.int32))[None, :]
            alive = place < prefix[segment]
            keys, values = _read_pages(pool, layer, pages, alive, q)
            mask = (segments == segment)[:, None] & alive
            if window is not None:
                mask &= prefix[segment] + offset[:, None] - place < window
            return state.merge(grouped, keys[0], values[0], mask[None], group)

        first = 0 if window is None else jnp.maximum(prefix[segment] - window + 1, 0) // places
        return lax.fori_loop(first, -(-prefix[segment] // places), chunk, state)

    state = lax.fori_loop(0, prefix.shape[0], one_segment, _empty_softmax(grouped))
    causal = (order[None, :] <= order[:, None]) & (segments[None, :] == segments[:, None])
    if window is not None:
        causal &= order[:, None] - order[None, :] < window
    state = state.merge(grouped, k.swapaxes(0, 1), v.swapaxes(0, 1), causal[None], group)
    out = state.output().astype(q.dtype).reshape(kv_heads, tokens, group, head_dim)
    return out.swapaxes(0, 1).reshape(tokens, heads, head_dim)


@dataclass(frozen=True)
class AttentionOps:
    """The two attention functions of one back end; signatures and meaning as in this module.

    Attributes:
        decode: as :func:`decode_attention`.
        prefill: as :func:`prefill_attention`.
        lanes: the last axis of its pool is a multiple of this.
    """

    decode: Callable[[Array, KVPool, int, Array, Array, int | None], Array]
    prefill: Callable[[Array, Array, Array, KVPool, int, Array, Array, Array, int | None], Array]
    lanes: int = 1

    def stored_head_dim(self, head_dim: int) -> int:
        """Length of the last axis of the pool."""
        return -(-head_dim // self.lanes) * self.lanes
