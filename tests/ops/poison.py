"""Attention in float64, and caches with NaN wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jdserve.ops.attention import KVPool

LAYERS, LAYER = 2, 1  # the other layer is all NaN


@dataclass
class Cache:
    """A poisoned pool, block tables, and for each sequence the live keys and values ``[context, K, D]`` in float64."""

    pool: KVPool
    tables: np.ndarray
    live: list[tuple[np.ndarray, np.ndarray]]


def rounded(rng, shape, dtype):
    return np.asarray(jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype))


def poisoned_cache(rng, contexts, kv_heads, page_size, dtype, reserved=1, head_dim=8):
    """Pages in random order; NaN in the null page, in pages of nobody, in reserved pages and past each context."""
    counts = [-(-context // page_size) for context in contexts]
    width = max(counts) + reserved + 1
    total = 1 + sum(counts) + reserved * len(contexts) + 3
    keys = np.full((LAYERS, total, kv_heads, page_size, head_dim), np.nan, np.float32)
    values = keys.copy()
    order = list(1 + rng.permutation(total - 1))
    tables = np.zeros((len(contexts), width), np.int32)
    live = []
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        pages = [order.pop() for _ in range(count + reserved if context else 0)]
        tables[row, : len(pages)] = pages
        k, v = (rounded(rng, (context, kv_heads, head_dim), dtype).astype(np.float32) for _ in range(2))
        for place in range(context):
            at = (LAYER, pages[place // page_size], slice(None), place % page_size)
            keys[at], values[at] = k[place], v[place]
        live.append((k.astype(np.float64), v.astype(np.float64)))
    return Cache(KVPool(jnp.asarray(keys).astype(dtype), jnp.asarray(values).astype(dtype)), tables, live)


def attend(q, keys, values, softcap=None):
    """One query ``[H, D]`` over ``[places, K, D]``, head by head."""
    heads, head_dim = q.shape
    group = heads // keys.shape[1]
    out = np.zeros((heads, head_dim))
    for head in range(heads):
        scores = keys[:, head // group] @ q[head].astype(np.float64) / np.sqrt(head_dim)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ values[:, head // group]
    return out


def expected_decode(q, cache, window=None, softcap=None):
    """Sequence by sequence; zero where there is nothing to attend to."""
    expected = np.zeros(q.shape)
    for row, (keys, values) in enumerate(cache.live):
        if len(keys):
            seen = len(keys) if window is None else window
            expected[row] = attend(q[row], keys[-seen:], values[-seen:], softcap)
    return expected


def packed(lengths, padding):
    segments = np.repeat(np.arange(len(lengths)), lengths)
    return np.concatenate((segments, np.full(padding, len(lengths)))).astype(np.int32)


def expected_prefill(q, k, v, cache, lengths, window=None, softcap=None):
    """Row by row: the prefix of the row's segment, then the tokens of the segment up to the row."""
    expected = np.zeros(q.shape)
    start = 0
    for (keys, values), length in zip(cache.live, lengths, strict=True):
        for row in range(start, start + length):
            new_k, new_v = (new[start : row + 1].astype(np.float64) for new in (k, v))
            all_k, all_v = np.concatenate((keys, new_k)), np.concatenate((values, new_v))
            seen = len(all_k) if window is None else window
            expected[row] = attend(q[row], all_k[-seen:], all_v[-seen:], softcap)
        start += length
    return expected
