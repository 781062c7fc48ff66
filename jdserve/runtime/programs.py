"""The programs of one pipeline stage, and the shapes and shardings of what they take.

No array is in here, so that the same programs can be compiled for devices that this machine does not have.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding

from jdserve.core.pages import pages_for
from jdserve.core.plan import Instance, Plan
from jdserve.core.spec import ModelSpec
from jdserve.models.skeleton import Skeleton
from jdserve.ops.attention import AttentionOps, KVPool
from jdserve.ops.backends import attention_ops
from jdserve.ops.pages import read_pages, write_pages
from jdserve.runtime.buckets import Buckets, StepShape
from jdserve.runtime.state import FixedState, LiveState, admit, empty_state
from jdserve.runtime.steps import StepInputs, step_program
from jdserve.sharding.rules import ShardingRules
from jdserve.transfer.layout import KVLayout


class StagePrograms:
    """Programs of stage ``index`` of an instance.

    Attributes:
        whole: sharding of what every device holds whole.
        pool_sharding: of keys and of values.
        attention: functions of the steps.
        stored_head_dim: of the pool.
        admit, gather, insert: jitted; see :class:`~jdserve.runtime.stage.Stage`.

    Args:
        plan: that the instance is part of.
        instance: which one.
        spec: of the model.
        layout: of the instance's KV.
        buckets: of the instance.
        index: from 0.
        mesh: of the stage.
        rules: how logical axes lie on it.
    """

    def __init__(
        self,
        plan: Plan,
        instance: Instance,
        spec: ModelSpec,
        layout: KVLayout,
        buckets: Buckets,
        index: int,
        mesh: Mesh,
        rules: ShardingRules,
    ) -> None:
        count = spec.layers // instance.pp
        self.layers = range(index * count, (index + 1) * count)
        self.first, self.last = index == 0, index == instance.pp - 1
        self._spec, self._rules, self._mesh = spec, rules, mesh
        self._page_size, self._dtype = plan.page_size, jnp.dtype(plan.dtype)
        self._slots, self._width = buckets.slots, pages_for(plan.max_model_len, plan.page_size)
        platform: str = mesh.devices.flat[0].platform
        self.attention: AttentionOps = attention_ops(platform, plan.attention, mesh, rules.kv_heads)
        self.stored_head_dim = stored = self.attention.stored_head_dim(spec.head_dim)
        self._sampled = {shape.segments + shape.seqs for shape in buckets.steps} if self.last else set[int]()
        self.whole = rules.replicated(mesh)
        self._pool_shape = (count, instance.pages + 1, layout.stored_kv_heads, plan.page_size, stored)
        self.pool_sharding: NamedSharding = rules.sharding(mesh, (None, None, "kv_heads", None, None), self._pool_shape)
        pool: Any = KVPool(*(cast("Any", self.pool_sharding),) * 2)
        whole = self.whole
        self._pool = pool
        self.admit = jax.jit(
            admit, donate_argnums=(0, 1), in_shardings=(whole, whole, whole), out_shardings=(whole, whole)
        )
        self.gather = jax.jit(
            lambda pool, pages: read_pages(pool, pages, platform, spec.head_dim),
            in_shardings=(pool, whole),
            out_shardings=pool,
        )
        # The pool is donated to the next step, so the number of pages stands for the end of the program.
        self.insert = jax.jit(
            lambda pool, new, pages: (write_pages(pool, new, pages, platform), pages.sum()),
            donate_argnums=0,
            in_shardings=(pool, pool, whole),
            out_shardings=(pool, whole),
        )

    def place(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Where a parameter lives; see :data:`~jdserve.models.load.Place`."""
        return self._rules.sharding(self._mesh, axes, shape)

    @property
    def state(self) -> Any:
        """``state() -> pool, (fixed, live)``, jitted: an empty, zeroed pool (stale NaN must not exist), no sequence."""
        # What sampling alone needs per token of the vocabulary is kept by the stage that samples.
        vocab = self._spec.vocab if self.last else 0
        return jax.jit(
            lambda: (
                KVPool(*(jnp.zeros(self._pool_shape, self._dtype) for _ in range(2))),
                empty_state(self._slots, self._width, vocab),
            ),
            out_shardings=(self._pool, self.whole),
        )

    @property
    def unguided(self) -> Any:
        """``unguided()``, jitted: by sampled rows, what a step without guided rows is given; nothing reads it."""
        words = -(-self._spec.vocab // 32)
        return jax.jit(
            lambda: {rows: jnp.zeros((rows, words), jnp.uint32) for rows in self._sampled}, out_shardings=self.whole
        )

    def trace(
        self,
        shape: StepShape,
        model: Skeleton,
        leaves: tuple[Array, ...],
        pool: KVPool,
        fixed: FixedState,
        live: LiveState,
    ) -> Any:
        """The step program of ``shape``, traced for what it is going to run on; ``lower().compile()`` is left to do.

        Args:
            shape: of the program.
            model: structure of the layers.
            leaves: weights of the layers, or their shapes with shardings, as all that follows.
            pool: of the stage.
            fixed: state that no step changes.
            live: state that steps change.
        """
        whole, pools = self.whole, self._pool
        step = jax.jit(
            step_program(
                model,
                shape,
                self.attention,
                self._page_size,
                first=self.first,
                last=self.last,
                spread=self._spread,
            ),
            donate_argnums=(1, 3),
            in_shardings=(tuple(leaf.sharding for leaf in leaves), pools, whole, whole, whole, whole),
            out_shardings=(pools, whole, whole),
        )
        sampled = shape.segments + shape.seqs
        inputs = StepInputs(
            np.zeros((4, shape.tokens), np.int32),
            np.zeros((4, shape.segments), np.int32),
            np.zeros((4, shape.seqs), np.int32),
            jax.ShapeDtypeStruct((sampled, -(-self._spec.vocab // 32)), jnp.uint32) if self.last else None,
        )
        rows = shape.tokens + shape.seqs
        hidden = None if self.first else jax.ShapeDtypeStruct((rows, self._spec.hidden), self._dtype)
        return step.trace(leaves, pool, fixed, live, inputs, hidden)

    def _spread(self, hidden: Array) -> Array:
        """The residual stream, its rows spread over the devices where the rules say so."""
        if self._rules.tokens is None:
            return hidden
        return lax.with_sharding_constraint(hidden, self.place(("tokens", "embed"), hidden.shape))
