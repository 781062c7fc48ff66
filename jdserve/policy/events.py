"""What happens to a state machine. Each class says which machines take it."""

from __future__ import annotations

import msgspec

from jdserve.core.plan import Role


class _Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="event", gc=False):
    pass


class Arrived(_Event, frozen=True, gc=False):
    """A request came in. Router; then the prefill or colocated instance it was dispatched to.

    Attributes:
        request_id: unique.
        prompt_tokens: tokens to prefill, at least 1; includes what an earlier run of the request generated.
        max_new_tokens: tokens that may still be generated; 0 only scores the prompt.
        prefix: chained hashes of the leading full pages that may be shared with other requests.
        priority: requests with a smaller one are prefilled first.
    """

    request_id: str
    prompt_tokens: int
    max_new_tokens: int
    prefix: tuple[bytes, ...] = ()
    priority: int = 0


class Cancelled(_Event, frozen=True, gc=False):
    """Nobody waits for the request any more, or its text is complete. All machines; unknown ids are ignored."""

    request_id: str


class StepDone(_Event, frozen=True, gc=False):
    """The oldest step in flight has ended. Instances.

    Attributes:
        step_id: of the RunStep.
        stopped: requests whose new token ends the text (an end-of-sequence or stop token).
        failed: requests that the step could not compute.
    """

    step_id: int
    stopped: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


class KVReady(_Event, frozen=True, gc=False):
    """The KV of a request is parked on a prefill instance. Router; then the decode instance it was dispatched to.

    Attributes:
        request_id: of the request.
        source: name of the prefill instance.
        prompt_tokens: tokens whose KV is parked.
        max_new_tokens: tokens that may still be generated, the one that prefill sampled not counted.
    """

    request_id: str
    source: str
    prompt_tokens: int
    max_new_tokens: int


class KVLanded(_Event, frozen=True, gc=False):
    """A pull has ended well.

    The decode instance may run the request, the prefill instance may forget its pages, and the router no longer minds
    whether the prefill instance lives.
    """

    request_id: str


class PullFailed(_Event, frozen=True, gc=False):
    """A pull has ended without the KV. Decode instance; then the router.

    Attributes:
        request_id: of the request.
        reason: for people.
    """

    request_id: str
    reason: str = ""


class LeaseExpired(_Event, frozen=True, gc=False):
    """Parked KV was not pulled in time. Prefill instance."""

    request_id: str


class Preempted(_Event, frozen=True, gc=False):
    """A decode instance gave up the pages of a request, which must be prefilled again. Router.

    Attributes:
        request_id: of the request.
        prompt_tokens: tokens to prefill now: prompt and all generated tokens.
        max_new_tokens: tokens that may still be generated.
    """

    request_id: str
    prompt_tokens: int
    max_new_tokens: int


class Finished(_Event, frozen=True, gc=False):
    """A request ended on its instance, well or not. Router."""

    request_id: str


class PeerFailed(_Event, frozen=True, gc=False):
    """An instance is gone with everything on it. Router.

    Attributes:
        instance: its name.
    """

    instance: str


class PeerJoined(_Event, frozen=True, gc=False):
    """An instance takes work (again). Router.

    Attributes:
        instance: its name.
        role: of an instance that the router does not know yet.
    """

    instance: str
    role: Role | None = None


class Draining(_Event, frozen=True, gc=False):
    """Take no new work, finish what was accepted. Router.

    Attributes:
        instance: the one that is to become empty; None for the whole service.
    """

    instance: str | None = None


class Tick(_Event, frozen=True, gc=False):
    """Time has passed while requests wait for an instance that is gone. Router."""


Event = (
    Arrived
    | Cancelled
    | StepDone
    | KVReady
    | KVLanded
    | PullFailed
    | LeaseExpired
    | Preempted
    | Finished
    | PeerFailed
    | PeerJoined
    | Draining
    | Tick
)
