"""What an instance keeps on its devices per sequence, in one slot each: a step needs no host to start the next one.

Slot ``slots`` (the last row) is the *dummy*: padding rows read and write it, and its block table is all null pages.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jdserve.core.request import MAX_LOGIT_BIAS, Request
from jdserve.ops.sampling import MAX_STOP_IDS, Leaf, SamplingRows, default_rows

LEAST_TEMPERATURE = 1e-5
"""Temperatures below are greedy."""


class FixedState(NamedTuple):
    """Per-sequence state that no step changes.

    Attributes:
        sampling: parameters.
        in_prompt: ``bool[slots + 1, V]`` tokens of the prompt.
        prompt_tokens: ``int32[slots + 1]`` length of the prompt as the client sent it.
    """

    sampling: SamplingRows
    in_prompt: Array
    prompt_tokens: Array


class LiveState(NamedTuple):
    """Per-sequence state that steps change.

    Attributes:
        last_token: ``int32[slots + 1]`` the token that is fed in next.
        context: ``int32[slots + 1]`` tokens whose KV is in the pool, which is the position of ``last_token``.
        tables: ``int32[slots + 1, W]`` block tables.
        counts: ``int32[slots + 1, V]`` how often each token was generated; kept only where penalties need it.
    """

    last_token: Array
    context: Array
    tables: Array
    counts: Array


class Admission(NamedTuple):
    """One row of both states, made on the host. ``tokens`` is padded to the longest request."""

    slot: Leaf
    last_token: Leaf
    context: Leaf
    table: Leaf
    tokens: Leaf
    prompt_tokens: Leaf
    total_tokens: Leaf
    sampling: SamplingRows


def empty_state(slots: int, width: int, vocab: int) -> tuple[FixedState, LiveState]:
    """State with no sequence in it, for ``slots`` sequences of ``width`` pages."""
    rows = slots + 1
    fixed = FixedState(default_rows(rows, vocab), jnp.zeros((rows, vocab), jnp.bool_), jnp.zeros(rows, jnp.int32))
    live = LiveState(
        last_token=jnp.zeros(rows, jnp.int32),
        context=jnp.zeros(rows, jnp.int32),
        tables=jnp.zeros((rows, width), jnp.int32),
        counts=jnp.zeros((rows, vocab), jnp.int32),
    )
    return fixed, live


def admission(
    request: Request, pages: tuple[int, ...], slot: int, *, width: int, longest: int, vocab: int, eos: tuple[int, ...]
) -> Admission:
    """The row of ``request`` in ``slot``, ready to be prefilled or, with its KV in ``pages``, to be decoded.

    In the second case the last token of ``request.prompt`` is the one that is fed in next.
    """
    params = request.params
    table = np.zeros(width, np.int32)
    table[: len(pages)] = pages
    tokens = np.zeros(longest, np.int32)
    total = len(request.prompt)
    tokens[:total] = request.prompt
    original = total - request.generated
    seed = (params.seed or 0) & (2**64 - 1)
    bias_ids = np.full(MAX_LOGIT_BIAS, vocab, np.int32)
    bias = np.zeros(MAX_LOGIT_BIAS, np.float32)
    for index, (token, value) in enumerate(params.logit_bias.items()):
        bias_ids[index], bias[index] = token, value
    stops = np.full(MAX_STOP_IDS, vocab, np.int32)
    stop_ids = (() if params.ignore_eos else eos) + params.stop_token_ids
    stops[: len(stop_ids)] = stop_ids
    sampling = SamplingRows(
        # Below this, logits / temperature overflows float32; the draw would be greedy anyway.
        temperature=np.float32(params.temperature if params.temperature >= LEAST_TEMPERATURE else 0.0),
        top_k=np.int32(min(params.top_k, vocab)),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        presence=np.float32(params.presence_penalty),
        frequency=np.float32(params.frequency_penalty),
        repetition=np.float32(params.repetition_penalty),
        seed=np.array([seed >> 32, seed & (2**32 - 1)], np.uint32),
        bias_ids=bias_ids,
        bias=bias,
        stop_ids=stops,
        stop_from=np.int32(original + params.min_tokens),
        logprobs=np.bool_(params.logprobs is not None),
        guided=np.bool_(params.guide is not None),
    )
    return Admission(
        slot=np.int32(slot),
        last_token=np.int32(request.prompt[-1]),
        context=np.int32(total - 1),
        table=table,
        tokens=tokens,
        prompt_tokens=np.int32(original),
        total_tokens=np.int32(total),
        sampling=sampling,
    )


def admit(fixed: FixedState, live: LiveState, row: Admission) -> tuple[FixedState, LiveState]:
    """Write ``row`` into its slot; runs on the device with both states donated."""
    slot = row.slot
    vocab = live.counts.shape[1]
    place = jnp.arange(row.tokens.shape[0], dtype=jnp.int32)
    prompt = jnp.where(place < row.prompt_tokens, row.tokens, vocab)
    generated = jnp.where((place >= row.prompt_tokens) & (place < row.total_tokens), row.tokens, vocab)
    in_prompt = jnp.zeros(vocab, jnp.bool_).at[prompt].set(True, mode="drop")
    counts = jnp.zeros(vocab, jnp.int32).at[generated].add(1, mode="drop")
    sampling = SamplingRows(
        *(rows.at[slot].set(value) for rows, value in zip(fixed.sampling, row.sampling, strict=True))
    )
    return (
        FixedState(
            sampling, fixed.in_prompt.at[slot].set(in_prompt), fixed.prompt_tokens.at[slot].set(row.prompt_tokens)
        ),
        LiveState(
            last_token=live.last_token.at[slot].set(row.last_token),
            context=live.context.at[slot].set(row.context),
            tables=live.tables.at[slot].set(row.table),
            counts=live.counts.at[slot].set(counts),
        ),
    )
