"""What the Triton kernels share: the running softmax of a block of queries, and reading keys and values by token.

Softmax weights are powers of two, which GPUs compute in one instruction: scores are multiplied by log2(e). Blocks of
a kernel are powers of two, the arrays need not be: whatever lies outside is neither read nor written. Indices are
arrays in every place, because interpretation knows no masked load that mixes arrays and slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plt

LOG2E = math.log2(math.e)

MASKED = -1e30
"""Score of what must not be attended to, and log-sum-exp of rows that attend to nothing; finite, against NaN."""

MAX_HEAD_DIM = 256

MAX_GROUP = 64
"""Query heads that share a KV head."""

SMALLEST = 16
"""Rows and columns of the smallest matrix product of a tensor core."""


def padded(size: int) -> int:
    """The power of two that a block of ``size`` takes, at least :data:`SMALLEST`."""
    return max(SMALLEST, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class Tile:
    """What is fixed when a kernel is compiled.

    Attributes:
        group: query heads of a KV head.
        head_dim: D.
        page_size: S, tokens of a page.
        layer: of the pool.
        rows: queries in a block, a power of two.
        keys: tokens in a block, a power of two.
        window: most tokens to attend to, None for all.
        softcap: scores are bent to ``softcap * tanh(score / softcap)``, None for not.

    Raises:
        ValueError: a block of the model's heads would not fit a multiprocessor.
    """

    group: int
    head_dim: int
    page_size: int
    layer: int
    rows: int
    keys: int
    window: int | None
    softcap: float | None

    def __post_init__(self) -> None:
        if self.head_dim > MAX_HEAD_DIM or self.group > MAX_GROUP:
            raise ValueError(
                f"the Triton kernels take a head_dim of at most {MAX_HEAD_DIM}, got {self.head_dim}, and at most"
                f" {MAX_GROUP} query heads to a KV head, got {self.group}: attention xla takes any"
            )

    def columns(self, rows: int) -> tuple[Array, Array]:
        """``int32[rows, padded D]`` with the dimension of each column, and whether it is one."""
        columns = lax.broadcasted_iota(jnp.int32, (rows, padded(self.head_dim)), 1)
        return columns, columns < self.head_dim

    def scores(self, q: Array, keys: Array) -> Array:
        """Scores ``float32[rows, keys]`` of queries that are not scaled, times log2(e)."""
        scores = _dot(q, keys.T) * (self.head_dim**-0.5)
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        return scores * LOG2E


class Softmax(NamedTuple):
    """Running softmax of a block: weighted sum of values ``[rows, padded D]``, maximum and sum ``[rows]``, float32."""

    weighted: Array
    maximum: Array
    total: Array

    @classmethod
    def empty(cls, tile: Tile) -> Softmax:
        """Nothing attended to yet."""
        rows = (tile.rows,)
        return cls(
            jnp.zeros((*rows, padded(tile.head_dim)), jnp.float32),
            jnp.full(rows, MASKED, jnp.float32),
            jnp.zeros(rows, jnp.float32),
        )

    def merge(self, scores: Array, values: Array, mask: Array) -> Softmax:
        """Attend to more ``values [keys, padded D]``, zero where dead, by ``scores`` where ``mask``.

        A row that is masked whole at first weighs what it must not, until it comes to what it attends to: beside a
        score that is not :data:`MASKED`, that decays to nothing. So every row must attend to something in the end.
        """
        scores = jnp.where(mask, scores, MASKED)
        maximum = jnp.maximum(self.maximum, scores.max(axis=1))
        decay = jnp.exp2(self.maximum - maximum)
        weights = jnp.exp2(scores - maximum[:, None])
        added = _dot(weights.astype(values.dtype), values)
        return Softmax(self.weighted * decay[:, None] + added, maximum, self.total * decay + weights.sum(axis=1))

    def output(self) -> tuple[Array, Array]:
        """Weighted values, 0 where nothing was merged, and log2 of the sum of exponentials."""
        total = jnp.where(self.total > 0, self.total, 1.0)
        return self.weighted / total[:, None], jnp.where(self.total > 0, self.maximum + jnp.log2(total), MASKED)


def _dot(a: Array, b: Array) -> Array:
    # The default would round float32 operands to tf32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def over_tokens(
    tile: Tile, low: Any, high: Any, state: Softmax, block: Callable[[Array, Array, Softmax], Softmax]
) -> Softmax:
    """Fold ``block(tokens int32[keys], alive, state)`` over the tokens from ``low`` to ``high``."""

    def step(index: Array, state: Softmax) -> Softmax:
        tokens = low + index * tile.keys + lax.iota(jnp.int32, tile.keys)
        return block(tokens, tokens < high, state)

    blocks = lax.div(jnp.maximum(high - low, 0) + (tile.keys - 1), jnp.int32(tile.keys))
    return lax.fori_loop(0, blocks, step, state)


def read_paged(
    tile: Tile, keys: Any, values: Any, table: Any, sequence: Any, head: Any, tokens: Array, alive: Array, dtype: Any
) -> tuple[Array, Array]:
    """Keys and values ``[len(tokens), padded D]`` of tokens of one sequence, by its block table, 0 where not alive."""
    pages = plt.load(table.at[sequence, lax.div(tokens, jnp.int32(tile.page_size))], mask=alive, other=0)
    columns, inside = tile.columns(tile.keys)
    rows = lax.rem(tokens, jnp.int32(tile.page_size))
    at = (tile.layer, _wide(pages, columns), head, _wide(rows, columns), columns)
    return _read(keys, values, at, _wide(alive, columns) & inside, dtype)


def read_packed(
    tile: Tile, keys: Any, values: Any, head: Any, tokens: Array, alive: Array, dtype: Any
) -> tuple[Array, Array]:
    """Keys and values ``[len(tokens), padded D]`` of rows ``tokens`` of ``[T, K, D]``, 0 where not alive."""
    columns, inside = tile.columns(tile.keys)
    return _read(keys, values, (_wide(tokens, columns), head, columns), _wide(alive, columns) & inside, dtype)


def _read(keys: Any, values: Any, at: tuple[Any, ...], mask: Array, dtype: Any) -> tuple[Array, Array]:
    # What is dead must be zero and not whatever lies there: its weight is 0, and 0 * NaN is NaN.
    return tuple(plt.load(part.at[at], mask=mask, other=0).astype(dtype) for part in (keys, values))  # type: ignore[return-value]


def _wide(column: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(column, like.shape, (0,))
