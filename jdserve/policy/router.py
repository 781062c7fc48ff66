"""The front door's decisions: which instance takes a request, and where it goes when something fails.

A prompt goes to the prefill (or colocated) instance with the shortest queue, counted in tokens; once its KV is parked
it goes to the decode instance with the least load. The second choice is made that late because the load then is known.

The router only counts. Wherever a request may still be held when it is sent elsewhere or forgotten, the router says so
with a Release *before* the Dispatch: on a channel that keeps the order, an instance never sees the new run of a request
while it holds the old one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

from jdserve.policy.commands import Command, Dispatch, Reject, Release
from jdserve.policy.events import (
    Arrived,
    Cancelled,
    Draining,
    Event,
    Finished,
    KVLanded,
    KVReady,
    PeerFailed,
    PeerJoined,
    Preempted,
    PullFailed,
)

Role = Literal["prefill", "decode", "colocated"]
Balance = Literal["tokens", "requests"]


class _Instance:
    """What the router counts on one instance.

    Attributes:
        tokens: prefill: prompt tokens dispatched and not yet prefilled. decode: prompt and output tokens of its
            requests. colocated: both, because it does not report the end of a prefill.
        requests: how many requests these are.
    """

    __slots__ = ("live", "name", "requests", "role", "tokens")

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role: Role = role
        self.live = True
        self.tokens = 0
        self.requests = 0


class _Request:
    """What the router knows of one request.

    Attributes:
        prompt_tokens, max_new_tokens: as it first arrived.
        at: instance it was dispatched to last.
        weight: tokens counted there for it.
        source: prefill instance that may still hold its parked KV, None when there is none.
    """

    __slots__ = ("at", "id", "max_new_tokens", "prompt_tokens", "retries", "source", "weight")

    def __init__(self, id: str, prompt_tokens: int, max_new_tokens: int, at: _Instance) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.retries = 0
        self.at = at
        self.weight = 0
        self.source: _Instance | None = None


class Router:
    """Takes every event but StepDone and LeaseExpired; all instances are live at first.

    Args:
        prefill, decode, colocated: names of the instances, in the order of the plan.
        max_retries: how often a request is prefilled again after a failure before it is rejected.
        balance: what the shortest queue of prompts is counted in first; the other breaks ties.

    Raises:
        ValueError: a name is used twice, or ``max_retries`` is negative.
    """

    def __init__(
        self,
        prefill: Seq[str],
        decode: Seq[str],
        colocated: Seq[str],
        max_retries: int = 3,
        balance: Balance = "tokens",
    ) -> None:
        if max_retries < 0:
            raise ValueError(f"max_retries must be at least 0, got {max_retries}")
        self._max_retries = max_retries
        self._balance: Balance = balance
        self._draining = False
        self._instances: dict[str, _Instance] = {}
        self._requests: dict[str, _Request] = {}  # in order of arrival
        roles: tuple[tuple[Role, Seq[str]], ...] = (("prefill", prefill), ("decode", decode), ("colocated", colocated))
        for role, names in roles:
            for name in names:
                if name in self._instances:
                    raise ValueError(f"two instances are called {name!r}")
                self._instances[name] = _Instance(name, role)

    @property
    def requests(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._requests)

    def idle(self) -> bool:
        """True when no request is open."""
        return not self._requests

    def load(self, name: str) -> int:
        """Tokens counted on instance ``name``: waiting ones (prefill), held ones (decode), or both (colocated)."""
        return self._instance(name).tokens

    def place(self, request_id: str) -> str | None:
        """The instance that a request was dispatched to last, None for an unknown request."""
        request = self._requests.get(request_id)
        return None if request is None else request.at.name

    def handle(self, event: Event, now: int) -> list[Command]:
        """Take ``event`` at ``now`` (nanoseconds) and say what is to be done.

        Raises:
            TypeError: the router takes no such event.
            ValueError: Arrived with a known id, or an event names an instance that is not in the plan.
        """
        match event:
            case Arrived():
                return self._arrived(event)
            case PeerFailed():
                return self._peer_failed(event.instance)
            case PeerJoined():
                self._instance(event.instance).live = True
                return []
            case Draining():
                self._draining = True
                return []
            case KVReady() | KVLanded() | PullFailed() | Preempted() | Cancelled() | Finished():
                request = self._requests.get(event.request_id)
                return [] if request is None else self._about(request, event)
            case _:
                raise TypeError(f"Router takes no {type(event).__name__}")

    def _about(
        self, request: _Request, event: KVReady | KVLanded | PullFailed | Preempted | Cancelled | Finished
    ) -> list[Command]:
        if isinstance(event, Cancelled):
            return [*self._forget(request), Release(request.id, request.at.name)]
        if isinstance(event, Finished):
            return self._forget(request)
        if isinstance(event, KVReady):
            # from another instance it is about an earlier run
            return self._kv_ready(request, event) if request.at.name == event.source else []
        if request.at.role != "decode":
            return []  # about an earlier run: the request is prefilled again already
        if isinstance(event, KVLanded):
            request.source = None
            return []
        if isinstance(event, Preempted):
            return [*self._leave(request), *self._prefill(request, event.prompt_tokens, event.max_new_tokens)]
        # when the failed pull was that of an earlier run, the decode instance holds the present one
        decode = request.at.name
        reason = f": {event.reason}" if event.reason else ""
        return [Release(request.id, decode), *self._retry(request, f"the pull to {decode} failed{reason}")]

    def _arrived(self, event: Arrived) -> list[Command]:
        if event.request_id in self._requests:
            raise ValueError(f"request {event.request_id} has arrived already")
        if self._draining:
            return [Reject(event.request_id, "the service is draining: it takes no new requests")]
        at = self._choose(event.max_new_tokens)
        if isinstance(at, str):
            return [Reject(event.request_id, at)]
        request = _Request(event.request_id, event.prompt_tokens, event.max_new_tokens, at)
        self._requests[request.id] = request
        return self._put(request, at, event.prompt_tokens, event.max_new_tokens)

    def _kv_ready(self, request: _Request, event: KVReady) -> list[Command]:
        decodes = [peer for peer in self._instances.values() if peer.live and peer.role == "decode"]
        request.source = request.at
        if not decodes:
            return [*self._forget(request), Reject(request.id, "no live decode instance")]
        self._uncount(request)
        decode = min(decodes, key=lambda peer: (peer.tokens, peer.requests))
        return self._put(request, decode, event.prompt_tokens, event.max_new_tokens)

    def _peer_failed(self, name: str) -> list[Command]:
        failed = self._instance(name)
        failed.live = False
        commands: list[Command] = []
        for request in list(self._requests.values()):
            if request.at is failed:
                commands += self._retry(request, f"{name} failed")
            elif request.source is failed:
                commands += [Release(request.id, request.at.name), *self._retry(request, f"{name} failed")]
        return commands

    def _retry(self, request: _Request, reason: str) -> list[Command]:
        """Have a request prefilled again, unless that was done too often."""
        request.retries += 1
        if request.retries > self._max_retries:
            return [*self._forget(request), Reject(request.id, f"{reason}; given up after {self._max_retries} retries")]
        return [*self._leave(request), *self._prefill(request, request.prompt_tokens, request.max_new_tokens)]

    def _prefill(self, request: _Request, prompt_tokens: int, max_new_tokens: int) -> list[Command]:
        """Dispatch a request that is on no instance."""
        at = self._choose(max_new_tokens)
        if isinstance(at, str):
            del self._requests[request.id]
            return [Reject(request.id, at)]
        return self._put(request, at, prompt_tokens, max_new_tokens)

    def _choose(self, max_new_tokens: int) -> _Instance | str:
        """The instance that takes a prompt, or why there is none."""
        decodes = max_new_tokens <= 1 or any(peer.live and peer.role == "decode" for peer in self._instances.values())
        takers = [peer for peer in self._instances.values() if peer.live and peer.role != "decode"]
        able = [peer for peer in takers if peer.role == "colocated" or decodes]
        if able:
            if self._balance == "tokens":
                return min(able, key=lambda peer: (peer.tokens, peer.requests))
            return min(able, key=lambda peer: (peer.requests, peer.tokens))
        return "no live decode instance" if takers else "no live prefill or colocated instance"

    def _put(self, request: _Request, at: _Instance, prompt_tokens: int, max_new_tokens: int) -> list[Command]:
        request.at = at
        request.weight = prompt_tokens if at.role == "prefill" else prompt_tokens + max_new_tokens
        at.tokens += request.weight
        at.requests += 1
        return [Dispatch(request.id, at.name, request.source.name if request.source else None)]

    def _uncount(self, request: _Request) -> None:
        request.at.tokens -= request.weight
        request.at.requests -= 1

    def _leave(self, request: _Request) -> list[Command]:
        """Stop counting a request where it is; Release the KV that may be parked for it on a live instance."""
        self._uncount(request)
        source, request.source = request.source, None
        return [Release(request.id, source.name)] if source is not None and source.live else []

    def _forget(self, request: _Request) -> list[Command]:
        del self._requests[request.id]
        return self._leave(request)

    def _instance(self, name: str) -> _Instance:
        if name not in self._instances:
            raise ValueError(f"instance {name!r} is not in the plan")
        return self._instances[name]
