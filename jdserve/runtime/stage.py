"""One pipeline stage: a sub-mesh, the layers on it with their weights and KV, its part of the state, and its programs.

A stage belongs to one driver (see :mod:`jdserve.runtime.drivers`): nothing in it is locked. An instance without
pipeline parallelism has one stage, which is the first and the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jdserve.core.plan import Instance, Plan
from jdserve.core.spec import ModelSpec
from jdserve.models.skeleton import Skeleton
from jdserve.ops.attention import KVPool
from jdserve.ops.host import host_memory
from jdserve.runtime.buckets import Buckets, StepShape
from jdserve.runtime.budget import check_pool, free_bytes
from jdserve.runtime.programs import StagePrograms
from jdserve.runtime.state import Admission
from jdserve.runtime.steps import StepInputs, StepOutputs
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
        mesh = meshes[index]
        following = meshes[index : index + 2]
        here = all(len(one.local_devices) == one.size for one in following)
        self._buckets = buckets
        self._mesh = mesh
        self._stage = programs = StagePrograms(plan, instance, spec, layout, buckets, index, mesh, rules)
        self._onward = None if programs.last or not here else rules.replicated(following[1])
        self._model, self._leaves = load(programs.layers, layout.stored_kv_heads, programs.place)
        self.pool_sharding = programs.pool_sharding
        check_pool(plan, instance, layout, free_bytes(list(mesh.local_devices)), programs.stored_head_dim)
        self._programs: dict[StepShape, Any] = {}
        self._pool, (self._fixed, self._live) = programs.state()
        self._unguided: dict[int, Array] = programs.unguided()

    def compile(self, compiled: Callable[[], None]) -> None:
        """Compile the program of every bucket ahead of time; says so after each."""
        for shape in self._buckets.steps:
            traced = self._stage.trace(shape, self._model, self._leaves, self._pool, self._fixed, self._live)
            self._programs[shape] = traced.lower().compile()
            compiled()

    def admit(self, row: Admission) -> None:
        """Write one sequence into its slot."""
        self._fixed, self._live = self._stage.admit(self._fixed, self._live, row)

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
        if not self._stage.last:
            inputs = inputs._replace(allowed=None)
        elif inputs.allowed is None:
            inputs = inputs._replace(allowed=self._unguided[shape.segments + shape.seqs])
        self._pool, self._live, outputs = self._programs[shape](
            self._leaves, self._pool, self._fixed, self._live, inputs, hidden
        )
        return outputs if self._onward is None else jax.device_put(outputs, self._onward)

    def gather(self, pages: np.ndarray) -> tuple[Array, Array]:
        """Copy pages out of the pool."""
        copy = self._stage.gather(self._pool, pages)
        return copy.keys, copy.values

    def read(self, take: Callable[[Shards], None]) -> None:
        """Wait for the pool, and have ``take`` read the memory that it lies in on each device."""
        jax.block_until_ready(self._pool)
        order = list(self._mesh.devices.flat)
        keys, values = ({shard.device: shard.data for shard in array.addressable_shards} for array in self._pool)
        take([(host_memory(keys[device]), host_memory(values[device])) for device in order])

    def insert(self, keys: Array, values: Array, pages: np.ndarray) -> Array:
        """Write pages into the pool in place; what it gives is ready when ``keys`` and ``values`` have been read."""
        self._pool, read = self._stage.insert(self._pool, KVPool(keys, values), pages)
        return read

    def intact(self) -> bool:
        """Whether pool and state are there, and no program that should have written them has failed."""
        try:
            jax.block_until_ready((self._pool, self._live))
        except Exception:
            return False
        return True
