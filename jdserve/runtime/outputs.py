"""What instances say to the front door, and what the front door says to its callers."""

from __future__ import annotations

import msgspec

from jdserve.core.request import FinishReason
from jdserve.transfer.layout import KVHandle


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position.

    Attributes:
        token: the token that stands there.
        logprob: its natural-log probability.
        rank: 1 for the likeliest token.
        top: (token, logprob) of the likeliest tokens, best first; as many as the request asked for.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Phases(msgspec.Struct, frozen=True):
    """When a request passed from one part of the service to the next, in seconds of the front door's monotonic clock.

    0 is never, or not yet. After a retry or a preemption the later run counts, but for ``arrived``.

    Attributes:
        arrived: the front door took it.
        dispatched: it was sent to the instance that computes its prompt.
        launched: the first step with it began there.
        prefilled: the front door had the token that ends that.
        handed_off: it was sent to the instance that decodes it, to pull its KV there.
        landed: the KV was there.
        prefill, decode: the instances; a colocated one decodes what it prefilled.
        runs: how often it was begun.
    """

    arrived: float
    dispatched: float = 0.0
    launched: float = 0.0
    prefilled: float = 0.0
    handed_off: float = 0.0
    landed: float = 0.0
    prefill: str = ""
    decode: str = ""
    runs: int = 0


class TokenOutput(msgspec.Struct, frozen=True):
    """News of one request.

    Attributes:
        request_id: of the request.
        tokens: new token ids, in order.
        logprobs: one entry per new token where the request asked for them, else empty.
        prompt_logprobs: one entry per prompt token but the first, once, with the first news; None otherwise.
        finish: why the text ends (``stop``: the last token is an end-of-sequence or stop token; ``length``), None while
            it goes on.
        error: what went wrong where ``finish`` is ``error``.
        refused: it was the request's own fault.
        cached_tokens: prompt tokens whose KV came out of the prefix cache.
        waited_s: seconds that the prompt waited for its first step, on the instance that computed it.
        phases: where the time went so far; added by the front door.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    refused: bool = False
    waited_s: float = 0.0
    phases: Phases | None = None


class Parked(msgspec.Struct, frozen=True):
    """KV that waits on a prefill instance.

    Attributes:
        request_id: of the request.
        handles: one offer per layout that a decode instance of the plan has.
    """

    request_id: str
    handles: tuple[KVHandle, ...]


class Failed(msgspec.Struct, frozen=True):
    """Something that went wrong with one request, for the front door to act on.

    Attributes:
        request_id: of the request.
        reason: for people.
        retryable: trying again may help.
    """

    request_id: str
    reason: str
    retryable: bool = True


class Report(msgspec.Struct, frozen=True):
    """What one instance says to the front door: all news of a step in one message.

    Attributes:
        instance: its name.
        outputs: new tokens and endings.
        parked: requests whose KV can be pulled now.
        landed: requests whose KV has arrived here, so that the source may forget it.
        preempted: requests that must be prefilled again.
        pull_failed: requests whose KV did not arrive.
        rejected: requests that this instance refuses.
        dead: why the instance can do nothing any more, None while it lives.
        joined: the instance takes work, for the first time or again.
    """

    instance: str
    outputs: tuple[TokenOutput, ...] = ()
    parked: tuple[Parked, ...] = ()
    landed: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    pull_failed: tuple[Failed, ...] = ()
    rejected: tuple[Failed, ...] = ()
    dead: str | None = None
    joined: bool = False


class InstanceStats(msgspec.Struct, frozen=True):
    """State of one instance now; ``preemptions``, ``steps``, ``prefi*``, ``*_s`` and ``transfer*`` only
    grow.

    Attributes:
        name, role: of the instance.
        waiting, running, parked: sequences; parked ones have their KV on a prefill mesh.
        pulling: KV caches on their way to here.
        pages_total, pages_free, pages_owned, pages_cached: of its pool; total is the sum of the others.
        preemptions: sequences whose pages were taken back.
        steps: launched.
        prefilled_tokens: prompt tokens computed here.
        prefix_queries, prefix_hits: prompt tokens that came in, and those of them that the prefix cache had.
        busy_s: seconds in steps.
        bubble_s: seconds in which a pipeline stage had nothing to run while another one ran, summed over the stages;
            while a launch was under way, where the instance spans processes.
        transfers, transfer_bytes, transfer_s: KV that landed here, and seconds from pull to landing, summed.
    """

    name: str
    role: str
    waiting: int = 0
    running: int = 0
    parked: int = 0
    pulling: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_owned: int = 0
    pages_cached: int = 0
    preemptions: int = 0
    steps: int = 0
    prefilled_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    busy_s: float = 0.0
    bubble_s: float = 0.0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0


class TransferStats(msgspec.Struct, frozen=True):
    """KV transfers since the start: how many landed, their bytes, and the seconds they took together."""

    count: int
    bytes: int
    seconds: float


class EngineStats(msgspec.Struct, frozen=True):
    """State of all instances.

    Attributes:
        instances: in the order of the plan.
        recompilations: programs compiled after the engine was ready; anything but 0 is a fault.
        dead: why each instance died that did not come back yet.
        restarts: instances that came back after they had died.
        retries: runs of requests that had to begin anew after a failure.
    """

    instances: tuple[InstanceStats, ...]
    recompilations: int = 0
    dead: dict[str, str] = {}
    restarts: int = 0
    retries: int = 0

    @property
    def transfers(self) -> TransferStats:
        """Transfers of all instances together."""
        return TransferStats(
            sum(instance.transfers for instance in self.instances),
            sum(instance.transfer_bytes for instance in self.instances),
            sum(instance.transfer_s for instance in self.instances),
        )
