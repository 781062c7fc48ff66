"""The instances of a plan: each one model replica in one role, with its parallel degrees, pages and limits."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jdserve.core.steptime import StepTime

Positive = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]


class _Instance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="role"):
    """What instances of every role have.

    Attributes:
        name: unique in the plan.
        tp, pp: tensor- and pipeline-parallel degree; the instance has tp * pp devices.
        pages: KV pages in the pool of the instance.
        steptime: fitted coefficients, None where nothing was measured.
    """

    name: Name
    tp: Positive = 1
    pp: Positive = 1
    pages: Positive
    steptime: StepTime | None = None


class PrefillInstance(_Instance, frozen=True, kw_only=True, tag="prefill"):
    """An instance that computes prompts and parks their KV until it is pulled.

    Attributes:
        batching: ``"lm"`` fills a batch up to ``lm_tokens`` new tokens and runs longer prompts alone (DistServe,
            section 4.1); ``"kv_capacity"`` takes everything queued that the page pool holds.
        lm_tokens: L_m, the new tokens that saturate the devices.
        max_batch: most sequences in one step.
        prefix_cache: keep the KV of finished prompts and share it with prompts that start the same way.
        lease_s: seconds that parked KV waits for its pull before it is dropped.
    """

    batching: Literal["lm", "kv_capacity"] = "lm"
    lm_tokens: Positive
    max_batch: Positive = 16
    prefix_cache: bool = True
    lease_s: Annotated[float, Meta(gt=0)] = 300.0


class DecodeInstance(_Instance, frozen=True, kw_only=True, tag="decode"):
    """An instance that pulls KV and generates.

    Attributes:
        max_num_seqs: largest batch.
        watermark: share of the pages that stays free when another sequence is admitted, so that those that run can
            grow before one must be preempted.
        pull: ``"overlapped"`` pulls KV while steps run; ``"between_steps"`` begins pulls when a step has ended and
            launches none until they have landed, as an engine does that waits for each copy in its step loop.
        in_flight: most steps in flight, at most ``pp``; by default one per stage. With 1, all sequences decode in one
            batch, and the other stages idle.
    """

    max_num_seqs: Positive
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    pull: Literal["overlapped", "between_steps"] = "overlapped"
    in_flight: Positive | None = None


class ColocatedInstance(_Instance, frozen=True, kw_only=True, tag="colocated"):
    """An instance that does both phases: the baseline, and the answer when disaggregation does not pay.

    Attributes:
        mode: ``"prefill_first"`` runs waiting prompts before the next decode step; ``"chunked"`` fills what the
            decoding sequences leave of ``token_budget`` with chunks of prompts, in one mixed step.
        token_budget: most new tokens of one step.
        max_num_seqs: most sequences at a time.
        watermark, prefix_cache: as in the other roles.
    """

    mode: Literal["prefill_first", "chunked"] = "prefill_first"
    token_budget: Positive
    max_num_seqs: Positive
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    prefix_cache: bool = True


Instance = PrefillInstance | DecodeInstance | ColocatedInstance

Role = Literal["prefill", "decode", "colocated"]


def role_of(instance: Instance) -> Role:
    """The role that an instance plays, as the plan spells it."""
    match instance:
        case PrefillInstance():
            return "prefill"
        case DecodeInstance():
            return "decode"
        case ColocatedInstance():
            return "colocated"
