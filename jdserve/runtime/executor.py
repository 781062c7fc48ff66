"""The device seam: everything that the runtime asks of a mesh, and the executor that does it with jax.

An executor belongs to the launcher thread of its instance: no other thread calls it, so nothing in it is locked.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jdserve.compat import Device
from jdserve.core.pages import pages_for
from jdserve.core.plan import Instance, Plan
from jdserve.core.request import Request, SamplingParams
from jdserve.core.spec import ModelSpec
from jdserve.models.skeleton import Skeleton
from jdserve.ops.attention import KVPool, attention_ops
from jdserve.policy.commands import RunStep
from jdserve.runtime.buckets import Buckets, Launch, StepShape, buckets_for, fitting, split
from jdserve.runtime.results import AdmittedSeq, LaunchedStep, PendingStep
from jdserve.runtime.state import admission, admit, empty_state
from jdserve.runtime.steps import StepInputs, StepOutputs, step_program
from jdserve.sharding.rules import ShardingRules, instance_mesh
from jdserve.transfer.base import KVCopy, Landed
from jdserve.transfer.layout import KVLayout
from jdserve.transfer.pieces import assemble


class Executor(Protocol):
    """What runs the steps of one instance."""

    @property
    def layout(self) -> KVLayout:
        """How this instance stores KV."""
        ...

    def warm_up(self, progress: Callable[[float], None]) -> None:
        """Compile and run every program once; afterwards nothing is compiled any more."""
        ...

    def admit(self, request: Request, pages: tuple[int, ...]) -> None:
        """Keep the state of ``request`` on the device: before its first chunk, or with its KV in ``pages``."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop that state; unknown ids are ignored."""
        ...

    def launch(self, step: RunStep) -> PendingStep:
        """Start a step over admitted requests."""
        ...

    @property
    def transfer_sizes(self) -> Seq[int]:
        """Pages in a gather or an insert, ascending: every other number is padded to one of these."""
        ...

    def gather(self, pages: tuple[int, ...]) -> KVCopy:
        """Copy ``pages`` out of the pool."""
        ...

    def pull(self, pull: Callable[..., Landed]) -> Landed:
        """Call ``pull(layout, meshes)`` of a transport; the one method that any thread may call."""
        ...

    def insert(self, landed: Landed, source: KVLayout, pages: tuple[int, ...]) -> None:
        """Put landed KV into ``pages`` of the pool."""
        ...

    @property
    def intact(self) -> bool:
        """Whether the pool is still there: a step that broke on the device takes the donated pool with it."""
        ...


