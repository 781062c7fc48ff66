"""The attention back ends by name: the XLA functions, and kernels in their place.

A kernel is one device's: on a mesh it runs inside ``shard_map``, each device with its share of the stored KV heads and
the query heads that belong to them. Where there are more devices than KV heads the pool holds repeated ones, so they
split as well. The XLA functions need none of this: the compiler splits them itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdserve.core.backends import Attention, attention_for
from jdserve.ops import attention, tpu_decode, triton_decode, triton_prefill
from jdserve.ops.attention import AttentionOps, KVPool


def _triton(*, interpret: bool) -> AttentionOps:
    return AttentionOps(
        functools.partial(triton_decode.decode_attention, interpret=interpret),
        functools.partial(triton_prefill.prefill_attention, interpret=interpret),
    )


_KERNELS: Mapping[Attention, Callable[[], AttentionOps]] = {
    "pallas_triton": lambda: _triton(interpret=False),
    "pallas_interpret": lambda: _triton(interpret=True),
    # Prefill over XLA's reading of pages: its scores are those of a launch with itself and of 256 tokens of a prefix.
    "tpu": lambda: AttentionOps(tpu_decode.decode_attention, attention.prefill_attention, lanes=tpu_decode.LANES),
}

_XLA = AttentionOps(attention.decode_attention, attention.prefill_attention)


def attention_ops(
    platform: str | None = None, name: Attention = "auto", mesh: Mesh | None = None, axis: str | None = None
) -> AttentionOps:
    """The attention functions of one back end.

    Args:
        platform: ``cpu``, ``gpu`` or ``tpu``; that of the default device where it is None.
        name: of the back end, ``auto`` for the one of the platform.
        mesh: that the functions run on, None for one device.
        axis: of the mesh, which splits the heads; None where every device has them all.

    Raises:
        InvalidPlan: the platform cannot run it.
    """
    chosen = attention_for(platform or jax.default_backend(), name)
    if chosen == "xla":
        return _XLA
    kernels = _KERNELS[chosen]()
    return kernels if mesh is None else _sharded(kernels, mesh, axis)


def _sharded(kernels: AttentionOps, mesh: Mesh, axis: str | None) -> AttentionOps:
    """``kernels``, each device of ``mesh`` with its own heads."""
    whole, heads = P(), P(None, axis)
    pools: Any = KVPool(*(cast("Any", P(None, None, axis)),) * 2)

    def over(run: Callable[..., Array], *specs: Any) -> Callable[..., Array]:
        # A kernel says nothing of what varies over the mesh.
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)

    def decode(q: Array, pool: KVPool, layer: int, tables: Array, context: Array, window: int | None = None) -> Array:
        def run(q: Array, pool: KVPool, tables: Array, context: Array) -> Array:
            return kernels.decode(q, pool, layer, tables, context, window)

        return over(run, heads, pools, whole, whole)(q, pool, tables, context)

    def prefill(
        q: Array,
        k: Array,
        v: Array,
        pool: KVPool,
        layer: int,
        segments: Array,
        tables: Array,
        prefix: Array,
        window: int | None = None,
    ) -> Array:
        def run(q: Array, k: Array, v: Array, pool: KVPool, segments: Array, tables: Array, prefix: Array) -> Array:
            return kernels.prefill(q, k, v, pool, layer, segments, tables, prefix, window)

        return over(run, heads, heads, heads, pools, whole, whole, whole)(q, k, v, pool, segments, tables, prefix)

    return AttentionOps(decode, prefill, kernels.lanes)
