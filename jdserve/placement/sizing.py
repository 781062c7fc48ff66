"""From a role and degrees to an instance: pages, L_m, batch limits, step times; or why there is none."""

from __future__ import annotations

import math
from typing import NamedTuple

from jdserve.core.pages import pages_for
from jdserve.core.plan import ColocatedInstance, DecodeInstance, Instance, PrefillInstance
from jdserve.core.steptime import StepFeatures
from jdserve.cost.latency import Unmeasured
from jdserve.cost.memory import memory
from jdserve.cost.stepcost import FS, StepCost
from jdserve.placement.candidates import Part
from jdserve.placement.job import Job

SATURATED = 0.75
"""A prefill step is full when it computes this share of the tokens per second that an endless one would."""

L_M_STEP = 64
"""L_m is a multiple of this many tokens."""

L_M_MAX = 16_384

SHORT = 4
"""A prefill step holds prompts of a quarter of the mean length without being cut short."""


class Sized(NamedTuple):
    """An instance that fits.

    Attributes:
        instance: complete but for its name and its step times, which only the plan in the end needs.
        cost: time of its steps.
    """

    instance: Instance
    cost: StepCost


class Sizer:
    """Sizes instances for a job; asks once for each kind.

    Args:
        job: see there.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._known: dict[Part, Sized | str] = {}

    def size(self, part: Part) -> Sized | str:
        """The instance that ``part`` describes (its count does not matter), or the reason why there is none."""
        key = Part(part.role, part.tp, part.pp, 1, part.mode, part.budget)
        if key not in self._known:
            self._known[key] = self._size(key)
        return self._known[key]

    def _size(self, part: Part) -> Sized | str:
        job = self._job
        try:
            cost = job.latency.cost(part.role, part.tp, part.pp)
        except Unmeasured as error:
            return str(error)
        lm = saturating_tokens(cost, job.sample.mean_input, job.max_model_len)
        batch = self._decode_batch(cost)
        budget = max(part.budget or lm, batch) if part.role == "colocated" else 0
        step = {"prefill": max(lm, job.max_model_len), "decode": batch}.get(part.role) or (
            budget if part.mode == "chunked" else max(budget, job.max_model_len)
        )
        pages = self._pages(part, step, batch)
        if isinstance(pages, str):
            return pages
        return Sized(self._instance(part, pages, lm, batch, budget), cost)

    def _prompts(self, lm: int) -> int:
        """Most prompts in one prefill step: some more than mean ones of ``lm`` tokens in all."""
        return max(min(math.ceil(SHORT * lm / self._job.sample.mean_input), self._job.max_batch), 1)

    def _pages(self, part: Part, step: int, batch: int) -> int | str:
        job = self._job
        if job.kv_tokens is not None:
            tokens, needed = job.kv_tokens.get((part.tp, part.pp), 0), job.max_model_len
            pages = tokens // job.page_size
            if pages < pages_for(needed, job.page_size):
                return f"does not fit: needs KV of {needed} tokens, the table of capacities has {tokens}"
            return pages
        found = memory(
            job.spec,
            job.dtype,
            part.tp,
            part.pp,
            device_bytes=job.cluster.device.memory_bytes,
            page_size=job.page_size,
            max_model_len=job.max_model_len,
            step_tokens=step,
            batch=batch,
            weights=job.weights,
        )
        return found.pages if found.fits else found.reason

    def _decode_batch(self, cost: StepCost) -> int:
        """The largest batch whose step, at the mean context, is within the TPOT; at least 1."""
        context = self._job.sample.mean_context
        budget = self._job.slo.tpot_s * FS
        low, high = 1, self._job.max_num_seqs
        while low < high:
            middle = (low + high + 1) // 2
            f = StepFeatures(decode_seqs=middle, decode_context=round(middle * context))
            low, high = (middle, high) if sum(cost.stages(f)) <= budget else (low, middle - 1)
        return low * cost.pp if low * cost.pp <= self._job.max_num_seqs else self._job.max_num_seqs

    def _instance(self, part: Part, pages: int, lm: int, batch: int, budget: int) -> Instance:
        common = {"name": "x", "tp": part.tp, "pp": part.pp, "pages": pages}
        match part.role:
            case "prefill":
                return PrefillInstance(**common, lm_tokens=lm, max_batch=self._prompts(lm))
            case "decode":
                return DecodeInstance(**common, max_num_seqs=batch)
            case "colocated":
                return ColocatedInstance(**common, mode=part.mode, token_budget=budget, max_num_seqs=batch)


def saturating_tokens(cost: StepCost, prompt: float, longest: int) -> int:
    """L_m: new tokens from which a step of prompts of ``prompt`` tokens only gets longer, not more efficient.

    The smallest step that reaches :data:`SATURATED` of the token rate of an endless one, and no more than the longest
    request, or :data:`L_M_MAX`.
    """

    def rate(tokens: int) -> float:
        pairs = round(tokens * min(prompt, tokens))
        return tokens / max(sum(cost.stages(StepFeatures(new_tokens=tokens, new_pairs=pairs))), 1)

    least = SATURATED * rate(1 << 24)
    most = max(min(longest, L_M_MAX) // L_M_STEP, 1)
    for tokens in range(L_M_STEP, most * L_M_STEP, L_M_STEP):
        if rate(tokens) >= least:
            return tokens
    return most * L_M_STEP