class JaxExecutor:
    """Executor over one mesh of tensor-parallel devices.

    Args:
        plan: that the instance is part of.
        instance: which one.
        spec: of the model.
        devices: of the mesh, in order.
        load: gives skeleton and leaves for (stored KV heads, sharding of (logical axes, shape)).
        rules: how logical axes lie on the mesh.
    """

    def __init__(
        self,
        plan: Plan,
        instance: Instance,
        spec: ModelSpec,
        devices: Seq[Device],
        load: Callable[[int, Callable[..., Any]], tuple[Skeleton, tuple[Array, ...]]],
        rules: ShardingRules | None = None,
    ) -> None:
        self._spec = spec
        self._page_size = plan.page_size
        self._longest = plan.max_model_len
        self._width = pages_for(plan.max_model_len, plan.page_size)
        self._pages = instance.pages
        self._dtype = jnp.dtype(plan.dtype)
        self._buckets: Buckets = buckets_for(plan, instance)
        self._rules = rules or ShardingRules()
        self._mesh = instance_mesh(list(devices))
        self._whole = self._rules.replicated(self._mesh)
        self.layout = KVLayout(
            spec.layers, spec.kv_heads, spec.head_dim, plan.page_size, plan.dtype, instance.tp, instance.pp
        )
        heads = self.layout.stored_kv_heads
        self._model, self._leaves = load(heads, lambda axes, shape: self._rules.sharding(self._mesh, axes, shape))
        self._pool_shape = (spec.layers, self._pages + 1, heads, plan.page_size, spec.head_dim)
        self._pool_sharding = self._rules.sharding(self._mesh, (None, None, "kv_heads", None, None), self._pool_shape)
        self._pool_shardings: Any = KVPool(*(cast("Any", self._pool_sharding),) * 2)
        self._programs: dict[StepShape, Any] = {}
        self._compile_helpers()
        self._make_state()

    def _compile_helpers(self) -> None:
        pool, whole = self._pool_shardings, self._whole
        self._admit = jax.jit(
            admit, donate_argnums=(0, 1), in_shardings=(whole, whole, whole), out_shardings=(whole, whole)
        )
        self._gather = jax.jit(
            lambda pool, pages: KVPool(pool.keys[:, pages], pool.values[:, pages]),
            in_shardings=(pool, whole),
            out_shardings=pool,
        )
        self._insert = jax.jit(
            lambda pool, new, pages: KVPool(
                pool.keys.at[:, pages].set(new.keys), pool.values.at[:, pages].set(new.values)
            ),
            donate_argnums=0,
            in_shardings=(pool, pool, whole),
            out_shardings=pool,
        )

    @property
    def intact(self) -> bool:
        """Whether the pool was not lost to a launch that failed."""
        return not self._pool.keys.is_deleted()

    def _make_state(self) -> None:
        """An empty, zeroed pool (stale NaN must not exist) and no sequence."""
        zeros = jax.jit(
            lambda: KVPool(*(jnp.zeros(self._pool_shape, self._dtype) for _ in range(2))),
            out_shardings=self._pool_shardings,
        )
        self._pool = zeros()
        self._fixed, self._live = jax.device_put(
            empty_state(self._buckets.slots, self._width, self._spec.vocab), self._whole
        )
        self._seqs: dict[str, AdmittedSeq] = {}
        self._slots = list(range(self._buckets.slots - 1, -1, -1))

    def warm_up(self, progress: Callable[[float], None]) -> None:
        """Compile every bucket ahead of time and run it once on padding."""
        shapes = self._buckets.steps
        attention = attention_ops(self._mesh.devices.flat[0].platform)
        pool = self._pool_shardings
        for index, shape in enumerate(shapes):
            step = jax.jit(
                step_program(self._model, shape, attention, self._page_size),
                donate_argnums=(1, 3),
                in_shardings=(
                    tuple(leaf.sharding for leaf in self._leaves),
                    pool,
                    self._whole,
                    self._whole,
                    self._whole,
                ),
                out_shardings=(pool, self._whole, self._whole),
            )
            inputs = self._inputs(Launch(shape))
            lowered = step.lower(self._leaves, self._pool, self._fixed, self._live, inputs)
            self._programs[shape] = lowered.compile()
            jax.block_until_ready(self._run(shape, inputs))
            progress((index + 1) / (len(shapes) + 1))
        # The dummy slot stays greedy: otherwise every padded batch would draw noise for all of its rows.
        self._admit_row(Request("", (0,), SamplingParams(temperature=0.0)), (), self._buckets.slots)
        jax.block_until_ready(self._pool)
        progress(1.0)

    def admit(self, request: Request, pages: tuple[int, ...]) -> None:
        """Write the request's row on the device."""
        slot = self._slots.pop()
        self._seqs[request.id] = AdmittedSeq(request, slot, len(pages))
        self._admit_row(request, pages, slot)

    def _admit_row(self, request: Request, pages: tuple[int, ...], slot: int) -> None:
        row = admission(
            request,
            pages,
            slot,
            width=self._width,
            longest=self._longest,
            vocab=self._spec.vocab,
            eos=self._spec.eos,
        )
        self._fixed, self._live = self._admit(self._fixed, self._live, row)

    def forget(self, request_id: str) -> None:
        """Free the request's slot."""
        seq = self._seqs.pop(request_id, None)
        if seq is not None:
            self._slots.append(seq.slot)

    def launch(self, step: RunStep) -> PendingStep:
        """Launch every part of the step; parts follow each other on the device without the host."""
        launches = split(self._buckets, step.chunks, step.decodes)
        outputs = [self._run(launch.shape, self._inputs(launch)) for launch in launches]
        return LaunchedStep(tuple(zip(launches, outputs, strict=True)), self._seqs)

    def _run(self, shape: StepShape, inputs: StepInputs) -> StepOutputs:
        self._pool, self._live, outputs = self._programs[shape](
            self._leaves, self._pool, self._fixed, self._live, inputs
        )
        return outputs

    def _inputs(self, launch: Launch) -> StepInputs:
        """Host inputs, in fresh arrays: jax may still read those of an earlier launch."""
        shape, dummy = launch.shape, self._buckets.slots
        chunk_tokens = np.zeros((4, shape.tokens), np.int32)
        chunk_tokens[2] = shape.segments
        chunk_tokens[3] = -1
        chunks = np.zeros((4, shape.segments), np.int32)
        chunks[0] = dummy
        at = 0
        for index, chunk in enumerate(launch.chunks):
            seq = self._seqs[chunk.request_id]
            stop = chunk.start + chunk.count
            place = slice(at, at + chunk.count)
            at += chunk.count
            chunk_tokens[0, place] = seq.request.prompt[chunk.start : stop]
            chunk_tokens[1, place] = np.arange(chunk.start, stop)
            chunk_tokens[2, place] = index
            if seq.request.params.prompt_logprobs is not None:
                following = seq.request.prompt[chunk.start + 1 : stop + 1]
                chunk_tokens[3, place.start : place.start + len(following)] = following
            chunks[:, index] = seq.slot, chunk.start, at - 1, chunk.last
        decodes = np.zeros((3, shape.seqs), np.int32)
        decodes[0] = dummy
        decodes[1] = self._width
        for index, decode in enumerate(launch.decodes):
            seq = self._seqs[decode.request_id]
            decodes[0, index] = seq.slot
            if len(decode.pages) > seq.pages:
                decodes[1, index], decodes[2, index] = seq.pages, decode.pages[seq.pages]
                seq.pages += 1
        return StepInputs(chunk_tokens, chunks, decodes)

    @property
    def transfer_sizes(self) -> Seq[int]:
        """Buckets of the instance."""
        return self._buckets.transfers

    def gather(self, pages: tuple[int, ...]) -> KVCopy:
        """Copy pages out of the pool, padded to a bucket with the null page."""
        size = fitting(self._buckets.transfers, len(pages))
        keys, values = self._gather(self._pool, _padded(pages, size))
        return KVCopy(self.layout, [(keys, values)], size)

    def pull(self, pull: Callable[..., Landed]) -> Landed:
        """Let a transport land KV on this mesh."""
        return pull(self.layout, [self._mesh])

    def insert(self, landed: Landed, source: KVLayout, pages: tuple[int, ...]) -> None:
        """Write landed KV into the pool in place; padding goes to the null page."""
        ((keys, values),) = assemble(landed, source, self.layout, [self._pool_sharding])
        self._pool = self._insert(self._pool, KVPool(keys, values), _padded(pages, landed.pages))


def _padded(pages: tuple[int, ...], size: int) -> np.ndarray:
    padded = np.zeros(size, np.int32)
    padded[: len(pages)] = pages
    return padded
