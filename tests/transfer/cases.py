"""Small KV caches of random bits, producers that can be held back, and what must have landed."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from jdserve.ops.attention import KVPool
from jdserve.ops.host import host_memory
from jdserve.sharding.rules import ShardingRules, instance_mesh
from jdserve.transfer.base import KVCopy
from jdserve.transfer.layout import KVLayout
from jdserve.transfer.pieces import assemble

POOL_PAGES = 7
PAGES = (5, 2, 6, 0)  # the last one is padding
BITS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16, "int8": np.uint8}
WAIT_S = 60.0
HOST = "127.0.0.1"

DEGREES = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]


def layout(tp=1, pp=1, kv_heads=4, dtype="float32", **other):
    fields = {"layers": 4, "head_dim": 4, "page_size": 16} | other
    return KVLayout(kv_heads=kv_heads, dtype=dtype, tp=tp, pp=pp, **fields)


def meshes(of, first):
    """One mesh per stage; own devices from ``first`` on, around the end where four are not enough."""
    devices = jax.local_devices()[:4]
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
    return Held(KVCopy(of, stages, len(pages)))


class Held:
    """Pages that were copied already; as an executor's they can be read, on a thread per stage."""

    def __init__(self, copy):
        self.layout, self.pages, self.stages, self._copy = copy.layout, copy.pages, copy.stages, copy

    def copy(self):
        return self._copy

    def read(self, take, failed):
        for stage, arrays in enumerate(self._copy.stages):
            threading.Thread(target=self._read, args=(stage, arrays, take, failed), daemon=True).start()

    def _read(self, stage, arrays, take, failed):
        try:
            jax.block_until_ready(arrays)
            order = arrays[0].sharding.mesh.devices.flat
            shards = [{shard.device: shard.data for shard in array.addressable_shards} for array in arrays]
            take(stage, [tuple(host_memory(one[device]) for one in shards) for device in order], range(self.pages))
        except Exception:
            failed()


def small_copy(of, seed=0):
    """The same pages of the model with that seed, without a pool."""
    pages = [bits[:, list(PAGES)] for bits in random_model(of, seed)]
    stages = [
        tuple(
            jax.device_put(stored(of, bits, stage).view(jnp.dtype(of.dtype)), pool_sharding(of, mesh)) for bits in pages
        )
        for stage, mesh in enumerate(meshes(of, 0))
    ]
    return Held(KVCopy(of, stages, len(PAGES)))


def landed_bits(landed, source, destination, on):
    """Bits of the assembled stages, as a destination's insert would read them."""
    shardings = [pool_sharding(destination, mesh) for mesh in on]
    stages = assemble(landed, source, destination, shardings)
    assert landed.pages == len(PAGES)
    assert len(stages) == destination.pp
    for arrays, sharding in zip(stages, shardings, strict=True):
        assert all(array.sharding == sharding for array in arrays)
    return [[np.asarray(array).view(BITS[destination.dtype]) for array in arrays] for arrays in stages]


def assert_landed(landed, source, destination, on, seed=0):
    """Every bit of the model with that seed is there; hands the memory back."""
    model = random_model(source, seed)
    for stage, arrays in enumerate(landed_bits(landed, source, destination, on)):
        for found, bits in zip(arrays, model, strict=True):
            assert np.array_equal(found, stored(destination, bits, stage)[:, list(PAGES)])
    landed.done()


def multiply(square):
    """Something to compute for a tenth of a second."""
    return jax.lax.fori_loop(0, 30, lambda _, square: jnp.tanh(square @ square), square)


class Gate:
    """Holds producers back while it is closed; it is open at first."""

    def __init__(self):
        self.event = threading.Event()
        self.event.set()

    def copy(self, of, seed=0, error=None):
        """A copy whose producer has started, and waits for the gate, which is closed now; then it may fail."""

        def wait(number):
            assert self.event.wait(WAIT_S)
            if error is not None:
                raise error
            return number

        def small(square):
            return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), square[0, 0])

        def produce(pool, number):
            return jax.tree.map(lambda array: jnp.where(number == 0, array, jnp.zeros_like(array)), pool)

        on = meshes(of, 0)
        square = jax.device_put(np.zeros((500, 500), np.float32), on[0].devices.flat[0])
        (pool,) = make_pools(of, random_model(of, seed), on)
        small, produce = jax.jit(small), jax.jit(produce)
        # A program with a callback is launched in the caller's thread unless its input is still being computed.
        busy = jax.jit(multiply).lower(square).compile()
        small = small.lower(square).compile()
        jax.block_until_ready(produce(pool, np.float32(0)))
        self.event.clear()
        copy = gather(of, [produce(pool, small(busy(square)))], on)
        assert not copy.stages[0][0].is_ready()
        return copy


def eventually(true):
    """Wait until another thread or process has made something true."""
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)
