"""One pipeline stage: a sub-mesh, the layers on it with their weights and KV, its part of the state, and its programs.

A stage belongs to one driver (see :mod:`jdserve.runtime.drivers`): nothing in it is locked. An instance without
pipeline parallelism has one stage, which is the first and the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from jdserve.core.pages import pages_for
from jdserve.core.plan import Instance, Plan
from jdserve.core.spec import ModelSpec
from jdserve.models.skeleton import Skeleton
from jdserve.ops.attention import KVPool
from jdserve.ops.backends import attention_ops
from jdserve.ops.host import host_memory
from jdserve.ops.pages import read_pages, write_pages
from jdserve.runtime.buckets import Buckets, StepShape
from jdserve.runtime.budget import check_pool, free_bytes
from jdserve.runtime.state import Admission, admit, empty_state
from jdserve.runtime.steps import StepInputs, StepOutputs, step_program
from jdserve.sharding.rules import ShardingRules
from jdserve.transfer.base import Shards
from jdserve.transfer.layout import KVLayout

Load = Callable[[range, int, Callable[..., Any]], tuple[Skeleton, tuple[Array, ...]]]
"""``load(layers, stored KV heads, place)``: structure and weights of some layers; ``place`` as in ``load_params``."""


class Stage:
    """Stage ``index`` of an instance.

    Args:
        plan: that the instance is part of.
        instance: which one.
        spec: of the model.
        layout: of the instance's KV.
        buckets: of the instance.
        index: from 0.
        meshes: of all stages.
        load: gives the weights.
        rules: how logical axes lie on a mesh.

    Attributes:
        pool_sharding: of keys and of values.
    """

    def __init__(
        self,
        plan: Plan,
        instance: Instance,
        spec: ModelSpec,
        layout: KVLayout,
        buckets: Buckets,
        index: int,
        meshes: list[Mesh],
        load: Load,
        rules: ShardingRules,
    ) -> None:
        count = spec.layers // instance.pp
        self._first, self._last = index == 0, index == instance.pp - 1
        self._spec = spec
        self._page_size = plan.page_size
        self._dtype = jnp.dtype(plan.dtype)
        self._buckets = buckets
        self._mesh = meshes[index]
        platform = self._mesh.devices.flat[0].platform
        self._attention = attention_ops(platform, plan.attention, self._mesh, rules.kv_heads)
        self._whole = rules.replicated(self._mesh)
        following = meshes[index : index + 2]
        here = all(len(mesh.local_devices) == mesh.size for mesh in following)
        self._onward = None if self._last or not here else rules.replicated(following[1])
        heads = layout.stored_kv_heads
        layers = range(index * count, (index + 1) * count)
        self._model, self._leaves = load(layers, heads, lambda axes, shape: rules.sharding(self._mesh, axes, shape))
        stored = self._attention.stored_head_dim(spec.head_dim)
        self._pool_shape = (count, instance.pages + 1, heads, plan.page_size, stored)
        self.pool_sharding: NamedSharding = rules.sharding(
            self._mesh, (None, None, "kv_heads", None, None), self._pool_shape
        )
        self._pool_shardings: Any = KVPool(*(cast("Any", self.pool_sharding),) * 2)
        check_pool(plan, instance, layout, free_bytes(list(self._mesh.local_devices)), stored)
        self._programs: dict[StepShape, Any] = {}
        self._compile_helpers()
        self._make_state(pages_for(plan.max_model_len, plan.page_size))

    def _compile_helpers(self) -> None:
        pool, whole = self._pool_shardings, self._whole
        platform = self._mesh.devices.flat[0].platform
        self._admit = jax.jit(
            admit, donate_argnums=(0, 1), in_shardings=(whole, whole, whole), out_shardings=(whole, whole)
        )
        self._gather = jax.jit(
            lambda pool, pages: read_pages(pool, pages, platform, self._spec.head_dim),
            in_shardings=(pool, whole),
            out_shardings=pool,
        )
        # The pool is donated to the next step, so the number of pages stands for the end of the program.
        self._insert = jax.jit(
            lambda pool, new, pages: (write_pages(pool, new, pages, platform), pages.sum()),
            donate_argnums=0,
            in_shardings=(pool, pool, whole),
            out_shardings=(pool, whole),
        )

    def _make_state(self, width: int) -> None:
        """An empty, zeroed pool (stale NaN must not exist) and no sequence."""
        # What sampling alone needs per token of the vocabulary is kept by the stage that samples.
        vocab = self._spec.vocab if self._last else 0
        rows = {shape.segments + shape.seqs for shape in self._buckets.steps} if self._last else set[int]()
        # What a step without guided rows is given; nothing reads it.
        self._unguided: dict[int, Array] = jax.jit(
            lambda: {count: jnp.zeros((count, -(-vocab // 32)), jnp.uint32) for count in rows},
            out_shardings=self._whole,
        )()
        make = jax.jit(
            lambda: (
                KVPool(*(jnp.zeros(self._pool_shape, self._dtype) for _ in range(2))),
                empty_state(self._buckets.slots, width, vocab),
            ),
            out_shardings=(self._pool_shardings, self._whole),
        )
        self._pool, (self._fixed, self._live) = make()

    def compile(self, compiled: Callable[[], None]) -> None:
        """Compile the program of every bucket ahead of time; says so after each."""
        attention = self._attention
        pool, whole = self._pool_shardings, self._whole
        for shape in self._buckets.steps:
            rows = shape.tokens + shape.seqs
            hidden = None if self._first else jax.ShapeDtypeStruct((rows, self._spec.hidden), self._dtype)
            step = jax.jit(
                step_program(self._model, shape, attention, self._page_size, first=self._first, last=self._last),
                donate_argnums=(1, 3),
                in_shardings=(tuple(leaf.sharding for leaf in self._leaves), pool, whole, whole, whole, whole),
                out_shardings=(pool, whole, whole),
            )
            inputs = StepInputs(
                np.zeros((4, shape.tokens), np.int32),
                np.zeros((4, shape.segments), np.int32),
                np.zeros((4, shape.seqs), np.int32),
                self._unguided.get(shape.segments + shape.seqs),
            )
            lowered = step.lower(self._leaves, self._pool, self._fixed, self._live, inputs, hidden)
            self._programs[shape] = lowered.compile()
            compiled()

    def admit(self, row: Admission) -> None:
        """Write one sequence into its slot."""
        self._fixed, self._live = self._admit(self._fixed, self._live, row)

    def run(self, shape: StepShape, inputs: StepInputs, hidden: Array | None = None) -> Any:
        """Launch one program.

        Args:
            shape: of the program.
            inputs: from the host.
            hidden: ``[T + B, E]`` that the stage before gave, on this stage's mesh; None on the first one.

        Returns:
            StepOutputs on the last stage; elsewhere what the next stage takes as ``hidden``, on that one's mesh if
            both meshes are wholly in this process, else still on this stage's.
        """
        outputs: StepOutputs | Array
        if not self._last:
            inputs = inputs._replace(allowed=None)
        elif inputs.allowed is None:
            inputs = inputs._replace(allowed=self._unguided[shape.segments + shape.seqs])
        self._pool, self._live, outputs = self._programs[shape](
            self._leaves, self._pool, self._fixed, self._live, inputs, hidden
        )
        return outputs if self._onward is None else jax.device_put(outputs, self._onward)

    def gather(self, pages: np.ndarray) -> tuple[Array, Array]:
        """Copy pages out of the pool."""
        copy = self._gather(self._pool, pages)
        return copy.keys, copy.values

    def read(self, take: Callable[[Shards], None]) -> None:
        """Wait for the pool, and have ``take`` read the memory that it lies in on each device."""
        jax.block_until_ready(self._pool)
        order = list(self._mesh.devices.flat)
        keys, values = ({shard.device: shard.data for shard in array.addressable_shards} for array in self._pool)
        take([(host_memory(keys[device]), host_memory(values[device])) for device in order])

    def insert(self, keys: Array, values: Array, pages: np.ndarray) -> Array:
        """Write pages into the pool in place; what it gives is ready when ``keys`` and ``values`` have been read."""
        self._pool, read = self._insert(self._pool, KVPool(keys, values), pages)
        return read

    def intact(self) -> bool:
        """Whether pool and state are there, and no program that should have written them has failed."""
        try:
            jax.block_until_ready((self._pool, self._live))
        except Exception:
            return False
        return True
