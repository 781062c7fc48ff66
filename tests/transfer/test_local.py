"""The transport inside one process: every bit lands, nothing waits for the producer, and every refusal is an error."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdserve.core.errors import TransferError
from jdserve.ops.attention import KVPool
from jdserve.sharding.rules import ShardingRules, instance_mesh
from jdserve.transfer.base import KVCopy
from jdserve.transfer.layout import KVLayout
from jdserve.transfer.local import LocalTransport
from jdserve.transfer.pieces import assemble

POOL_PAGES = 7
PAGES = (5, 2, 6, 0)  # the last one is padding
BITS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
WAIT_S = 60.0


def layout(tp=1, pp=1, kv_heads=4, dtype="float32", **other):
    fields = {"layers": 4, "head_dim": 4, "page_size": 16} | other
    return KVLayout(kv_heads=kv_heads, dtype=dtype, tp=tp, pp=pp, **fields)


def meshes(of, first):
    """One mesh per stage; devices from ``first`` on, around the end where four are not enough."""
    devices = jax.devices()[:4]
    ring = [devices[(first + index) % 4] for index in range(of.tp * of.pp)]
    return [instance_mesh(ring[stage * of.tp : (stage + 1) * of.tp]) for stage in range(of.pp)]


def pool_sharding(of, mesh):
    shape = (of.layers // of.pp, POOL_PAGES, of.stored_kv_heads, of.page_size, of.head_dim)
    return ShardingRules().sharding(mesh, (None, None, "kv_heads", None, None), shape)


def random_model(of, seed=0):
    """Random bits, NaN of every kind among them: keys and values ``[layers, pages, KV heads, page size, head dim]``."""
    rng = np.random.default_rng(seed)
    bits = BITS[of.dtype]
    shape = (of.layers, POOL_PAGES, of.kv_heads, of.page_size, of.head_dim)
    return tuple(rng.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True) for _ in range(2))


def stored(of, bits, stage):
    """What a stage stores of the model's bits: its layers, heads repeated."""
    layers = of.layers // of.pp
    part = bits[stage * layers : (stage + 1) * layers]
    return np.repeat(part, of.stored_kv_heads // of.kv_heads, axis=2)


def make_pools(of, model, on):
    """One sharded pool per stage."""
    return [
        KVPool(
            *(
                jax.device_put(stored(of, bits, stage).view(jnp.dtype(of.dtype)), pool_sharding(of, mesh))
                for bits in model
            )
        )
        for stage, mesh in enumerate(on)
    ]


def gather(of, pools, on, pages=PAGES):
    """Pages out of each stage's pool, as an executor copies them."""
    stages = []
    for pool, mesh in zip(pools, on, strict=True):
        sharding = KVPool(*(pool_sharding(of, mesh),) * 2)
        copy = jax.jit(
            lambda pool, pages: KVPool(pool.keys[:, pages], pool.values[:, pages]),
            in_shardings=(sharding, ShardingRules().replicated(mesh)),
            out_shardings=sharding,
        )
        stages.append(tuple(copy(pool, np.array(pages, np.int32))))
    return KVCopy(of, stages, len(pages))


def assert_landed(landed, source, destination, on, model, pages=PAGES):
    shardings = [pool_sharding(destination, mesh) for mesh in on]
    stages = assemble(landed, source, destination, shardings)
    assert landed.pages == len(pages)
    assert len(stages) == destination.pp
    for stage, arrays in enumerate(stages):
        for array, bits in zip(arrays, model, strict=True):
            assert array.sharding == shardings[stage]
            expected = stored(destination, bits, stage)[:, list(pages)]
            assert np.array_equal(np.asarray(array).view(bits.dtype), expected)


def small_copy(of, seed=0):
    on = meshes(of, 0)
    return gather(of, make_pools(of, random_model(of, seed), on), on)


PAIRS = [
    # kv_heads, source (tp, pp), destination (tp, pp), first device of the destination
    (4, (1, 1), (1, 1), 1),
    (4, (1, 1), (1, 1), 0),  # the same device
    (4, (1, 1), (2, 1), 1),
    (4, (2, 1), (1, 1), 2),
    (4, (2, 1), (2, 1), 2),
    (4, (2, 1), (4, 1), 0),
    (4, (4, 1), (2, 1), 0),
    (2, (1, 1), (4, 1), 0),  # heads repeated at the destination
    (2, (4, 1), (1, 1), 3),  # and at the source
    (2, (4, 1), (2, 1), 1),
    (2, (4, 1), (4, 1), 0),
    (1, (2, 1), (2, 1), 2),
    (4, (1, 2), (2, 1), 2),  # stages
    (4, (2, 1), (1, 2), 2),
    (2, (2, 2), (1, 4), 0),
    (2, (4, 1), (2, 2), 0),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("kv_heads", "source", "destination", "first"), PAIRS)
def test_every_bit_lands(kv_heads, source, destination, first, dtype):
    source, destination = (layout(*degrees, kv_heads, dtype) for degrees in (source, destination))
    model = random_model(source)
    there, here = meshes(source, 0), meshes(destination, first)
    copy = gather(source, make_pools(source, model, there), there)
    transport = LocalTransport()
    handle = transport.offer("r", "p0", copy, destination, lease_s=WAIT_S)
    landed = transport.pull(handle, destination, here, timeout_s=WAIT_S)
    repeats = destination.stored_kv_heads // destination.kv_heads
    assert handle.bytes == landed.bytes == source.page_bytes() * len(PAGES) * repeats
    assert (handle.pages, handle.layout, handle.destination) == (len(PAGES), source, destination)
    assert_landed(landed, source, destination, here, model)
    transport.release(handle)
    assert transport.offers == 0


def test_one_copy_serves_two_layouts():
    source, model = layout(tp=2), random_model(layout(tp=2))
    there = meshes(source, 0)
    copy = gather(source, make_pools(source, model, there), there)
    transport = LocalTransport()
    wanted = [layout(tp=1), layout(tp=4)]
    handles = [transport.offer("r", "p0", copy, destination, WAIT_S) for destination in wanted]
    assert handles[0].id != handles[1].id
    assert transport.offers == 2
    for handle, destination in zip(handles, wanted, strict=True):
        here = meshes(destination, 0)
        assert_landed(transport.pull(handle, destination, here, WAIT_S), source, destination, here, model)
        transport.release(handle)
    assert transport.offers == 0


def test_a_donated_pool_does_not_change_what_lands():
    source, destination = layout(tp=2), layout(tp=1)
    model = random_model(source)
    there, here = meshes(source, 0), meshes(destination, 2)
    (pool,) = make_pools(source, model, there)
    copy = gather(source, [pool], there)
    handle = (transport := LocalTransport()).offer("r", "p0", copy, destination, WAIT_S)
    overwrite = jax.jit(lambda pool: jax.tree.map(lambda array: array.at[:].set(0), pool), donate_argnums=0)
    jax.block_until_ready(overwrite(pool))
    assert pool.keys.is_deleted()
    assert_landed(transport.pull(handle, destination, here, WAIT_S), source, destination, here, model)


def pull_one(transport, handle, destination=None):
    destination = destination or handle.destination
    return transport.pull(handle, destination, meshes(destination, 1), WAIT_S)


def test_released_and_unknown_handles():
    transport = LocalTransport()
    handle = transport.offer("r7", "p0", small_copy(layout()), layout(), WAIT_S)
    with pytest.raises(TransferError, match=r"r7.*p0 is gone"):
        pull_one(LocalTransport(), handle)
    transport.release(handle)
    transport.release(handle)
    with pytest.raises(TransferError, match=r"r7.*p0 is gone"):
        pull_one(transport, handle)


def test_a_lease_ends():
    now = 0
    transport = LocalTransport(clock=lambda: now)
    copy = small_copy(layout())
    handle = transport.offer("r", "p0", copy, layout(), lease_s=2.0)
    assert handle.deadline == 2_000_000_000
    now = handle.deadline - 1
    pull_one(transport, handle)
    now = handle.deadline
    with pytest.raises(TransferError, match="is gone"):
        pull_one(transport, handle)
    kept = transport.offer("s", "p0", copy, layout(), lease_s=2.0)
    assert transport.offers == 1  # the next offer sweeps out what has expired
    transport.release(kept)
    assert transport.offers == 0


def test_another_destination_than_the_copy_was_cut_for():
    transport = LocalTransport()
    handle = transport.offer("r", "p0", small_copy(layout()), layout(tp=2), WAIT_S)
    with pytest.raises(TransferError, match="cut for another layout"):
        pull_one(transport, handle, layout(tp=1))


def test_an_offer_to_another_model_is_refused():
    transport = LocalTransport()
    with pytest.raises(TransferError, match="page_size"):
        transport.offer("r", "p0", small_copy(layout()), layout(page_size=32), WAIT_S)
    assert transport.offers == 0


@pytest.fixture
def gate():
    """Holds the producer back while it is closed; opened at the end in any case."""
    event = threading.Event()
    event.set()
    yield event
    event.set()


def gated_pool(of, model, on, gate):
    """A pool whose producer runs on its device until ``gate`` opens; the gate is closed before it starts."""

    def wait(number):
        assert gate.wait(WAIT_S)
        return number

    def small(square):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), square[0, 0])

    def produce(pool, number):
        return jax.tree.map(lambda array: jnp.where(number == 0, array, jnp.zeros_like(array)), pool)

    # A program with a callback is launched in the caller's thread unless its input is still being computed.
    busy = jax.jit(lambda square: jax.lax.fori_loop(0, 40, lambda _, square: jnp.tanh(square @ square), square))
    square = jax.device_put(np.zeros((700, 700), np.float32), on[0].devices.flat[0])
    small, produce = jax.jit(small), jax.jit(produce)
    (pool,) = make_pools(of, model, on)
    jax.block_until_ready(produce(pool, small(busy(square))))
    gate.clear()
    return produce(pool, small(busy(square)))


def test_nothing_waits_for_the_producer_but_its_own_pull(gate):
    source, destination = layout(), layout()
    model = random_model(source)
    there, here, elsewhere = (meshes(source, first) for first in range(3))
    transport = LocalTransport()
    other = transport.offer("fast", "p1", gather(source, make_pools(source, model, here), here), destination, WAIT_S)
    copy = gather(source, [gated_pool(source, model, there, gate)], there)
    handle = transport.offer("slow", "p0", copy, destination, WAIT_S)
    assert not copy.stages[0][0].is_ready()
    with pytest.raises(TransferError, match=r"slow: KV did not arrive within 0\.01 s"):
        transport.pull(handle, destination, here, timeout_s=0.01)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(transport.pull, handle, destination, here, WAIT_S)
        landed = transport.pull(other, destination, elsewhere, WAIT_S)
        assert_landed(landed, source, destination, elsewhere, model)
        assert not slow.done()
        assert not copy.stages[0][0].is_ready()
        gate.set()
        assert_landed(slow.result(WAIT_S), source, destination, here, model)
