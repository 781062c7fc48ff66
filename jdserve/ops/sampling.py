"""Choosing the next token on the device: penalties, bias, temperature, top-k, top-p, min-p, log-probabilities.

One program serves every mixture of options: each costly part sits behind a ``lax.cond`` that looks at the rows of the
batch, so a greedy batch pays for an argmax and a batch that asks for top-p pays for a sort. Whatever a row's neighbours
are, its token is the same: its key is ``fold_in(seed, position)`` and nothing is drawn for the batch as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jdserve.core.request import MAX_LOGIT_BIAS, MAX_LOGPROBS

MAX_STOP_IDS = 64
"""End-of-sequence and stop token ids per request that ``min_tokens`` can hold back."""

Leaf = Any
"""An array on the device, or a numpy array on its way to or from it."""


class SamplingRows(NamedTuple):
    """Sampling parameters of N rows; see :class:`jdserve.core.request.SamplingParams` for their meaning.

    ``seed`` is ``uint32[N, 2]`` (high, low); ``bias_ids`` and ``stop_ids`` are padded with the vocabulary size, which
    no scatter reaches; ``stop_from`` is the first position at which a stop token may be chosen.
    """

    temperature: Leaf
    top_k: Leaf
    top_p: Leaf
    min_p: Leaf
    presence: Leaf
    frequency: Leaf
    repetition: Leaf
    seed: Leaf
    bias_ids: Leaf
    bias: Leaf
    stop_ids: Leaf
    stop_from: Leaf
    logprobs: Leaf  # bool: the row wants log-probabilities
    guided: Leaf  # bool: only the tokens that the step's input allows may be chosen


def default_rows(rows: int, vocab: int) -> SamplingRows:
    """``rows`` rows that choose greedily."""
    return SamplingRows(
        temperature=jnp.zeros(rows, jnp.float32),
        top_k=jnp.zeros(rows, jnp.int32),
        top_p=jnp.ones(rows, jnp.float32),
        min_p=jnp.zeros(rows, jnp.float32),
        presence=jnp.zeros(rows, jnp.float32),
        frequency=jnp.zeros(rows, jnp.float32),
        repetition=jnp.ones(rows, jnp.float32),
        seed=jnp.zeros((rows, 2), jnp.uint32),
        bias_ids=jnp.full((rows, MAX_LOGIT_BIAS), vocab, jnp.int32),
        bias=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
        stop_ids=jnp.full((rows, MAX_STOP_IDS), vocab, jnp.int32),
        stop_from=jnp.zeros(rows, jnp.int32),
        logprobs=jnp.zeros(rows, jnp.bool_),
        guided=jnp.zeros(rows, jnp.bool_),
    )


class TopLogprobs(NamedTuple):
    """Log-probabilities of N rows: of the chosen token, its rank from 1, and the likeliest MAX_LOGPROBS tokens."""

    logprob: Leaf
    rank: Leaf
    top_ids: Leaf
    top: Leaf


class Sampled(NamedTuple):
    """Result for N rows: tokens, whether the row's logits were finite, log-probabilities (zeros if nobody asked)."""

    tokens: Array
    finite: Array
    logprobs: TopLogprobs


def uses_penalties(rows: SamplingRows) -> Array:
    """``bool[N]``: rows whose logits depend on the tokens so far."""
    return (rows.presence != 0) | (rows.frequency != 0) | (rows.repetition != 1)


def argmax(logits: Array) -> Array:
    """First index of the maximum along the last axis: two vector passes, where XLA's argmax on CPU is a scalar loop."""
    size = logits.shape[-1]
    places = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    index = jnp.where(logits == logits.max(-1, keepdims=True), places, size)
    return jnp.minimum(index.min(-1), size - 1)


