"""The step program: one function, traced once per shape, that serves prefill, decode and mixed steps.

An instance of several stages runs a chain of them: the first embeds, each runs its layers, the last one samples.

Host inputs of a launch with T prompt tokens, R chunks and B decoding sequences:

- ``chunk_tokens`` ``int32[4, T]``: token, position, chunk it belongs to (R for padding), and the token that follows it
  where the request wants prompt log-probabilities (-1 elsewhere);
- ``chunks`` ``int32[4, R]``: slot, tokens before the chunk, index of its last token, 1 if it ends the prompt;
- ``decodes`` ``int32[4, B]``: slot, the column and page of a block table entry that is new (column W for none), and
  the token to feed in; -1 takes the last one that was sampled on this device, without a round trip to the host;
- ``allowed`` ``uint32[R + B, ceil(V / 32)]``: a bit per token that a guided row may choose, on the last stage alone.
  None where no row is guided: the stage then has an array of its own, and nothing is sent.

Everything else is on the device already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jdserve.models.skeleton import Skeleton
from jdserve.ops.attention import AttentionOps, KVPool, write_kv
from jdserve.ops.sampling import (
    Leaf,
    Sampled,
    TopLogprobs,
    no_logprobs,
    sample,
    token_logprobs,
    uses_penalties,
)
from jdserve.runtime.buckets import StepShape
from jdserve.runtime.state import FixedState, LiveState

PROMPT_LOGPROB_ROWS = 64
"""Rows of logits at a time where a prompt is scored: all of them at once would be ``[T, V]``."""


class StepInputs(NamedTuple):
    """What the host sends for one launch; see the module."""

    chunk_tokens: Leaf
    chunks: Leaf
    decodes: Leaf
    allowed: Leaf | None = None


class StepOutputs(NamedTuple):
    """What a launch gives: one sampled row per chunk, then one per decoding sequence; and prompt log-probabilities."""

    sampled: Sampled
    prompt: TopLogprobs


class _Rows(NamedTuple):
    """Where each row of the launch stands: T prompt tokens, then B decoding sequences."""

    tokens: Array
    positions: Array
    lengths: Array
    pages: Array
    offsets: Array
    segment_tables: Array
    decode_tables: Array
    decode_context: Array


def _rows(inputs: StepInputs, fixed: FixedState, live: LiveState, page_size: int) -> _Rows:
    token, position, segment, _ = inputs.chunk_tokens
    slots = inputs.decodes[0]
    dummy = live.last_token.shape[0] - 1
    segment_slots = jnp.append(inputs.chunks[0], jnp.int32(dummy))
    alive = slots != dummy
    decode_position = jnp.where(alive, live.context[slots], 0)
    row_slots = jnp.concatenate((segment_slots[segment], slots))
    positions = jnp.concatenate((position, decode_position))
    told = inputs.decodes[3]
    return _Rows(
        tokens=jnp.concatenate((token, jnp.where(told >= 0, told, live.last_token[slots]))),
        positions=positions,
        lengths=jnp.maximum(fixed.prompt_tokens[row_slots], positions + 1),
        pages=live.tables[row_slots, positions // page_size],
        offsets=positions % page_size,
        segment_tables=live.tables[inputs.chunks[0]],
        decode_tables=live.tables[slots],
        decode_context=jnp.where(alive, decode_position + 1, 0),
    )


def step_program(
    model: Skeleton,
    shape: StepShape,
    attention: AttentionOps,
    page_size: int,
    *,
    first: bool = True,
    last: bool = True,
    spread: Callable[[Any], Any] = lambda hidden: hidden,
) -> Callable[..., tuple[KVPool, LiveState, StepOutputs | Array]]:
    """The function ``step(leaves, pool, fixed, live, inputs, given) -> (pool, live, outputs)`` of one shape and stage.

    It is to be jitted with ``pool`` and ``live`` donated. ``given [T + B, E]`` comes from the stage before, None on
    the first one; ``outputs`` is what the next stage is given, and StepOutputs on the last one. ``spread`` may say how
    the residual stream ``[T + B, E]`` lies on the mesh.
    """
    tokens = shape.tokens

    def step(
        leaves: tuple[Array, ...],
        pool: KVPool,
        fixed: FixedState,
        live: LiveState,
        inputs: StepInputs,
        given: Array | None,
    ) -> tuple[KVPool, LiveState, StepOutputs | Array]:
        module = model.merge(leaves)
        slots, column, page, _ = inputs.decodes
        live = live._replace(tables=live.tables.at[slots, column].set(page, mode="drop"))
        rows = _rows(inputs, fixed, live, page_size)

        def attend(
            layer: int, q: Array, k: Array, v: Array, kv: KVPool, window: int | None = None
        ) -> tuple[Array, KVPool]:
            pool = write_kv(kv, layer, k, v, rows.pages, rows.offsets)
            parts: list[Array] = []
            if tokens:
                segment, prefix = inputs.chunk_tokens[2], inputs.chunks[1]
                new = (q[:tokens], k[:tokens], v[:tokens])
                parts.append(attention.prefill(*new, pool, layer, segment, rows.segment_tables, prefix, window))
            if shape.seqs:
                tables, context = rows.decode_tables, rows.decode_context
                parts.append(attention.decode(q[tokens:], pool, layer, tables, context, window))
            return jnp.concatenate(parts), pool

        with jax.named_scope("embed"):
            hidden = spread(module.embed(rows.tokens) if first else given)
        with jax.named_scope("layers"):
            hidden, pool = module.layers(hidden, rows.positions, attend, pool, rows.lengths)
        ends = jnp.concatenate((inputs.chunks[2], tokens + jnp.arange(shape.seqs, dtype=jnp.int32)))
        position = rows.positions[ends] + 1
        to = _complete(inputs, dummy=live.last_token.shape[0] - 1)
        live = live._replace(context=live.context.at[to].set(position))
        if not last:
            return pool, live, hidden
        with jax.named_scope("sample"):
            sampled, live = _choose(module.logits(hidden[ends]), fixed, live, inputs, position, to)
        with jax.named_scope("score"):
            prompt = _score_prompt(module.logits, hidden[:tokens], inputs.chunk_tokens[3], live.counts.shape[1])
        return pool, live, StepOutputs(sampled, prompt)

    return step


def _complete(inputs: StepInputs, dummy: int) -> Array:
    """Slot of each row whose prompt is complete, so that it gets a token; the dummy for the others."""
    slots = jnp.concatenate((inputs.chunks[0], inputs.decodes[0]))
    complete = jnp.concatenate((inputs.chunks[3] > 0, inputs.decodes[0] != dummy))
    return jnp.where(complete, slots, dummy)


def _choose(
    logits: Array, fixed: FixedState, live: LiveState, inputs: StepInputs, position: Array, to: Array
) -> tuple[Sampled, LiveState]:
    """Sample a token per row and write it into the state of slots ``to``."""
    slots = jnp.concatenate((inputs.chunks[0], inputs.decodes[0]))
    rows = jax.tree.map(lambda leaf: leaf[slots], fixed.sampling)
    assert inputs.allowed is not None, "the stage that samples fills it in"
    sampled = sample(logits, rows, lambda: (live.counts[slots], fixed.in_prompt[slots]), position, inputs.allowed)
    counts = lax.cond(
        uses_penalties(rows).any(),
        lambda: live.counts.at[to, sampled.tokens].add(1, mode="promise_in_bounds"),
        lambda: live.counts,
    )
    return sampled, live._replace(last_token=live.last_token.at[to].set(sampled.tokens), counts=counts)


def _score_prompt(logits: Callable[[Array], Array], hidden: Array, targets: Array, vocab: int) -> TopLogprobs:
    """Log-probabilities of ``targets[T]`` under rows ``hidden [T, E]``; zeros, at no cost, where none is wanted."""
    tokens = hidden.shape[0]
    if not tokens:
        return no_logprobs(0, vocab)
    size = min(PROMPT_LOGPROB_ROWS, tokens)

    def score() -> TopLogprobs:
        padding = -tokens % size
        rows = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, size, hidden.shape[1])
        wanted = jnp.pad(jnp.maximum(targets, 0), (0, padding)).reshape(-1, size)
        scored = lax.map(lambda part: token_logprobs(logits(part[0]), part[1]), (rows, wanted))
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:tokens], scored)

    return lax.cond((targets >= 0).any(), score, lambda: no_logprobs(tokens, vocab))
