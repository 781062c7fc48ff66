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
    """One sequence through a whole model.

    Args:
        structure, leaves: the module and its weights.
        spec: of the whole model.
        chunk: prompt tokens of one launch.
        longest: tokens of the sequence.
    """

    def __init__(
        self,
        structure: Skeleton,
        leaves: Sequence[jax.Array],
        spec: ModelSpec,
        *,
        chunk: int = 64,
        longest: int = 128,
    ) -> None:
        self.structure, self.leaves, self.chunk = structure, tuple(leaves), chunk
        pages = -(-longest // PAGE)
        shape = (spec.layers, pages + 1, spec.kv_heads, PAGE, spec.head_dim)
        self.pool = KVPool(*(jnp.zeros(shape, jnp.float32) for _ in range(2)))
        # In no order, so that a page number is not the place of its tokens.
        self.table = np.random.default_rng(3).permutation(np.arange(1, pages + 1, dtype=np.int32))
        self.run = jax.jit(self._run)
        self.head = jax.jit(lambda leaves, x: structure.merge(leaves).logits(x))

    def _run(self, leaves: Any, pool: KVPool, given: Any, start: Any, count: Any, length: Any, context: Any) -> Any:
        """``count`` rows of a chunk at ``start`` of a prompt of ``length``, then one that decodes, of ``context``.

        As in a batch, rows of padding go along: behind the chunk, and one that decodes nothing beside the other.
        """
        model, chunk = self.structure.merge(leaves), self.chunk
        offset = jnp.arange(chunk, dtype=jnp.int32)
        contexts = jnp.stack((context, jnp.int32(0)))
        place = jnp.concatenate((jnp.where(offset < count, start + offset, 0), jnp.maximum(contexts - 1, 0)))
        alive = jnp.concatenate((offset < count, contexts > 0))
        pages = jnp.where(alive, jnp.asarray(self.table)[place // PAGE], 0)

        def attend(layer, q, k, v, kv, window=None):
            kv = write_kv(kv, layer, k, v, pages, place % PAGE)
            new, segment = (part[:chunk] for part in (q, k, v)), jnp.where(offset < count, 0, 1)
            first = prefill_attention(*new, kv, layer, segment, self.table[None], start[None], window)
            tables = np.stack((self.table, 0 * self.table))
            return jnp.concatenate((first, decode_attention(q[chunk:], kv, layer, tables, contexts, window))), kv

        x = model.embed(given)
        lengths = jnp.maximum(jnp.where(jnp.arange(chunk + 2) < chunk, length, 0), place + 1)
        return model.layers(x, place, attend, pool, lengths)

    def _launch(self, given: np.ndarray, start: int, count: int, length: int, context: int) -> np.ndarray:
        sizes = (jnp.int32(size) for size in (start, count, length, context))
        x, self.pool = self.run(self.leaves, self.pool, given, *sizes)
        return np.asarray(x)

    def prompt(self, given: Any) -> np.ndarray:
        """Tokens [T] in chunks; rows [T, hidden]."""
        rows = []
        for start in range(0, len(given), self.chunk):
            part = np.asarray(given[start : start + self.chunk])
            padded = np.pad(part, (0, self.chunk + 2 - len(part)))
            rows.append(self._launch(padded, start, len(part), len(given), 0)[: len(part)])
        return np.concatenate(rows)

    def step(self, given: Any, place: int) -> np.ndarray:
        """One token [1] at ``place``; its row."""
        padded = np.pad(np.asarray(given), (self.chunk, 1))
        return self._launch(padded, 0, 0, 0, place + 1)[self.chunk : -1]

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Rows [N, hidden] of the last layer to logits."""
        return np.asarray(self.head(self.leaves, jnp.asarray(rows)))


def read_leaves(spec: ModelSpec, layers: range, weights: dict[str, np.ndarray]) -> tuple[Skeleton, tuple[Any, ...]]:
    """Structure and float32 weights of some layers, from the tensors of a checkpoint."""
    structure = skeleton(spec, layers, kv_heads=spec.kv_heads, dtype="float32")
    return structure, tuple(jnp.asarray(one.read(weights.__getitem__)) for one in structure.parameters)
