"""Whole topologies on one thread: real machines, with steps and pulls that end when the test says so.

Control messages are delivered at once and in order. The harness plays the front door and the devices: it counts the
tokens of each request, and it keeps its own books of which pages are held, written and filled with what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from jdserve.core.pages import NULL_PAGE, pages_for
from jdserve.core.plan import DecodeInstance, Instance, PrefillInstance
from jdserve.policy.base import Scheduler
from jdserve.policy.build import RouterConfig, machine_for, machine_of
from jdserve.policy.commands import Chunk, Command, Dispatch, Emit, Preempt, Pull, Reject, Release, RunStep
from jdserve.policy.decode import DecodeScheduler
from jdserve.policy.events import (
    Arrived,
    Cancelled,
    Draining,
    Event,
    Finished,
    KVLanded,
    KVReady,
    LeaseExpired,
    PeerFailed,
    PeerJoined,
    Preempted,
    PullFailed,
    StepDone,
)
from jdserve.policy.record import Header, Recorder, replay


@dataclass
class Ticket:
    """A request as the front door sees it."""

    id: str
    prompt_tokens: int
    max_new_tokens: int
    prefix: tuple[bytes, ...] = ()
    emitted: int = 0
    end: str | None = None
    reason: str = ""


@dataclass
class Flight:
    """A pull on its way; ``handle`` tells apart the runs of one request."""

    decode: str
    pull: Pull
    handle: int | None
    abandoned: bool = False


@dataclass
class Site:
    """The devices of one instance."""

    instance: Instance
    machine: object
    recorder: Recorder
    steps: deque[RunStep] = field(default_factory=deque)
    pages: dict[str, tuple[int, ...]] = field(default_factory=dict)
    content: dict[int, object] = field(default_factory=dict)
    parked: dict[str, int] = field(default_factory=dict)

    @property
    def step(self) -> RunStep | None:
        """The one that ends next."""
        return self.steps[0] if self.steps else None

    def in_step(self, id: str) -> bool:
        return any(id in _ids(step) for step in self.steps)


class Harness:
    def __init__(self, instances: Sequence[Instance], page_size: int, *, max_retries: int = 3, balance: str = "tokens"):
        self.page_size = page_size
        self.now = 0
        self.tickets: dict[str, Ticket] = {}
        self.sites: dict[str, Site] = {}
        self.flights: list[Flight] = []
        self.pulled: list[str] = []
        self.recorders: list[Recorder] = []
        self.preemptions = 0
        self._handles = 0
        self._inbox: deque[tuple[str, Event]] = deque()
        self._instances = {instance.name: instance for instance in instances}
        config = RouterConfig(
            prefill=tuple(i.name for i in instances if isinstance(i, PrefillInstance)),
            decode=tuple(i.name for i in instances if isinstance(i, DecodeInstance)),
            colocated=tuple(
                i.name for i in instances if not isinstance(i, PrefillInstance) and not isinstance(i, DecodeInstance)
            ),
            max_retries=max_retries,
            balance=balance,  # type: ignore[arg-type]
        )
        self.router = machine_of(config, page_size)
        self._router = self._record(self.router, config)
        for name in self._instances:
            self._start(name)

    # what a test does

    def arrive(self, id: str, prompt_tokens: int, max_new_tokens: int, prefix: tuple[bytes, ...] = ()) -> None:
        self.tickets[id] = Ticket(id, prompt_tokens, max_new_tokens, prefix)
        self._send("router", Arrived(id, prompt_tokens, max_new_tokens, prefix))

    def cancel(self, id: str) -> None:
        self._close(self.tickets[id], "cancelled")
        self._send("router", Cancelled(id))

    def finish_step(self, name: str, stopped: Iterable[str] = (), failed: Iterable[str] = ()) -> None:
        site = self.sites[name]
        for later in list(site.steps)[1:]:
            with pytest.raises(ValueError, match=f"step {site.steps[0].step_id} is the oldest in flight"):
                site.machine.handle(StepDone(later.step_id), self.now)  # type: ignore[attr-defined]
        step = site.steps.popleft()
        failed = tuple(failed)
        for chunk in step.chunks:
            self._fill(site, chunk, chunk.request_id in failed)
        self._send(name, StepDone(step.step_id, tuple(stopped), failed))

    def end_pull(self, flight: Flight, *, fail: bool = False) -> None:
        self.flights.remove(flight)
        if flight.abandoned:
            # its pages go back now, although the request may be here again
            del self.sites[flight.decode].pages[flight.pull.request_id]
        id, source = flight.pull.request_id, self.sites.get(flight.pull.source)
        there = source is not None and flight.handle is not None and source.parked.get(id) == flight.handle
        # a pull that was cancelled half-way may still land
        if not fail and (there or self.tickets[id].end is not None):
            events: list[tuple[str, Event]] = [
                (flight.decode, KVLanded(id)),
                (flight.pull.source, KVLanded(id)),
                ("router", KVLanded(id)),
            ]
        else:
            events = [(flight.decode, PullFailed(id, "test")), ("router", PullFailed(id, "test"))]
        self._inbox.extend(events)
        self._drain()

    def expire(self, name: str, id: str) -> None:
        self._send(name, LeaseExpired(id))

    def fail(self, name: str) -> None:
        del self.sites[name]
        self.flights = [flight for flight in self.flights if flight.decode != name]
        self._send("router", PeerFailed(name))

    def join(self, name: str) -> None:
        self._start(name)
        self._send("router", PeerJoined(name))

    def drain(self) -> None:
        self._send("router", Draining())

    # what it can ask

    def live(self) -> list[str]:
        return [ticket.id for ticket in self.tickets.values() if ticket.end is None]

    def busy(self) -> list[str]:
        return [name for name, site in self.sites.items() if site.steps]

    def check_end(self) -> None:
        """Everything has ended, with exact counts, and nothing is left anywhere."""
        for ticket in self.tickets.values():
            assert ticket.end is not None, ticket
            assert ticket.emitted <= ticket.max_new_tokens
            if ticket.end == "length":
                assert ticket.emitted == ticket.max_new_tokens, ticket
            if ticket.end == "stop":
                assert ticket.emitted >= 1, ticket
        assert self.router.idle()  # type: ignore[attr-defined]
        assert not any(self.router.load(name) for name in self._instances)  # type: ignore[attr-defined]
        for site in self.sites.values():
            assert site.machine.idle()  # type: ignore[attr-defined]
            assert site.machine.pool.owned == 0  # type: ignore[attr-defined]
            assert not site.pages
            assert not site.parked
        assert not self.flights

    def check_replay(self) -> None:
        for recorder in self.recorders:
            result = replay(recorder.lines())
            assert result.identical
            assert result.events == len(recorder.entries)

    # the machinery

    def _record(self, machine: object, config: Instance | RouterConfig) -> Recorder:
        recorder = Recorder(machine, Header(config, self.page_size))  # type: ignore[arg-type]
        self.recorders.append(recorder)
        return recorder

    def _start(self, name: str) -> None:
        instance = self._instances[name]
        machine = machine_for(instance, self.page_size)
        self.sites[name] = Site(instance, machine, self._record(machine, instance))

    def _send(self, target: str, event: Event) -> None:
        self._inbox.append((target, event))
        self._drain()

    def _drain(self) -> None:
        while self._inbox:
            target, event = self._inbox.popleft()
            self.now += 1
            if target == "router":
                for command in self._router.handle(event, self.now):
                    self._from_router(command)
            elif target in self.sites:
                site = self.sites[target]
                for flight in self.flights:
                    if isinstance(event, Cancelled) and (flight.decode, flight.pull.request_id) == (
                        target,
                        event.request_id,
                    ):
                        flight.abandoned = True
                for command in site.recorder.handle(event, self.now):
                    self._from_instance(target, site, command)
                site.machine.pool.check()  # type: ignore[attr-defined]
                held = {page for pages in site.pages.values() for page in pages}
                assert len(held) == site.machine.pool.owned  # type: ignore[attr-defined]
                _check_stages(site)

    def _from_router(self, command: Command) -> None:
        ticket = self.tickets[command.request_id]  # type: ignore[union-attr]
        left = ticket.max_new_tokens - ticket.emitted
        match command:
            case Dispatch(source=None):
                tokens = ticket.prompt_tokens + ticket.emitted
                self._inbox.append((command.instance, Arrived(ticket.id, tokens, left, ticket.prefix)))
            case Dispatch(source=str(source)):
                tokens = ticket.prompt_tokens + ticket.emitted - 1
                self._inbox.append((command.instance, KVReady(ticket.id, source, tokens, left)))
            case Release():
                assert command.instance is not None
                self._inbox.append((command.instance, Cancelled(ticket.id)))
            case Reject():
                self._close(ticket, "rejected", command.reason)
            case _:
                raise AssertionError(command)

    def _from_instance(self, name: str, site: Site, command: Command) -> None:
        if isinstance(command, RunStep):
            return self._launch(site, command)
        ticket = self.tickets[command.request_id]
        match command:
            case Pull():
                self._take(site, ticket.id, command.pages, command.pages)
                assert len(command.pages) * self.page_size > command.tokens
                for page in command.pages:
                    site.content.pop(page, None)
                source = self.sites.get(command.source)
                self.pulled.append(ticket.id)
                self.flights.append(Flight(name, command, source.parked.get(ticket.id) if source else None))
            case Emit():
                assert ticket.end is None, f"{ticket} got a token after its end"
                ticket.emitted += command.count
                if command.finish is not None:
                    self._close(ticket, command.finish)
                    self._inbox.append(("router", Finished(ticket.id)))
                elif command.parked:
                    self._handles += 1
                    site.parked[ticket.id] = self._handles
                    tokens = ticket.prompt_tokens + ticket.emitted - 1
                    left = ticket.max_new_tokens - ticket.emitted
                    self._inbox.append(("router", KVReady(ticket.id, name, tokens, left)))
            case Preempt():
                self.preemptions += 1
                if isinstance(site.instance, DecodeInstance):
                    tokens, left = ticket.prompt_tokens + ticket.emitted, ticket.max_new_tokens - ticket.emitted
                    self._inbox.append(("router", Preempted(ticket.id, tokens, left)))
                else:
                    self._give_back(name, site, ticket.id)
            case Release():
                self._give_back(name, site, ticket.id)
            case Reject():
                self._close(ticket, "rejected", command.reason)
                self._inbox.append(("router", Finished(ticket.id)))
            case _:
                raise AssertionError(command)
        return None

    def _close(self, ticket: Ticket, end: str, reason: str = "") -> None:
        assert ticket.end is None, f"{ticket} ended again: {end}"
        ticket.end, ticket.reason = end, reason

    def _launch(self, site: Site, step: RunStep) -> None:
        assert len(site.steps) < site.instance.pp, "more steps in flight than stages"
        assert not any(site.in_step(id) for id in _ids(step)), "a sequence in two steps"
        size = self.page_size
        for chunk in step.chunks:
            ticket = self.tickets[chunk.request_id]
            end = chunk.start + chunk.count
            assert chunk.count >= 1
            assert chunk.last == (end == ticket.prompt_tokens + ticket.emitted)
            self._take(site, ticket.id, chunk.pages, chunk.pages[chunk.start // size : pages_for(end, size)])
            for index in range(chunk.start // size):
                assert site.content[chunk.pages[index]] == self._expected(ticket, index)
        for seq in step.decodes:
            ticket = self.tickets[seq.request_id]
            assert seq.context == ticket.prompt_tokens + ticket.emitted
            written = seq.pages[(seq.context - 1) // size]
            self._take(site, ticket.id, seq.pages, (written,))
            site.content.pop(written, None)
        if not isinstance(site.instance, PrefillInstance):
            assert len(site.pages) <= site.instance.max_num_seqs, "more sequences than the devices have places"
        site.steps.append(step)

    def _take(self, site: Site, id: str, pages: tuple[int, ...], written: tuple[int, ...]) -> None:
        assert NULL_PAGE not in pages
        assert len(set(pages)) == len(pages)
        for other, theirs in site.pages.items():
            assert other == id or not set(written) & set(theirs), f"{id} writes pages of {other}"
        site.pages[id] = pages

    def _give_back(self, name: str, site: Site, id: str) -> None:
        pulling = any(flight.decode == name and flight.pull.request_id == id for flight in self.flights)
        assert not site.in_step(id), f"{id} gives back pages that a step writes"
        assert not pulling, f"{id} gives back pages that a pull writes"
        site.pages.pop(id, None)
        site.parked.pop(id, None)

    def _fill(self, site: Site, chunk: Chunk, failed: bool) -> None:
        ticket = self.tickets[chunk.request_id]
        end = chunk.start + chunk.count
        for index in range(chunk.start // self.page_size, pages_for(end, self.page_size)):
            if failed or (index + 1) * self.page_size > end:
                site.content.pop(chunk.pages[index], None)
            else:
                site.content[chunk.pages[index]] = self._expected(ticket, index)

    def _expected(self, ticket: Ticket, index: int) -> object:
        return ticket.prefix[index] if index < len(ticket.prefix) else (ticket.id, index)


def _check_stages(site: Site) -> None:
    """No stage waits while a sequence could decode, unless the plan wants it."""
    machine, instance = site.machine, site.instance
    if not isinstance(machine, DecodeScheduler) or not isinstance(instance, DecodeInstance):
        return
    waits = instance.pull == "between_steps" and machine.pulling
    if not waits and len(site.steps) < (instance.in_flight or instance.pp):
        idle = machine.running - sum(held.in_step for held in machine._running.values())
        assert not idle or (site.steps and idle == 1 and not machine.pool.available)


def _ids(step: RunStep) -> list[str]:
    return [part.request_id for part in (*step.chunks, *step.decodes)]


def oldest(machine: Scheduler) -> int:
    """Number of the oldest step in flight."""
    return machine._next_step - len(machine._flights)


def step_ids(step: RunStep | None) -> list[str]:
    """Requests of a step, in its order."""
    assert step is not None
    return _ids(step)
