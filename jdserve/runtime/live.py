"""What the launcher thread of an instance keeps per request, and the messages that reach it."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field

from jdserve.core.request import Request
from jdserve.policy.commands import Pull
from jdserve.policy.events import Event
from jdserve.runtime.guides import Guided
from jdserve.runtime.links import Offering
from jdserve.runtime.outputs import Failed, Parked, Report, TokenOutput
from jdserve.runtime.results import RowResult
from jdserve.transfer.base import Landed
from jdserve.transfer.layout import KVHandle


@dataclass
class Live:
    """What the runtime knows of a request that is here.

    Attributes:
        request: as it would have to be prefilled now: a preemption on a colocated instance makes its prompt longer.
        since: nanoseconds at which it came.
        waited_s: seconds from then to its first launch.
        tokens: generated since ``request`` was made.
        pages: of its block table when it was last launched.
        admitted: the executor keeps its state.
        cached: prompt tokens that came out of the prefix cache, None before the first launch.
        offering: its KV on the way out (prefill), from the launch of the step that ends the prompt.
        handles: offers that it can be pulled by (decode).
        abandoned: nobody wants what is being pulled any more.
        guided: what its text must look like, where it must.
    """

    request: Request
    since: int = 0
    waited_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    pages: tuple[int, ...] = ()
    admitted: bool = False
    cached: int | None = None
    offering: Offering | None = None
    handles: Seq[KVHandle] = ()
    abandoned: threading.Event = field(default_factory=threading.Event)
    guided: Guided | None = None

    def is_stop(self, token: int, eos: Seq[int]) -> bool:
        """Whether ``token``, the next one, ends the text."""
        params = self.request.params
        early = self.request.generated + len(self.tokens) < params.min_tokens
        ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
        return ends and not early

    def grown(self) -> Request:
        """The request with all tokens so far in its prompt."""
        old = self.request
        generated = old.generated + len(self.tokens)
        return Request(old.id, (*old.prompt, *self.tokens), old.params, generated, old.cache_salt, old.priority)


@dataclass(frozen=True)
class Submit:
    """Have a prompt computed."""

    request: Request
    prefix: tuple[bytes, ...]


@dataclass(frozen=True)
class HandOff:
    """Have a request decoded whose KV is parked on ``source``."""

    request: Request
    source: str
    handles: Seq[KVHandle]


@dataclass(frozen=True)
class Compiled:
    """The guide of a request is ready, or will never be; see :meth:`jdserve.runtime.guides.Guides.begin`."""

    request_id: str
    guided: Future[Guided]


@dataclass(frozen=True)
class PullEnded:
    """A pull has ended after ``seconds``: with the KV, or with an error."""

    pull: Pull
    landed: Landed | None
    error: str
    seconds: float


@dataclass(frozen=True)
class StepEnded:
    """A step has ended; steps end in the order of their launch."""


@dataclass(frozen=True)
class Stop:
    """End the launcher thread."""


Message = Submit | HandOff | Compiled | PullEnded | StepEnded | Stop | Event
"""What the launcher thread takes, in order."""


@dataclass
class News:
    """A Report in the making."""

    outputs: list[TokenOutput] = field(default_factory=list)
    parked: list[Parked] = field(default_factory=list)
    landed: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    pull_failed: list[Failed] = field(default_factory=list)
    rejected: list[Failed] = field(default_factory=list)

    def report(self, instance: str) -> Report | None:
        """The report of ``instance``, None when there is no news."""
        if not any((self.outputs, self.parked, self.landed, self.preempted, self.pull_failed, self.rejected)):
            return None
        return Report(
            instance,
            outputs=tuple(self.outputs),
            parked=tuple(self.parked),
            landed=tuple(self.landed),
            preempted=tuple(self.preempted),
            pull_failed=tuple(self.pull_failed),
            rejected=tuple(self.rejected),
        )


@dataclass(frozen=True)
class Broken:
    """A step that could not even be launched; the pool is as it was."""

    error: Exception

    def result(self) -> dict[str, RowResult]:
        """Raise what broke it."""
        raise self.error