def shape_logits(logits: Array, rows: SamplingRows, counts: Array, in_prompt: Array, position: Array) -> Array:
    """Logits after penalties, bias and the hold on stop tokens.

    Args:
        logits: ``float32[N, V]``.
        rows: parameters.
        counts: ``[N, V]`` how often each token was generated.
        in_prompt: ``bool[N, V]`` whether the prompt holds it.
        position: ``int32[N]`` of the token that is chosen.
    """
    generated = counts > 0
    repetition = jnp.where(generated | in_prompt, rows.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - rows.frequency[:, None] * counts.astype(jnp.float32)
    logits = logits - rows.presence[:, None] * generated.astype(jnp.float32)
    row = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[row, rows.bias_ids].add(rows.bias, mode="drop")
    held = jnp.where((position < rows.stop_from)[:, None], rows.stop_ids, logits.shape[1])
    return logits.at[row, held].set(-jnp.inf, mode="drop")


def allow(logits: Array, guided: Array, allowed: Array) -> Array:
    """Logits with what ``allowed`` leaves out at minus infinity.

    Args:
        logits: ``float32[N, V]``.
        guided: ``bool[N]`` rows that ``allowed`` counts for.
        allowed: ``uint32[N, ceil(V / 32)]`` one bit per token, the lowest first.
    """
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    kept = bits.reshape(allowed.shape[0], -1)[:, : logits.shape[1]] > 0
    return jnp.where(kept | ~guided[:, None], logits, -jnp.inf)


def filter_logits(scaled: Array, rows: SamplingRows) -> Array:
    """Temperature-scaled logits ``[N, V]`` with everything outside top-k, top-p and min-p at minus infinity.

    Top-k is applied first and top-p looks at what it leaves, as in vLLM and Hugging Face; ties at a border are kept.
    """
    size = scaled.shape[1]
    ordered = -jnp.sort(-scaled, axis=-1)
    keep = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, size), size)[:, None]
    place = jnp.arange(size, dtype=jnp.int32)[None, :]
    probability = jax.nn.softmax(jnp.where(place < keep, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # A cumulative sum in float32 reaches 1 before its end: a row without top-p must not lose its tail to that.
    wanted = jnp.where(rows.top_p < 1, rows.top_p, jnp.inf)[:, None]
    last = ((before < wanted) & (place < keep)).sum(-1) - 1
    border = jnp.take_along_axis(ordered, last[:, None], axis=-1)
    likely = ordered[:, :1] + jnp.log(jnp.maximum(rows.min_p, 1e-30))[:, None]
    return jnp.where((scaled >= border) & (scaled >= likely), scaled, -jnp.inf)


def token_logprobs(logits: Array, tokens: Array) -> TopLogprobs:
    """Log-probabilities under the unshaped ``logits [N, V]``, as OpenAI and vLLM report them."""
    normal = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(normal, tokens[:, None], axis=-1)
    top, ids = lax.top_k(normal, min(MAX_LOGPROBS, logits.shape[1]))
    rank = 1 + (normal > chosen).sum(-1, dtype=jnp.int32)
    return TopLogprobs(chosen[:, 0], rank, ids.astype(jnp.int32), top)


def no_logprobs(rows: int, vocab: int) -> TopLogprobs:
    """What stands in for log-probabilities that nobody asked for."""
    count = min(MAX_LOGPROBS, vocab)
    return TopLogprobs(
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, count), jnp.int32),
        jnp.zeros((rows, count), jnp.float32),
    )


def sample(
    logits: Array,
    rows: SamplingRows,
    history: Callable[[], tuple[Array, Array]],
    position: Array,
    allowed: Array,
) -> Sampled:
    """Choose one token per row.

    Args:
        logits: ``float32[N, V]``.
        rows: parameters.
        history: gives ``counts`` and ``in_prompt`` of :func:`shape_logits`; called where they are needed, because
            gathering them costs a pass over ``[N, V]``.
        position: ``int32[N]`` of the token that is chosen.
        allowed: tokens that guided rows may choose, see :func:`allow`.
    """
    shaping = uses_penalties(rows).any() | (rows.bias_ids < logits.shape[1]).any() | (position < rows.stop_from).any()
    shaped = lax.cond(shaping, lambda: shape_logits(logits, rows, *history(), position), lambda: logits)
    shaped = lax.cond(rows.guided.any(), lambda: allow(shaped, rows.guided, allowed), lambda: shaped)
    greedy = argmax(shaped)

    def draw() -> Array:
        scaled = shaped / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
        filtering = ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).any()
        kept = lax.cond(filtering, lambda: filter_logits(scaled, rows), lambda: scaled)
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(rows.seed, impl="threefry2x32"), position)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (logits.shape[1],), jnp.float32))(keys)
        return jnp.where(rows.temperature > 0, argmax(kept + noise), greedy)

    tokens = lax.cond((rows.temperature > 0).any(), draw, lambda: greedy)
    logprobs = lax.cond(rows.logprobs.any(), lambda: token_logprobs(logits, tokens), lambda: no_logprobs(*logits.shape))
    return Sampled(tokens, jnp.isfinite(logits.max(-1)), logprobs)
