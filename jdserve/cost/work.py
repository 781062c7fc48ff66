"""Arithmetic and traffic of a step: FLOPs, memory bytes and link bytes of one device in one pipeline stage.

Everything is linear in the step features, so each quantity is one row of factors per feature. Stages are taken as
equal: the output projection, which only the last one has, is spread over all.
"""

from __future__ import annotations

from typing import NamedTuple

from jdserve.core.spec import DTYPE_BYTES, DType, ModelSpec, WeightFormat, weight_bytes
from jdserve.core.steptime import StepFeatures, StepTime


class Factors(NamedTuple):
    """Units per step feature (see :class:`~jdserve.core.steptime.StepFeatures`)."""

    base: float = 0.0
    new_token: float = 0.0
    new_pair: float = 0.0
    prefix_pair: float = 0.0
    decode_seq: float = 0.0
    context_token: float = 0.0

    def of(self, f: StepFeatures) -> float:
        """Units of a step with features ``f``."""
        return (
            self.base
            + self.new_token * f.new_tokens
            + self.new_pair * f.new_pairs
            + self.prefix_pair * f.prefix_pairs
            + self.decode_seq * f.decode_seqs
            + self.context_token * f.decode_context
        )

    def time(self, per_s: float) -> StepTime:
        """Seconds at ``per_s`` units per second."""
        return StepTime(*(value / per_s for value in self))


def flops(spec: ModelSpec, tp: int = 1, pp: int = 1) -> Factors:
    """FLOPs of one device in one stage: 2 per weight and token, 4 per query-key pair and head dimension.

    Causal attention computes half of the pairs inside a chunk. One prompt per step is taken to end, and needs the
    output projection. Every expert computes every token, as in ``models/moe.py``. A window is left out: the pairs
    beyond it are counted, so that work stays linear in the features.
    """
    share = tp * pp
    token = 2 * spec.layers * spec.layer_weights / share
    head = 2 * spec.table_weights / share
    pair = 4 * spec.layers * spec.heads * spec.head_dim / share
    return Factors(head, token, pair / 2, pair, token + head, pair)


def traffic(spec: ModelSpec, dtype: DType, tp: int = 1, pp: int = 1, stored: WeightFormat | None = None) -> Factors:
    """Bytes that one device in one stage reads from and writes to its memory.

    All weights once per step (of the input embedding only the rows of the tokens), activations in and out of every
    matrix, the KV of the new tokens, and in decoding the KV of the whole context. The keys and values of a prompt are
    read tile by tile while they are cached, so prefill attention is taken as arithmetic only.
    """
    width, share = DTYPE_BYTES[dtype], tp * pp
    weights = (spec.layers * spec.layer_weights + spec.table_weights) * weight_bytes(dtype, stored) / share
    kv = kv_bytes(spec, dtype, tp, pp)
    heads = spec.heads + 2 * spec.kv_heads
    inner = (heads + spec.heads) * spec.head_dim + (3 if spec.gated else 2) * spec.ffn * max(spec.experts, 1)
    activations = spec.layers / pp * width * (8 * spec.hidden + inner / tp)
    logits = 4 * spec.vocab / share
    token = activations + kv
    return Factors(weights, token, 0.0, 0.0, token + logits, kv)


def kv_bytes(spec: ModelSpec, dtype: DType, tp: int = 1, pp: int = 1) -> float:
    """KV bytes of one token on one device of one stage; KV heads are repeated when there are fewer than devices."""
    return spec.kv_bytes_per_token(dtype) * spec.stored_kv_heads(tp) / spec.kv_heads / (tp * pp)


def all_reduce_bytes(spec: ModelSpec, dtype: DType, tp: int = 1, pp: int = 1) -> Factors:
    """Bytes that one device sends in the all-reduces of one stage: two per layer, each 2 (tp - 1) / tp of the data."""
    token = 2 * spec.layers / pp * spec.hidden * DTYPE_BYTES[dtype] * 2 * (tp - 1) / tp
    return Factors(new_token=token, decode_seq=token)


def hand_off_bytes(spec: ModelSpec, dtype: DType, tp: int = 1, pp: int = 1) -> Factors:
    """Bytes that one device sends to the next stage; spread over the stages, the last of which sends nothing."""
    token = spec.hidden * DTYPE_BYTES[dtype] / tp * (pp - 1) / pp
    return Factors(new_token=token, decode_seq=token)
