"""How long a step takes: one linear formula, evaluated by the planner, the simulator and the front door alike.

The formula generalises the latency model of DistServe (OSDI'24, appendix A): prefill time is linear in the new tokens
(GEMMs) and in the query-key pairs (attention), decode time is linear in the batch (GEMMs) and in the context read
(attention), and every step pays a constant. A mixed step pays for both of its parts and one constant.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class StepFeatures(msgspec.Struct, frozen=True, gc=False):
    """What a step does, in the quantities that its time depends on.

    Attributes:
        new_tokens: prompt tokens computed.
        new_pairs: sum over chunks of new tokens squared (attention inside the chunk).
        prefix_pairs: sum over chunks of new tokens times tokens before the chunk.
        decode_seqs: sequences that decode one token.
        decode_context: sum of their context lengths, in tokens.
    """

    new_tokens: int = 0
    new_pairs: int = 0
    prefix_pairs: int = 0
    decode_seqs: int = 0
    decode_context: int = 0

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]] = (), contexts: Iterable[int] = ()) -> StepFeatures:
        """Features of a step with prefill ``chunks`` (start, count) and decode ``contexts`` (tokens)."""
        new = pairs = prefix = seqs = context = 0
        for start, count in chunks:
            new += count
            pairs += count * count
            prefix += count * start
        for length in contexts:
            seqs += 1
            context += length
        return cls(new, pairs, prefix, seqs, context)


class StepTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of the formula, in seconds per unit of the feature; for one whole pass through all stages.

    Attributes:
        base: per step.
        per_new_token: per prompt token.
        per_new_pair: per squared new token of a chunk.
        per_prefix_pair: per new token times prefix token.
        per_decode_seq: per decoding sequence.
        per_context_token: per context token read by decoding.
    """

    base: float
    per_new_token: float = 0.0
    per_new_pair: float = 0.0
    per_prefix_pair: float = 0.0
    per_decode_seq: float = 0.0
    per_context_token: float = 0.0

    def seconds(self, features: StepFeatures) -> float:
        """Seconds that a step with these features takes from launch to token."""
        return (
            self.base
            + self.per_new_token * features.new_tokens
            + self.per_new_pair * features.new_pairs
            + self.per_prefix_pair * features.prefix_pairs
            + self.per_decode_seq * features.decode_seqs
            + self.per_context_token * features.decode_context
        )

    def interval(self, features: StepFeatures, pp: int) -> float:
        """Seconds between two such steps when ``pp`` balanced stages are kept full of micro-batches."""
        return self.seconds(features) / pp


class QueueTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long an instance takes for the prompts that wait there.

    Attributes:
        steptime: of the instance.
        step_tokens: prompt tokens of a full step.
        pp: steps that run side by side.
    """

    steptime: StepTime
    step_tokens: int
    pp: int = 1

    def seconds(self, tokens: int, prompts: int) -> float:
        """Seconds until ``prompts`` prompts of ``tokens`` tokens together are computed, each as long as the others."""
        if not tokens:
            return 0.0
        steps = max(1.0, tokens / self.step_tokens)
        features = StepFeatures(new_tokens=tokens, new_pairs=tokens * tokens // max(1, prompts))
        return (self.steptime.seconds(features) + (steps - 1) * self.steptime.base) / self.pp
