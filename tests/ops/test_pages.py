"""Both ways of reading and of writing pages give the same bits, sharded or not, and in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdserve.ops.attention import KVPool
from jdserve.ops.host import host_memory
from jdserve.ops.pages import read_pages, write_pages
from jdserve.sharding.rules import ShardingRules, instance_mesh

SHAPE = (3, 9, 4, 16, 8)


def random_pool(dtype: str, pages: int, seed: int) -> KVPool:
    rng = np.random.default_rng(seed)
    return KVPool(
        *(jnp.asarray(rng.standard_normal((SHAPE[0], pages, *SHAPE[2:])).astype(jnp.dtype(dtype))) for _ in "kv")
    )


def bits(pool: KVPool) -> list[bytes]:
    return [np.asarray(array).tobytes() for array in pool]


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_page_is_written_in_place(dtype: str, tp: int) -> None:
    pool, new = random_pool(dtype, SHAPE[1], 0), random_pool(dtype, 4, 1)
    mesh = instance_mesh(jax.devices()[:tp])
    sharding = ShardingRules().sharding(mesh, (None, None, "kv_heads", None, None), SHAPE)
    both, whole = KVPool(sharding, sharding), ShardingRules().replicated(mesh)  # type: ignore[arg-type]
    pages = np.array([5, 1, 8, 2], np.int32)
    write = jax.jit(
        lambda p, n, at: write_pages(p, n, at, "cpu"),
        donate_argnums=0,
        in_shardings=(both, both, whole),
        out_shardings=both,
    )
    wanted = [np.array(array) for array in pool]
    for array, part in zip(wanted, new, strict=True):
        array[:, pages] = np.asarray(part)
    donated = jax.device_put(pool, both)
    pointers = [shard.data.unsafe_buffer_pointer() for array in donated for shard in array.addressable_shards]
    written = write(donated, new, pages)
    assert bits(written) == [array.tobytes() for array in wanted]
    assert pointers == [shard.data.unsafe_buffer_pointer() for array in written for shard in array.addressable_shards]


def test_padding_all_goes_to_one_page() -> None:
    pool, new = KVPool(jnp.ones(SHAPE), jnp.ones(SHAPE)), KVPool(*(jnp.full((3, 4, 4, 16, 8), 7.0),) * 2)
    for platform in ("cpu", "gpu"):
        written = write_pages(pool, new, jnp.array([3, 0, 0, 0], jnp.int32), platform)
        assert np.array_equal(np.asarray(written.keys)[0, :, 0, 0, 0], [7, 1, 1, 7, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pages_are_read_whole_and_in_order(dtype: str) -> None:
    pool = random_pool(dtype, SHAPE[1], 0)
    pages = np.array([5, 0, 8, 5], np.int32)
    wanted = [np.asarray(array)[:, pages].tobytes() for array in pool]
    for platform in ("cpu", "gpu"):
        assert bits(jax.jit(lambda p, at: read_pages(p, at, platform, p.keys.shape[-1]))(pool, pages)) == wanted  # noqa: B023


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_the_host_is_the_array_itself_and_holds_no_reference(dtype: str) -> None:
    pool = jax.block_until_ready(random_pool(dtype, SHAPE[1], 0))
    wanted = bits(pool)
    views = [host_memory(array) for array in pool]
    assert [view.tobytes() for view in views] == wanted
    assert [(view.shape, view.dtype, view.flags.writeable) for view in views] == [(SHAPE, jnp.dtype(dtype), False)] * 2
    pointers = [array.unsafe_buffer_pointer() for array in pool]
    new, at = random_pool(dtype, 1, 1), jnp.array([3], jnp.int32)
    written = jax.jit(lambda p, n, at: write_pages(p, n, at, "cpu"), donate_argnums=0)(pool, new, at)
    assert [array.unsafe_buffer_pointer() for array in written] == pointers


def test_pages_are_padded_to_the_pool_and_cut_again() -> None:
    pages = jnp.array([3, 1], jnp.int32)
    pool, new = KVPool(*(jnp.full((2, 5, 1, 16, 128), 9.0),) * 2), KVPool(*(jnp.ones((2, 2, 1, 16, 80)),) * 2)
    written = write_pages(pool, new, pages, "tpu")
    assert not np.asarray(written.values)[:, pages, ..., 80:].any()
    assert bits(read_pages(written, pages, "tpu", 80)) == bits(new)
