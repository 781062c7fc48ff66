"""Both attention functions against a plain loop in float64, with NaN wherever nothing may be read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdserve.core.errors import InvalidPlan
from jdserve.ops.attention import CHUNK_TOKENS, KVPool, decode_attention, prefill_attention, write_kv
from jdserve.ops.backends import attention_ops
from ops.poison import LAYER, LAYERS, attend, expected_decode, expected_prefill, packed, poisoned_cache, rounded

HEAD_DIM = 8
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
LONG = 2 * CHUNK_TOKENS + 17

decode = jax.jit(decode_attention, static_argnums=(2, 5))
prefill = jax.jit(prefill_attention, static_argnums=(4, 8))


def assert_near(actual, expected, dtype):
    assert actual.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.asarray(actual.astype(jnp.float32)), expected, rtol=0, atol=TOLERANCE[dtype])


heads_and_kv_heads = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
page_sizes = pytest.mark.parametrize("page_size", [16, 32])
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def ragged(page_size):
    return [0, 1, page_size - 1, page_size, page_size + 1, LONG, 0]


@heads_and_kv_heads
@page_sizes
@dtypes
def test_decode_against_the_loop(heads, kv_heads, page_size, dtype):
    rng = np.random.default_rng(1)
    contexts = ragged(page_size)
    cache = poisoned_cache(rng, contexts, kv_heads, page_size, dtype)
    q = rounded(rng, (len(contexts), heads, HEAD_DIM), dtype)
    actual = decode(jnp.asarray(q), cache.pool, LAYER, cache.tables, np.array(contexts, np.int32))
    assert_near(actual, expected_decode(q, cache), dtype)


windows = pytest.mark.parametrize("window", [1, 16, 100, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * LONG])


@windows
def test_decode_in_a_window(window):
    rng = np.random.default_rng(8)
    contexts = [LONG, 0, 1, 40, LONG - 30]
    cache = poisoned_cache(rng, contexts, 2, 16, "float32")
    q = rounded(rng, (len(contexts), 4, HEAD_DIM), "float32")
    actual = decode(jnp.asarray(q), cache.pool, LAYER, cache.tables, np.array(contexts, np.int32), window)
    assert_near(actual, expected_decode(q, cache, window), "float32")


def test_decode_of_padding_alone_is_zero():
    cache = poisoned_cache(np.random.default_rng(2), [0, 0], 2, 16, "float32")
    actual = decode(jnp.ones((2, 4, HEAD_DIM)), cache.pool, LAYER, cache.tables, np.zeros(2, np.int32))
    assert np.array_equal(np.asarray(actual), np.zeros((2, 4, HEAD_DIM)))


@pytest.mark.parametrize("context", [CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS])
def test_decode_at_the_borders_of_a_chunk(context):
    rng = np.random.default_rng(context)
    cache = poisoned_cache(rng, [context], 1, 16, "float32")
    q = rounded(rng, (1, 2, HEAD_DIM), "float32")
    actual = decode(jnp.asarray(q), cache.pool, LAYER, cache.tables, np.array([context], np.int32))
    assert_near(actual, attend(q[0], *cache.live[0])[None], "float32")


def test_decode_survives_large_scores():
    """Exponentials are taken relative to the running maximum, whichever chunk holds it."""
    rng = np.random.default_rng(3)
    cache = poisoned_cache(rng, [LONG], 1, 16, "float32")
    q = 300 * rounded(rng, (1, 2, HEAD_DIM), "float32")
    actual = decode(jnp.asarray(q), cache.pool, LAYER, cache.tables, np.array([LONG], np.int32))
    np.testing.assert_allclose(np.asarray(actual)[0], attend(q[0], *cache.live[0]), rtol=0, atol=1e-3)


@heads_and_kv_heads
@page_sizes
@dtypes
def test_prefill_against_the_loop(heads, kv_heads, page_size, dtype):
    """Segments with and without prefix, packed with padding rows and with a segment that has no rows."""
    rng = np.random.default_rng(4)
    prefixes = ragged(page_size)
    lengths, padding = [5, 1, 7, page_size, 3, 4, 0], 3
    cache = poisoned_cache(rng, prefixes, kv_heads, page_size, dtype)
    segments = packed(lengths, padding)
    q = rounded(rng, (len(segments), heads, HEAD_DIM), dtype)
    k, v = (rounded(rng, (len(segments), kv_heads, HEAD_DIM), dtype) for _ in range(2))
    new = (jnp.asarray(array) for array in (q, k, v))
    actual = prefill(*new, cache.pool, LAYER, segments, cache.tables, np.array(prefixes, np.int32))
    rows = len(segments) - padding
    assert_near(actual[:rows], expected_prefill(q, k, v, cache, lengths)[:rows], dtype)
    assert np.isfinite(np.asarray(actual.astype(jnp.float32))).all()


@windows
def test_prefill_in_a_window(window):
    """Windows that end in the chunk, in its prefix, and before; other segments lie between."""
    rng = np.random.default_rng(8)
    prefixes, lengths, padding = [LONG, 0, 20, CHUNK_TOKENS], [30, 40, 1, 25], 4
    cache = poisoned_cache(rng, prefixes, 2, 16, "float32")
    segments = packed(lengths, padding)
    q, k, v = (rounded(rng, (len(segments), heads, HEAD_DIM), "float32") for heads in (4, 2, 2))
    new = (jnp.asarray(array) for array in (q, k, v))
    actual = prefill(*new, cache.pool, LAYER, segments, cache.tables, np.array(prefixes, np.int32), window)
    rows = len(segments) - padding
    assert_near(actual[:rows], expected_prefill(q, k, v, cache, lengths, window)[:rows], "float32")


def test_prefill_reads_no_pages_before_its_windows():
    """NaN in the values of a whole chunk of pages would get past the mask: 0 * NaN."""
    rng = np.random.default_rng(9)
    cache = poisoned_cache(rng, [LONG], 1, 16, "float32")
    pool = KVPool(*(part.at[:, cache.tables[0, : CHUNK_TOKENS // 16]].set(jnp.nan) for part in cache.pool))
    q, k, v = (rounded(rng, (4, heads, HEAD_DIM), "float32") for heads in (2, 1, 1))
    new = (jnp.asarray(array) for array in (q, k, v))
    actual = prefill(*new, pool, LAYER, packed([4], 0), cache.tables, np.array([LONG], np.int32), 50)
    assert_near(actual, expected_prefill(q, k, v, cache, [4], 50), "float32")


def test_prefill_without_prefix_reads_no_page():
    rng = np.random.default_rng(5)
    lengths = [6, 9]
    cache = poisoned_cache(rng, [0, 0], 2, 16, "float32")
    segments = packed(lengths, 1)
    q, k, v = (rounded(rng, (16, heads, HEAD_DIM), "float32") for heads in (4, 2, 2))
    new = (jnp.asarray(array) for array in (q, k, v))
    actual = prefill(*new, cache.pool, LAYER, segments, cache.tables, np.zeros(2, np.int32))
    assert_near(actual[:15], expected_prefill(q, k, v, cache, lengths)[:15], "float32")


def test_prefill_in_chunks_equals_prefill_at_once():
    """The last rows of a prompt come out the same whether the first rows are packed with them or in the pool."""
    rng = np.random.default_rng(6)
    total, cut = 40, 23
    q, k, v = (jnp.asarray(rounded(rng, (total, heads, HEAD_DIM), "float32")) for heads in (4, 2, 2))
    pool = KVPool(*(jnp.zeros((LAYERS, 4, 2, 16, HEAD_DIM)) for _ in range(2)))
    table = np.array([[3, 1, 2]], np.int32)
    place = np.arange(cut)
    filled = write_kv(pool, LAYER, k[:cut], v[:cut], table[0, place // 16], place % 16)
    whole = prefill(q, k, v, pool, LAYER, packed([total], 0), table, np.zeros(1, np.int32))
    rest = (q[cut:], k[cut:], v[cut:])
    second = prefill(*rest, filled, LAYER, packed([total - cut], 0), table, np.array([cut], np.int32))
    np.testing.assert_allclose(np.asarray(second), np.asarray(whole)[cut:], rtol=0, atol=2e-6)


@dtypes
def test_write_kv_against_numpy(dtype):
    rng = np.random.default_rng(7)
    shape = (3, 6, 2, 16, HEAD_DIM)
    before = [rounded(rng, shape, dtype) for _ in range(2)]
    k, v = (rng.normal(size=(5, 2, HEAD_DIM)).astype(np.float32) for _ in range(2))
    pages, rows = np.array([4, 4, 1, 5, 2], np.int32), np.array([15, 0, 7, 0, 15], np.int32)
    after = write_kv(KVPool(*map(jnp.asarray, before)), 1, jnp.asarray(k), jnp.asarray(v), pages, rows)
    for old, new, pool in zip(before, (k, v), after, strict=True):
        expected = old.copy()
        for index in range(5):
            expected[1, pages[index], :, rows[index]] = new[index].astype(expected.dtype)
        assert pool.dtype == jnp.dtype(dtype)
        assert np.array_equal(np.asarray(pool), expected)


def test_write_kv_works_in_place_in_a_donated_pool():
    pool = KVPool(*(jnp.zeros((1, 3, 1, 16, HEAD_DIM)) for _ in range(2)))
    addresses = {array.unsafe_buffer_pointer() for array in pool}
    new = jnp.ones((1, 1, HEAD_DIM))
    write = jax.jit(write_kv, static_argnums=1, donate_argnums=0)
    after = write(pool, 0, new, new, np.array([1], np.int32), np.array([2], np.int32))
    assert {array.unsafe_buffer_pointer() for array in after} == addresses


def test_registry():
    assert attention_ops("cpu").decode is decode_attention
    assert attention_ops("cpu").prefill is prefill_attention
    assert attention_ops() is attention_ops(jax.default_backend())
    with pytest.raises(InvalidPlan, match="abacus"):
        attention_ops("abacus")
    with pytest.raises(
        InvalidPlan, match=r"\$\.attention: pallas_triton runs on gpu, not on cpu; there: xla, pallas_in"
    ):
        attention_ops("cpu", "pallas_triton")
    assert attention_ops("gpu").decode is not decode_attention


def test_zeros_past_the_head_dimension_change_nothing():
    """Some kernels want a longer last axis than the model's; the XLA functions stand beside them on that pool."""
    rng = np.random.default_rng(10)
    q, k, v = (jnp.asarray(rounded(rng, (5, heads, HEAD_DIM), "float32")) for heads in (4, 2, 2))
    pages, rows = np.array([2, 2, 2, 2, 2], np.int32), np.arange(5, dtype=np.int32)
    table, five = np.array([[2]], np.int32), np.array([5], np.int32)
    outputs = []
    for stored in (HEAD_DIM, 16):
        pool = write_kv(KVPool(*(jnp.zeros((LAYERS, 3, 2, 16, stored)) for _ in range(2))), LAYER, k, v, pages, rows)
        assert not np.asarray(pool.keys)[..., HEAD_DIM:].any()
        decoded = decode(q[:1], pool, LAYER, table, five)
        outputs.append((decoded, prefill(q, k, v, pool, LAYER, packed([5], 0), table, five)))
    for one, other in zip(*outputs, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
