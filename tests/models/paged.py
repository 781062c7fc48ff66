"""A model over a paged pool without a runtime: prompts in chunks, then tokens one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdserve.core.spec import ModelSpec
from jdserve.models.skeleton import Skeleton, skeleton
from jdserve.ops.attention import KVPool, decode_attention, prefill_attention, write_kv

PAGE = 16


class Paged:
    """One sequence through layers ``layers``.

    Args:
        structure, leaves: the module and its weights.
        spec: of the whole model.
        layers: of the module.
        kv_heads: that it stores.
        chunk: prompt tokens of one launch.
        longest: tokens of the sequence.
    """

    def __init__(
        self,
        structure: Skeleton,
        leaves: Sequence[jax.Array],
        spec: ModelSpec,
        *,
        layers: range | None = None,
        kv_heads: int | None = None,
        chunk: int = 64,
        longest: int = 128,
    ) -> None:
        layers = layers or range(spec.layers)
        self.first, self.last = layers.start == 0, layers.stop == spec.layers
        self.spec, self.structure, self.leaves, self.chunk = spec, structure, tuple(leaves), chunk
        pages = -(-longest // PAGE)
        shape = (len(layers), pages + 1, kv_heads or spec.kv_heads, PAGE, spec.head_dim)
        self.pool = KVPool(*(jnp.zeros(shape, jnp.float32) for _ in range(2)))
        # In no order, so that a page number is not the place of its tokens.
        self.table = np.random.default_rng(3).permutation(np.arange(1, pages + 1, dtype=np.int32))
        self.prefill = jax.jit(self._prefill)
        self.decode = jax.jit(self._decode)
        self.head = jax.jit(lambda leaves, x: structure.merge(leaves).logits(x))

    def _layers(self, leaves: Any, pool: KVPool, given: Any, place: Any, length: Any, alive: Any, attend: Any) -> Any:
        model = self.structure.merge(leaves)
        # Padding rows write to the null page.
        pages = jnp.where(alive, jnp.asarray(self.table)[place // PAGE], 0)

        def store(layer, q, k, v, kv, window=None):
            kv = write_kv(kv, layer, k, v, pages, place % PAGE)
            return attend(layer, q, k, v, kv, window), kv

        x = model.embed(given) if self.first else given
        return model.layers(x, place, store, pool, jnp.maximum(length, place + 1))

    def _prefill(self, leaves: Any, pool: KVPool, given: Any, start: Any, count: Any, length: Any) -> Any:
        offset = jnp.arange(self.chunk, dtype=jnp.int32)
        alive = offset < count

        def attend(layer, q, k, v, kv, window):
            segment = jnp.where(alive, 0, 1)
            return prefill_attention(q, k, v, kv, layer, segment, self.table[None], start[None], window)

        place = jnp.where(alive, start + offset, 0)
        return self._layers(leaves, pool, given, place, length, alive, attend)

    def _decode(self, leaves: Any, pool: KVPool, given: Any, place: Any) -> Any:
        def attend(layer, q, k, v, kv, window):
            # Beside a padding row, as in a batch that is not full.
            tables, context = np.stack((self.table, 0 * self.table)), jnp.stack((place + 1, jnp.int32(0)))
            return decode_attention(jnp.concatenate((q, q)), kv, layer, tables, context, window)[:1]

        return self._layers(leaves, pool, given, place[None], jnp.int32(0), jnp.array([True]), attend)

    def prompt(self, given: Any) -> np.ndarray:
        """Tokens [T] (or rows [T, hidden] of the stage before) in chunks; rows [T, hidden]."""
        rows = []
        for start in range(0, len(given), self.chunk):
            part = np.asarray(given[start : start + self.chunk])
            padding = [(0, self.chunk - len(part))] + [(0, 0)] * (part.ndim - 1)
            x, self.pool = self.prefill(
                self.leaves,
                self.pool,
                np.pad(part, padding),
                jnp.int32(start),
                jnp.int32(len(part)),
                jnp.int32(len(given)),
            )
            rows.append(np.asarray(x)[: len(part)])
        return np.concatenate(rows)

    def step(self, given: Any, place: int) -> np.ndarray:
        """One token [1] (or row [1, hidden]) at ``place``; its row."""
        x, self.pool = self.decode(self.leaves, self.pool, np.asarray(given), jnp.int32(place))
        return np.asarray(x)

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Rows [N, hidden] of the last layer to logits."""
        return np.asarray(self.head(self.leaves, jnp.asarray(rows)))


def read_leaves(spec: ModelSpec, layers: range, weights: dict[str, np.ndarray]) -> tuple[Skeleton, tuple[Any, ...]]:
    """Structure and float32 weights of some layers, from the tensors of a checkpoint."""
    structure = skeleton(spec, layers, kv_heads=spec.kv_heads, dtype="float32")
    return structure, tuple(jnp.asarray(one.read(weights.__getitem__)) for one in structure.parameters)
