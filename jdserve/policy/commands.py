"""What a state machine wants done."""

from __future__ import annotations

import msgspec

from jdserve.core.request import FinishReason
from jdserve.core.steptime import StepFeatures


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="command", gc=False):
    pass


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompt tokens ``[start, start + count)`` of one request.

    Attributes:
        request_id: of the request.
        start: tokens before the chunk, whose KV is in ``pages`` already.
        count: tokens to compute.
        pages: block table; holds at least ``start + count`` tokens.
        last: the chunk ends the prompt, so a token is sampled from its last position.
    """

    request_id: str
    start: int
    count: int
    pages: tuple[int, ...]
    last: bool


class DecodeSeq(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One token of one decoding request.

    Attributes:
        request_id: of the request.
        context: tokens attended to, the one that is fed in included; that one has position ``context - 1``.
        pages: block table; holds at least ``context`` tokens.
    """

    request_id: str
    context: int
    pages: tuple[int, ...]


class RunStep(_Command, frozen=True, gc=False):
    """Launch one step; answered by StepDone. A machine has at most one step in flight.

    Attributes:
        step_id: counts up from 0 on each instance.
        chunks: prompt tokens to compute.
        decodes: sequences to decode one token of.
    """

    step_id: int
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[DecodeSeq, ...] = ()

    def features(self) -> StepFeatures:
        """What the step's time depends on."""
        return StepFeatures.of(
            ((chunk.start, chunk.count) for chunk in self.chunks), (seq.context for seq in self.decodes)
        )


class BriefStep(_Command, frozen=True, gc=False):
    """Launch one step, told by its features alone; answered by StepDone. Of a brief machine, for a simulator.

    Attributes:
        step_id: as in RunStep.
        work: what its time depends on.
        prompts: requests whose prompts it computes, wholly or in part.
    """

    step_id: int
    work: StepFeatures
    prompts: tuple[str, ...] = ()

    def features(self) -> StepFeatures:
        """What the step's time depends on."""
        return self.work


class Pull(_Command, frozen=True, gc=False):
    """Move the KV of a request into ``pages``; answered by KVLanded or PullFailed.

    Attributes:
        request_id: of the request.
        source: prefill instance on which the KV is parked.
        tokens: tokens whose KV moves.
        pages: reserved pages; may be longer than the tokens need.
    """

    request_id: str
    source: str
    tokens: int
    pages: tuple[int, ...]


class Release(_Command, frozen=True, gc=False):
    """Forget a request.

    From an instance: its pages are back in the pool; drop what else is kept for it. A request that came back while its
    cancelled run was ending is released once, with its last run. From the router: tell ``instance`` to forget it (it
    gets Cancelled).
    """

    request_id: str
    instance: str | None = None


class Preempt(_Command, frozen=True, gc=False):
    """The pages of a decoding request were taken back; what it generated so far stands.

    From a decode instance the router must have it prefilled again (it gets Preempted). A colocated instance prefills it
    again itself, and says so for the record.
    """

    request_id: str


class Emit(_Command, frozen=True, gc=False):
    """The newest tokens of a request go out.

    Attributes:
        request_id: of the request.
        count: how many; 0 where only the end is told (a prompt that was only scored).
        finish: why the text ends, None while it goes on.
        parked: the KV waits on this prefill instance (the router gets KVReady).
    """

    request_id: str
    count: int = 1
    finish: FinishReason | None = None
    parked: bool = False


class Reject(_Command, frozen=True, gc=False):
    """The request cannot be served.

    Attributes:
        request_id: of the request.
        reason: for people.
        retryable: trying later may help.
        after_s: when there may be room, where other requests are all that is in the way.
    """

    request_id: str
    reason: str
    retryable: bool = True
    after_s: float | None = None


class Dispatch(_Command, frozen=True, gc=False):
    """Hand a request to an instance.

    Attributes:
        request_id: of the request.
        instance: name of the instance; gets Arrived, or KVReady when ``source`` is set.
        source: prefill instance on which the KV is parked, None for a request that is to be prefilled.
    """

    request_id: str
    instance: str
    source: str | None = None


class Retire(_Command, frozen=True, gc=False):
    """A draining instance holds no request any more: it may be stopped. Router.

    Attributes:
        instance: its name.
    """

    instance: str


Command = RunStep | BriefStep | Pull | Release | Preempt | Emit | Reject | Dispatch | Retire
