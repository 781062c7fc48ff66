"""The front door's decisions: which instance takes a request, and where it goes when something fails.

A prompt goes to the prefill (or colocated) instance with the shortest queue, counted in tokens; once its KV is parked
it goes to the decode instance with the least load. The second choice is made that late because the load then is known.

The router only counts. Wherever a request may still be held when it is sent elsewhere or forgotten, the router says so
with a Release *before* the Dispatch: on a channel that keeps the order, an instance never sees the new run of a request
while it holds the old one.

A request for which no instance of a role is left waits at most ``patience_s`` from the death of the last one: a
supervisor restarts what died, and nobody need notice. Its KV stays parked meanwhile, if it has any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, ClassVar, Literal

from jdserve.core.plan import Role
from jdserve.core.steptime import QueueTime
from jdserve.policy.commands import Command, Dispatch, Reject, Release, Retire
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
    Tick,
)

Balance = Literal["tokens", "requests"]

LIMIT_RETRY_S = 1.0
"""When a client that met the limit on open requests may try again."""

MAX_RETRIES = 8
"""One death costs a request up to two: its pull fails, and then the router hears that the instance is gone."""


class _Instance:
    """What the router counts on one instance.

    Attributes:
        live: it takes work.
        draining: it finishes what it has and takes nothing new.
        tokens: prefill: prompt tokens dispatched and not yet prefilled. decode: prompt and output tokens of its
            requests. colocated: both, because it does not report the end of a prefill.
        requests: how many requests these are.
    """

    __slots__ = ("draining", "live", "name", "requests", "role", "tokens")

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role: Role = role
        self.live = True
        self.draining = False
        self.tokens = 0
        self.requests = 0

    @property
    def usable(self) -> bool:
        return self.live and not self.draining


class _Request:
    """What the router knows of one request.

    Attributes:
        prompt_tokens, max_new_tokens: as they are to be prefilled next; after KVReady, as they are to be decoded.
        at: instance it was dispatched to last; None while it waits for one to come back.
        weight: tokens counted there for it.
        source: prefill instance that may still hold its parked KV, None when there is none.
    """

    __slots__ = ("at", "id", "max_new_tokens", "prompt_tokens", "retries", "source", "weight")

    def __init__(self, id: str, prompt_tokens: int, max_new_tokens: int) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.retries = 0
        self.at: _Instance | None = None
        self.weight = 0
        self.source: _Instance | None = None


class Router:
    """Takes every event but StepDone and LeaseExpired; all instances are live at first.

    Args:
        prefill, decode, colocated: names of the instances, in the order of the plan.
        max_retries: how often a request is prefilled again after a failure before it is rejected.
        balance: what the shortest queue of prompts is counted in first; the other breaks ties.
        max_open: requests accepted at a time, None for no limit.
        patience_s: how long requests wait for a role of which no instance is left.
        queueing: for each instance that takes prompts, how long a queue of prompts takes there.
        max_wait_s: a request that would wait longer than this for its prompt to be begun is rejected; needs
            ``queueing``. None lets it wait.
        near: for a prefill instance, the decode instances that its KV goes to while one of them is usable; any may take
            it otherwise, or where the prefill instance is not in here.

    Raises:
        ValueError: a name is used twice, or ``max_retries`` is negative.
    """

    def __init__(
        self,
        prefill: Seq[str],
        decode: Seq[str],
        colocated: Seq[str],
        max_retries: int = MAX_RETRIES,
        balance: Balance = "tokens",
        max_open: int | None = None,
        patience_s: float = 0.0,
        near: Mapping[str, Seq[str]] | None = None,
        queueing: Mapping[str, QueueTime] | None = None,
        max_wait_s: float | None = None,
    ) -> None:
        if max_retries < 0:
            raise ValueError(f"max_retries must be at least 0, got {max_retries}")
        self._max_retries = max_retries
        self._balance: Balance = balance
        self._max_open = max_open
        self._patience = round(patience_s * 1e9)
        self._near = {source: frozenset(names) for source, names in (near or {}).items()}
        self._queueing = dict(queueing or {})
        self._max_wait_s = max_wait_s
        self._draining = False
        self._instances: dict[str, _Instance] = {}
        self._requests: dict[str, _Request] = {}  # in order of arrival
        self._gone: dict[Role, int] = {}  # since when a role has no usable instance
        roles: tuple[tuple[Role, Seq[str]], ...] = (("prefill", prefill), ("decode", decode), ("colocated", colocated))
        for role, names in roles:
            for name in names:
                if name in self._instances:
                    raise ValueError(f"two instances are called {name!r}")
                self._instances[name] = _Instance(name, role)
        # who takes prompts, and who decodes: those that are usable
        self._takers: list[_Instance] = []
        self._decodes: list[_Instance] = []
        self._anyone_leaves = False
        self._look_who_is_there()

    @property
    def requests(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._requests)

    @property
    def stranded(self) -> int:
        """Requests that wait for an instance to come back."""
        return sum(request.at is None for request in self._requests.values())

    def idle(self) -> bool:
        """True when no request is open."""
        return not self._requests

    def load(self, name: str) -> int:
        """Tokens counted on instance ``name``: waiting ones (prefill), held ones (decode), or both (colocated)."""
        return self._instance(name).tokens

    def wait_s(self) -> float:
        """Estimated wait of a prompt that arrives now, on the instance where it is least; 0 where nothing is known."""
        waits = [
            self._queueing[peer.name].seconds(peer.tokens, peer.requests) if peer.name in self._queueing else 0.0
            for peer in self._takers
        ]
        return min(waits, default=0.0)

    def place(self, request_id: str) -> str | None:
        """The instance that a request was dispatched to last, None for an unknown or waiting request."""
        request = self._requests.get(request_id)
        return None if request is None or request.at is None else request.at.name

    def handle(self, event: Event, now: int) -> list[Command]:
        """Take ``event`` at ``now`` (nanoseconds) and say what is to be done.

        Raises:
            TypeError: the router takes no such event.
            ValueError: Arrived with a known id, or an event names an instance that is not in the plan.
        """
        take = self._takes.get(type(event))
        if take is None:
            raise TypeError(f"Router takes no {type(event).__name__}")
        commands = take(self, event, now)
        return [*commands, *self._retired()] if self._anyone_leaves else commands

    def _arrived(self, event: Arrived, now: int) -> list[Command]:
        if event.request_id in self._requests:
            raise ValueError(f"request {event.request_id} has arrived already")
        if self._draining:
            return [Reject(event.request_id, "the service is draining: it takes no new requests")]
        if self._max_open is not None and len(self._requests) >= self._max_open:
            reason = f"{self._max_open} requests are open already, which is the limit"
            return [Reject(event.request_id, reason, after_s=LIMIT_RETRY_S)]
        if self._max_wait_s is not None and (wait := self.wait_s()) > self._max_wait_s:
            reason = f"a prompt would wait about {wait:.2f} s, past the objective of {self._max_wait_s:g} s"
            return [Reject(event.request_id, reason, after_s=wait - self._max_wait_s)]
        request = _Request(event.request_id, event.prompt_tokens, event.max_new_tokens)
        self._requests[request.id] = request
        return self._place(request, now)

    # what instances say of a request; it may be about an earlier run, and then means nothing

    def _kv_ready(self, event: KVReady, now: int) -> list[Command]:
        request = self._requests.get(event.request_id)
        if request is None or request.at is None or request.at.name != event.source:
            return []
        at = request.at
        self._uncount(request)
        request.source = at
        request.prompt_tokens, request.max_new_tokens = event.prompt_tokens, event.max_new_tokens
        return self._place(request, now)

    def _kv_landed(self, event: KVLanded, now: int) -> list[Command]:
        if (request := self._decoded(event.request_id)) is not None:
            request.source = None
        return []

    def _pull_failed(self, event: PullFailed, now: int) -> list[Command]:
        request = self._decoded(event.request_id)
        if request is None or request.at is None:
            return []
        at = request.at.name
        # when the failed pull was that of an earlier run, the decode instance holds the present one
        reason = f": {event.reason}" if event.reason else ""
        return [Release(request.id, at), *self._retry(request, f"the pull to {at} failed{reason}", now)]

    def _preempted(self, event: Preempted, now: int) -> list[Command]:
        request = self._decoded(event.request_id)
        if request is None:
            return []
        request.prompt_tokens, request.max_new_tokens = event.prompt_tokens, event.max_new_tokens
        return [*self._leave(request), *self._place(request, now)]

    def _decoded(self, request_id: str) -> _Request | None:
        """A request that is on a decode instance."""
        request = self._requests.get(request_id)
        return None if request is None or request.at is None or request.at.role != "decode" else request

    def _finished(self, event: Finished, now: int) -> list[Command]:
        request = self._requests.pop(event.request_id, None)
        return [] if request is None else self._leave(request)

    def _cancelled(self, event: Cancelled, now: int) -> list[Command]:
        request = self._requests.pop(event.request_id, None)
        if request is None:
            return []
        at = request.at
        return [*self._leave(request), *([Release(request.id, at.name)] if at is not None else [])]

    def _peer_failed(self, event: PeerFailed, now: int) -> list[Command]:
        name = event.instance
        failed = self._instance(name)
        failed.live = False
        self._note_gone(now)
        commands: list[Command] = []
        for request in list(self._requests.values()):
            if request.at is failed:
                commands += self._retry(request, f"{name} failed", now)
            elif request.source is failed:
                if request.at is not None:
                    commands.append(Release(request.id, request.at.name))
                commands += self._retry(request, f"{name} failed", now)
        return commands

    def _peer_joined(self, event: PeerJoined, now: int) -> list[Command]:
        if event.role is not None and event.instance not in self._instances:
            self._instances[event.instance] = _Instance(event.instance, event.role)
        joined = self._instance(event.instance)
        joined.live, joined.draining = True, False
        self._note_gone(now)
        return self._place_stranded(now)

    def _drain(self, event: Draining, now: int) -> list[Command]:
        if event.instance is None:
            self._draining = True
        else:
            self._instance(event.instance).draining = True
            self._anyone_leaves = True
            self._note_gone(now)
        return []

    def _retired(self) -> list[Command]:
        """Draining instances that nothing is on any more; they are forgotten."""
        leaving = [peer for peer in self._instances.values() if peer.draining]
        held = {peer for request in self._requests.values() for peer in (request.at, request.source)}
        empty = [peer for peer in leaving if peer not in held]
        for peer in empty:
            del self._instances[peer.name]
        self._anyone_leaves = len(empty) < len(leaving)
        return [Retire(peer.name) for peer in empty]

    def _note_gone(self, now: int) -> None:
        roles: tuple[Role, ...] = ("prefill", "decode", "colocated")
        usable = {peer.role for peer in self._instances.values() if peer.usable}
        self._gone = {role: self._gone.get(role, now) for role in roles if role not in usable}
        self._look_who_is_there()

    def _look_who_is_there(self) -> None:
        usable = [peer for peer in self._instances.values() if peer.usable]
        self._takers = [peer for peer in usable if peer.role != "decode"]
        self._decodes = [peer for peer in usable if peer.role == "decode"]

    def _tick(self, event: Tick, now: int) -> list[Command]:
        return self._place_stranded(now)

    def _place_stranded(self, now: int) -> list[Command]:
        waiting = [request for request in self._requests.values() if request.at is None]
        return [command for request in waiting for command in self._place(request, now)]

    def _retry(self, request: _Request, reason: str, now: int) -> list[Command]:
        """Have a request prefilled again, unless that was done too often."""
        request.retries += 1
        if request.retries > self._max_retries:
            del self._requests[request.id]
            given_up = Reject(request.id, f"{reason}; given up after {self._max_retries} retries")
            return [*self._leave(request), given_up]
        if request.at is None or request.at.role == "decode":
            # the token that prefill sampled is part of the prompt from now on
            request.prompt_tokens += 1
        return [*self._leave(request), *self._place(request, now)]

    def _place(self, request: _Request, now: int) -> list[Command]:
        """Dispatch a request that is on no instance; let it wait while an instance may come back; or reject it."""
        chosen = self._choose(request)
        if isinstance(chosen, _Instance):
            return self._put(request, chosen)
        request.at = None
        since = max((self._gone[role] for role in chosen if role in self._gone), default=now - self._patience)
        if now - since < self._patience:
            return []
        del self._requests[request.id]
        source, request.source = request.source, None
        release = [Release(request.id, source.name)] if source is not None and source.live else []
        return [*release, Reject(request.id, f"no live {' or '.join(chosen)} instance")]

    def _choose(self, request: _Request) -> _Instance | tuple[Role, ...]:
        """The instance that takes a request next, or the roles of which there is none."""
        decodes, takers = self._decodes, self._takers
        if request.source is not None:
            if self._near:
                near = self._near.get(request.source.name, frozenset())
                decodes = [peer for peer in decodes if peer.name in near] or decodes
            return _least(decodes, "tokens") if decodes else ("decode",)
        able = takers
        if not decodes and request.max_new_tokens > 1:
            able = [peer for peer in takers if peer.role == "colocated"]
        if not able:
            return ("decode",) if takers else ("prefill", "colocated")
        return _least(able, self._balance)

    def _put(self, request: _Request, at: _Instance) -> list[Command]:
        request.at = at
        weight = request.prompt_tokens
        if at.role != "prefill":
            weight += request.max_new_tokens
        request.weight = weight
        at.tokens += weight
        at.requests += 1
        source = request.source
        return [Dispatch(request.id, at.name, source.name if source is not None else None)]

    def _uncount(self, request: _Request) -> None:
        at = request.at
        if at is not None:
            at.tokens -= request.weight
            at.requests -= 1
        request.weight = 0

    def _leave(self, request: _Request) -> list[Command]:
        """Stop counting a request where it is; Release the KV that may be parked for it on a live instance."""
        self._uncount(request)
        source, request.source = request.source, None
        return [Release(request.id, source.name)] if source is not None and source.live else []

    def _instance(self, name: str) -> _Instance:
        if name not in self._instances:
            raise ValueError(f"instance {name!r} is not in the plan")
        return self._instances[name]

    # by type: to try one class after the other takes several times as long
    _takes: ClassVar[Mapping[type[Event], Callable[[Any, Any, int], list[Command]]]] = {
        Arrived: _arrived,
        KVReady: _kv_ready,
        KVLanded: _kv_landed,
        Finished: _finished,
        PullFailed: _pull_failed,
        Preempted: _preempted,
        Cancelled: _cancelled,
        PeerFailed: _peer_failed,
        PeerJoined: _peer_joined,
        Draining: _drain,
        Tick: _tick,
    }


def _least(peers: Seq[_Instance], balance: Balance) -> _Instance:
    """The first of those with the least load, counted in ``balance`` first."""
    if len(peers) == 1:
        return peers[0]
    if balance == "tokens":
        return min(peers, key=lambda peer: (peer.tokens, peer.requests))
    return min(peers, key=lambda peer: (peer.requests, peer.tokens))
