"""Taking pages out of a KV pool and putting them in: what a hand-off costs the instances at both ends."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array, lax

from jdserve.ops.attention import KVPool, fit

UNROLLED = 64
"""More pages in one program would take long to compile."""


def write_pages(pool: KVPool, new: KVPool, pages: Array, platform: str) -> KVPool:
    """Put ``new`` ``[layers, N, ..., D]`` into ``pages`` ``int32[N]`` of a pool; in place where the pool is donated.

    A page that is named more than once gets one of the copies that are meant for it.

    On CPU a loop over the pages moves each as one block, in half the time of XLA's scatter, which goes element by
    element. Not so with 16-bit floats, which XLA on CPU updates by way of float32, nor elsewhere, where a loop would be
    a launch per page.
    """
    new = KVPool(*(fit(part, array) for part, array in zip(new, pool, strict=True)))
    if platform == "cpu" and pool.keys.dtype.itemsize >= 4:
        return KVPool(*(_write(array, part, pages) for array, part in zip(pool, new, strict=True)))
    return KVPool(pool.keys.at[:, pages].set(new.keys), pool.values.at[:, pages].set(new.values))


def read_pages(pool: KVPool, pages: Array, platform: str, head_dim: int) -> KVPool:
    """Copy ``pages`` ``int32[N]`` out of a pool: ``[layers, N, ..., head_dim]``.

    On CPU by blocks, as in :func:`write_pages`: in a third of the time of XLA's gather, and up to ``UNROLLED`` pages
    without a loop, which XLA does not do in place as well.
    """
    if platform == "cpu" and pool.keys.dtype.itemsize >= 4:
        return KVPool(*(_read(array, pages) for array in pool))
    return KVPool(pool.keys[:, pages][..., :head_dim], pool.values[:, pages][..., :head_dim])


def _read(array: Array, pages: Array) -> Array:
    def one(index: Array, out: Array) -> Array:
        page = lax.dynamic_slice_in_dim(array, pages[index], 1, axis=1)
        return lax.dynamic_update_slice_in_dim(out, page, index, axis=1)

    out = jnp.zeros((array.shape[0], pages.shape[0], *array.shape[2:]), array.dtype)
    if pages.shape[0] <= UNROLLED:
        return functools.reduce(lambda out, index: one(jnp.int32(index), out), range(pages.shape[0]), out)
    return lax.fori_loop(0, pages.shape[0], one, out)


def _write(array: Array, new: Array, pages: Array) -> Array:
    def one(index: Array, out: Array) -> Array:
        page = lax.dynamic_slice_in_dim(new, index, 1, axis=1)
        return lax.dynamic_update_slice_in_dim(out, page, pages[index], axis=1)

    return lax.fori_loop(0, pages.shape[0], one, array)
