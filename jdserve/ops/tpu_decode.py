"""Decode attention over pages as a TPU kernel, on the pool as it lies: no adapter, and no copy of the pool.

jax's ``ragged_paged_attention`` wants keys and values interleaved in pages ``[page_size, 2 * kv_heads, D]``. From our
pool that is a copy of it in every step, or a second layout of the pool that every transfer would have to know. One
program of this kernel takes one KV head of one sequence, as the Triton kernel does, and copies pages by its block table
from the pool to VMEM while it works on those before.

The last axis of the pool is a multiple of 128: for a shorter one XLA would choose a layout with pages innermost, and
copy the whole pool to the kernel's and back.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jdserve.ops.attention import MASKED, KVPool, fit

BLOCK_TOKENS = 512
"""Tokens that are copied and worked on at a time, in whole pages."""

LANES = 128
"""Numbers in a row of a tile: the last axis of the pool is a multiple of it."""

ROWS = 16
"""Query heads of a KV head are padded to a multiple of this: the rows of a tile of 16-bit numbers."""


def decode_attention(
    q: Array,
    pool: KVPool,
    layer: int,
    tables: Array,
    context: Array,
    window: int | None = None,
    *,
    interpret: Any = False,
) -> Array:
    """Attention of one new token per sequence over its pages; as :func:`jdserve.ops.attention.decode_attention`.

    Args:
        q: ``[B, H, D]``.
        pool: keys and values, their last axis zero past D.
        layer: of the pool.
        tables: ``int32[B, W]``, in scalar memory while it runs; entries past a context are not read.
        context: ``int32[B]``, 0 for a padding row, whose output is 0.
        window: most tokens to attend to, None for all.
        interpret: what ``pallas_call`` takes.

    Returns:
        ``[B, H, D]`` in the dtype of ``q``.
    """
    batch, heads, head_dim = q.shape
    kv_heads, page_size = pool.keys.shape[2:4]
    group = heads // kv_heads
    rows = -(-group // ROWS) * ROWS
    pages = max(1, min(tables.shape[1], BLOCK_TOKENS // page_size))
    grouped = fit(q.reshape(batch, kv_heads, group, head_dim), pool.keys)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    stored = grouped.shape[-1]
    queries = pl.BlockSpec((None, None, rows, stored), lambda sequence, head, *_: (sequence, head, 0, 0))
    where_it_lies = pl.BlockSpec(memory_space=pl.ANY)
    block = pltpu.VMEM((2, pages, page_size, stored), pool.keys.dtype)
    out = pl.pallas_call(
        functools.partial(_decode_kernel, layer, window, head_dim**-0.5),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads),
            in_specs=[queries, where_it_lies, where_it_lies],
            out_specs=queries,
            scratch_shapes=[block, block, pltpu.SemaphoreType.DMA((2, 2))],
        ),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="jdserve_decode",
    )(tables, context, grouped, *pool)
    return out[:, :, :group, :head_dim].reshape(q.shape)


def _decode_kernel(
    layer: int,
    window: int | None,
    scale: float,
    tables: Any,
    contexts: Any,
    q: Any,
    keys: Any,
    values: Any,
    out: Any,
    key_block: Any,
    value_block: Any,
    arrived: Any,
) -> None:
    sequence, head = pl.program_id(0), pl.program_id(1)
    _, pages, page_size, stored = key_block.shape
    tokens = pages * page_size
    context = contexts[sequence]
    begin = jnp.int32(0) if window is None else jnp.maximum(context - window, 0)
    first = lax.div(begin, jnp.int32(page_size))
    last = lax.div(jnp.maximum(context, 1) - 1, jnp.int32(page_size))
    blocks = jnp.where(context > 0, lax.div(last - first, jnp.int32(pages)) + 1, 0)
    queries = q[...]
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None

    def copies(index: Any) -> list[Any]:
        slot = lax.rem(index, jnp.int32(2))
        found = []
        for place in range(pages):
            # Past the end the last page comes again, so that what lies there in the table is never read.
            page = tables[sequence, jnp.minimum(first + index * pages + place, last)]
            for kind, (pool, block) in enumerate(((keys, key_block), (values, value_block))):
                source, target = pool.at[layer, page, head], block.at[slot, place]
                found.append(pltpu.make_async_copy(source, target, arrived.at[kind, slot]))
        return found

    def fetch(index: Any) -> None:
        for copy in copies(index):
            copy.start()

    @pl.when(blocks > 0)
    def _() -> None:
        fetch(jnp.int32(0))

    def step(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        weighted, maximum, total = state

        @pl.when(index + 1 < blocks)
        def _() -> None:
            fetch(index + 1)

        for copy in copies(index):
            copy.wait()
        slot = lax.rem(index, jnp.int32(2))
        k = key_block[slot].reshape(tokens, stored).astype(queries.dtype)
        v = value_block[slot].reshape(tokens, stored).astype(queries.dtype)
        start = (first + index * pages) * page_size

        def alive(shape: tuple[int, ...], axis: int) -> Array:
            places = start + lax.broadcasted_iota(jnp.int32, shape, axis)
            return (places >= begin) & (places < context)

        scores = lax.dot_general(
            queries, k, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        scores = jnp.where(alive(scores.shape, 1), scores * scale, MASKED)
        top = jnp.maximum(maximum, scores.max(axis=1, keepdims=True))
        decay, weights = jnp.exp(maximum - top), jnp.exp(scores - top)
        # Dead values must be zero: their weight is 0, and 0 * NaN is NaN.
        v = jnp.where(alive(v.shape, 0), v, jnp.zeros_like(v))
        added = jnp.dot(weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32)
        return weighted * decay + added, top, total * decay + weights.sum(axis=1, keepdims=True)

    empty = jnp.zeros((queries.shape[0], 1), jnp.float32)
    state = (jnp.zeros(queries.shape, jnp.float32), jnp.full_like(empty, MASKED), empty)
    weighted, _, total = lax.fori_loop(0, blocks, step, state)
    out[...] = (weighted / jnp.where(total > 0, total, 1.0)).astype(out.dtype)
