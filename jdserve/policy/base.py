"""What the machines of all instances share: a queue, a page pool, and the steps in flight, one per pipeline stage."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence as Seq
from typing import Protocol

import msgspec

from jdserve.core.errors import OutOfPages
from jdserve.core.pages import PageCount, PagePool, pages_for
from jdserve.core.request import Sequence, State
from jdserve.core.steptime import StepFeatures
from jdserve.policy.commands import BriefStep, Chunk, Command, DecodeSeq, Emit, Release, RunStep
from jdserve.policy.events import Arrived, Event, StepDone
from jdserve.policy.held import Batch, Held, in_order, pages_last


class Machine(Protocol):
    """Anything that decides: the router, or the scheduler of an instance."""

    def handle(self, event: Event, now: int) -> list[Command]:
        """Take ``event`` at ``now`` (nanoseconds) and say what is to be done."""
        ...


class Part(msgspec.Struct, frozen=True):
    """The next ``tokens`` prompt tokens of a sequence, in one step."""

    held: Held
    tokens: int


class Flight(msgspec.Struct, frozen=True):
    """A step in flight.

    Attributes:
        step_id: as it was launched.
        parts: what it computes of prompts.
        batch: what it decodes; None where it only computes prompts.
    """

    step_id: int
    parts: tuple[Part, ...]
    batch: Batch | None

    @property
    def leaving(self) -> int:
        """Cancelled sequences in it."""
        cancelled = 0 if self.batch is None else len(self.batch.leaving)
        return cancelled + sum(part.held.cancelled for part in self.parts)


class Scheduler(ABC):
    """Base of the instance machines.

    An instance of several pipeline stages keeps as many steps in flight, so that no stage waits for another; no two of
    them hold the same sequence, and they end in the order of their launch.

    A *brief* machine decides the same and says less, which is all that a simulator needs, and costs less: steps by
    their features alone (BriefStep), and of the tokens of a sequence one Emit when it ends, is parked or is preempted.

    Attributes:
        pool: the pages of the instance.
        preemptions: how often a running sequence lost its pages.

    Args:
        pool: its pages.
        depth: most steps in flight: the pipeline stages of the instance.
        brief: say only what a simulator needs.
    """

    def __init__(self, pool: PagePool, depth: int, brief: bool) -> None:
        self.pool = pool
        self.preemptions = 0
        self._brief = brief
        self._queue: dict[str, Held] = {}
        self._running: dict[str, Held] = {}
        # a request may come back while its cancelled run still waits for the end of a step or pull
        self._runs: dict[str, int] = {}
        self._depth = depth
        self._flights: deque[Flight] = deque()
        # sequences that decode, and are in no step: in batches whose step has ended, or in none yet
        self._resting: list[Batch] = []
        self._idle: dict[str, Held] = {}
        self._next_step = 0
        self._steady: int | None = None  # the horizon, where it is known
        self._admissions = 0
        self._begun = 0
        self._abandoned = 0  # cancelled sequences that were in a step; they never get fewer

    @abstractmethod
    def handle(self, event: Event, now: int) -> list[Command]:
        """Take ``event`` at ``now`` (nanoseconds) and say what is to be done.

        Raises:
            TypeError: the machine does not take events of this type.
            ValueError: the event contradicts what the machine knows.
        """

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the sequences in the queue."""
        return sum(held.sequence.prompt_tokens for held in self._queue.values())

    @property
    def running(self) -> int:
        """Sequences that are prefilled or decoded here, those waiting for the next step included."""
        return len(self._running)

    @property
    def parked(self) -> int:
        """Sequences whose KV waits for its pull."""
        return 0

    def idle(self) -> bool:
        """True when nothing is queued, pulling, running or parked, and no cancelled sequence waits for its end."""
        return not self._runs

    def _refuse(self, event: Event) -> TypeError:
        return TypeError(f"{type(self).__name__} takes no {type(event).__name__}")

    def _new_prompt(self, event: Arrived, prefix_cache: bool) -> Held:
        if event.prompt_tokens < 1:
            raise ValueError(f"request {event.request_id}: prompt_tokens must be at least 1, got {event.prompt_tokens}")
        if event.max_new_tokens < 0:
            raise ValueError(
                f"request {event.request_id}: max_new_tokens must be at least 0, got {event.max_new_tokens}"
            )
        sequence = Sequence(event.request_id, event.prompt_tokens, event.max_new_tokens)
        return Held(sequence, event.prefix if prefix_cache else ())

    def _enqueue(self, held: Held) -> None:
        if held.id in self._queue or held.id in self._running:
            raise ValueError(f"request {held.id} is here already")
        self._queue[held.id] = held
        self._runs[held.id] = self._runs.get(held.id, 0) + 1

    def _begin(self, held: Held) -> None:
        """A sequence runs from now on."""
        self._running[held.id] = held
        held.order = self._begun
        self._begun += 1

    def _shareable(self, held: Held) -> tuple[bytes, ...]:
        # the last prompt token is always computed, because its logits give the next token
        return held.prefix[: (held.sequence.prompt_tokens - 1) // self.pool.page_size] if held.prefix else ()

    def _uncached(self, held: Held) -> int:
        """Prompt tokens of a queued sequence that a step would have to compute."""
        if not held.prefix:
            return held.sequence.prompt_tokens
        return held.sequence.prompt_tokens - self.pool.match(self._shareable(held)) * self.pool.page_size

    def _reserve_prompt(self, held: Held, spare: int = 0) -> bool:
        """Reserve the pages of a whole prompt, if at least ``spare`` stay available; say whether it was done."""
        count = pages_for(held.sequence.prompt_tokens, self.pool.page_size)
        shareable = self._shareable(held)
        if spare:
            shared = self.pool.match(shareable)
            # shared pages that nobody owns stop being available too; how many that is, the pool does not tell
            if count - shared + min(shared, self.pool.cached) > self.pool.available - spare:
                return False
        try:
            held.table = self.pool.reserve(count, shareable)
        except OutOfPages:
            return False
        held.sequence.computed = held.table.shared * self.pool.page_size
        self._leave_queue(held, State.PREFILLING)
        self._begin(held)
        return True

    def _leave_queue(self, held: Held, to: State) -> None:
        del self._queue[held.id]
        held.sequence.move(to)
        held.admitted = self._admissions
        self._admissions += 1

    def _publish(self, held: Held) -> None:
        if held.prefix:
            self.pool.publish(held.table, held.prefix[: held.sequence.computed // self.pool.page_size])

    def _end(self, held: Held, to: State = State.FINISHED) -> list[Command]:
        """Give back the pages of a sequence that no list refers to any more."""
        self.pool.release(held.table)
        held.sequence.move(to)
        return self._forget(held.id)

    def _forget(self, request_id: str) -> list[Command]:
        """Release a request with its last run."""
        left = self._runs.pop(request_id) - 1
        if left:
            self._runs[request_id] = left
            return []
        return [Release(request_id)]

    def _cancel(self, request_id: str, commands: list[Command]) -> None:
        """End a sequence that is queued or running; unknown ids are ignored."""
        queued = self._queue.pop(request_id, None)
        if queued is not None:
            commands += self._end(queued)
        held = self._running.pop(request_id, None)
        if held is None:
            return
        if held.in_step:
            # its pages are being written: they must not be handed out before the step ends
            held.cancelled = True
            self._abandoned += 1
            if held.batch is not None:
                held.batch.leaving.append(held)
        else:
            self._withdraw(held)
            commands += self._end(held)

    def _decodes_next(self, held: Held) -> None:
        """A sequence has its prompt computed, and waits for its first decode step."""
        behind = next(reversed(self._idle.values())).order if self._idle else -1
        self._idle[held.id] = held
        if held.order < behind:
            self._idle = {held.id: held for held in in_order(list(self._idle.values()))}

    def _withdraw(self, held: Held) -> None:
        """Take a sequence that is in no step out of those that decode."""
        if held.batch is not None:
            held.batch.leave(held)
        else:
            self._idle.pop(held.id, None)

    @property
    def _places(self) -> int:
        """Steps that may be launched now."""
        return self._depth - len(self._flights)

    @property
    def _leaving(self) -> int:
        """Cancelled sequences that are still in a step at the next launch, and until then keep their place."""
        if not self._abandoned:
            return 0
        # where no step may be launched, the oldest ends before the next one is
        flights = itertools.islice(self._flights, 0 if self._places else 1, None)
        return sum(flight.leaving for flight in flights)

    def _next_batch(self) -> Batch | None:
        """The decoding sequences of the next step, oldest first: an equal share of all, and of those in no step.

        A stage waits for the longest step, and the steps of a pipeline take each other's time: hence equal ones
        (DistServe, OSDI'24, section 3.3). With one stage these are all sequences that decode.
        """
        if self._depth == 1:
            return self._everybody()
        waiting = len(self._idle) + sum(len(batch) for batch in self._resting)
        if not waiting:
            self._resting.clear()
            return None
        flying = sum(len(flight.batch) - len(flight.batch.leaving) for flight in self._flights if flight.batch)
        size = min(-(-(waiting + flying) // self._depth), -(-waiting // self._places))
        batch = self._gather(size)
        for held in list(itertools.islice(self._idle.values(), size - len(batch))):
            del self._idle[held.id]
            batch.join(held)
        return batch

    def _everybody(self) -> Batch | None:
        """All sequences that decode and are in no step, in one batch."""
        idle = self._idle
        batch = self._resting.pop() if self._resting else None
        if batch is None or not batch.members:
            if not idle:
                return None
            batch = Batch(self.pool)
        if idle:
            last = next(reversed(batch.members.values())).order if batch.members else -1
            if next(iter(idle.values())).order < last:
                self._disband(batch)
                batch = Batch(self.pool)
                idle = self._idle
            for held in idle.values():
                batch.join(held)
            idle.clear()
        return batch

    def _gather(self, size: int) -> Batch:
        """A batch of at most ``size`` of those in no step: a resting one, where the oldest of them are its members."""
        resting = [batch for batch in self._resting if batch.members]
        self._resting.clear()
        if not resting:
            return Batch(self.pool)
        batch = resting[0]
        last = next(reversed(batch.members.values())).order
        if len(resting) > 1 or any(held.order < last for held in self._idle.values()):
            batch = Batch(self.pool)
            for other in resting:
                self._disband(other)
        elif len(batch) > size:
            self._disband(batch, size)
        return batch

    def _disband(self, batch: Batch, keep: int = 0) -> None:
        """Let all members but the first ``keep`` go and wait in no batch."""
        for held in list(itertools.islice(batch.members.values(), keep, None)):
            batch.leave(held)
            self._idle[held.id] = held
        self._idle = {held.id: held for held in in_order(list(self._idle.values()))}

    def _make_room(self, batch: Batch) -> list[Held]:
        """Give each sequence of ``batch`` a page for its next token; preempt the youngest until there are enough.

        A sequence in a step is not preempted. Where its single sequence in no step would have to give way to itself,
        ``batch`` is emptied instead, to wait for the end of a step: only a sequence alone is preempted for itself.

        Returns:
            The preempted sequences, youngest first: without pages, QUEUED, no longer among the running ones, and no
            longer in ``batch``.
        """
        victims: list[Held] = []
        while (short := batch.short()) and len(short) > self.pool.available:
            able = [held for held in self._running.values() if not held.in_step]
            if len(able) == 1 and self._flights:
                self._disband(batch)
                return victims
            victim = max(able, key=lambda held: held.admitted)
            self._withdraw(victim)
            del self._running[victim.id]
            self.pool.release(victim.table)
            victim.sequence.move(State.QUEUED)
            victims.append(victim)
            self.preemptions += 1
        if short:
            batch.grow(short)
        return victims

    def _run(self, parts: Seq[Part] = (), batch: Batch | None = None) -> Command:
        """Launch ``parts`` of prompts, and one token of each member of ``batch``."""
        for part in parts:
            part.held.computing = True
        if batch is not None:
            batch.flying = True
        flight = Flight(self._next_step, tuple(parts), batch)
        self._next_step += 1
        self._flights.append(flight)
        return self._told(flight)

    def _told(self, flight: Flight) -> BriefStep | RunStep:
        """The command that launches a flight."""
        batch = flight.batch
        if self._brief:
            prompts = tuple([part.held.id for part in flight.parts]) if flight.parts else ()
            return BriefStep(flight.step_id, _features(flight), prompts)
        chunks = tuple(_chunk(part) for part in flight.parts)
        decodes = () if batch is None else tuple(decode_seq(held) for held in batch.members.values())
        return RunStep(flight.step_id, chunks, decodes)

    def _ids(self, held: Held) -> tuple[int, ...]:
        """Pages of a sequence, as a command names them; a brief one does not."""
        return () if self._brief else tuple(held.table.pages)

    def _step_ended(self, event: StepDone) -> Flight:
        """Take the oldest step out of the flight; its sequences are in no step any more."""
        oldest = self._flights[0].step_id if self._flights else None
        if event.step_id != oldest:
            expected = "no step is in flight" if oldest is None else f"step {oldest} is the oldest in flight"
            raise ValueError(f"step_id {event.step_id} ended, but {expected}")
        flight = self._flights.popleft()
        for part in flight.parts:
            part.held.computing = False
        if flight.batch is not None:
            flight.batch.flying = False
            flight.batch.step()
            self._resting.append(flight.batch)
        return flight

    def _decoded(self, batch: Batch, event: StepDone, commands: list[Command]) -> None:
        """Say what the members of a batch got from the step that has ended, and end those that are done."""
        done = {held.id: held for held in batch.ended()}
        if batch.leaving or event.stopped or event.failed:
            done |= {held.id: held for held in batch.leaving}
            done |= {id: batch.members[id] for id in (*event.stopped, *event.failed) if id in batch.members}
            batch.leaving.clear()
        if not done and self._brief:
            return
        for held in in_order(list(done.values())) if self._brief else list(batch.members.values()):
            if held.id not in done:
                commands.append(Emit(held.id))
                continue
            batch.leave(held)
            if not held.cancelled:
                held.sequence.generated -= 1  # counted by the batch, and again here
                commands.append(self._sampled(held, event))
                del self._running[held.id]
            commands += self._end(held)

    def _sampled(self, held: Held, done: StepDone) -> Emit:
        """Count the token that ``held`` got from the step, and say what goes out.

        The end of the text is, in this order: a failure, a prompt that was only to be scored, a stop token, the length.
        """
        sequence = held.sequence
        if held.id in done.failed:
            return Emit(held.id, self._untold(held, 0), "error")
        if sequence.max_new_tokens == 0:
            return Emit(held.id, 0, "length")
        sequence.generated += 1
        count = self._untold(held, 1)
        if held.id in done.stopped:
            return Emit(held.id, count, "stop")
        return Emit(held.id, count, "length" if sequence.generated == sequence.max_new_tokens else None)

    def _untold(self, held: Held, newest: int) -> int:
        """Tokens that the next Emit tells, of which the last step gave ``newest``."""
        if not self._brief:
            return newest
        count, held.told = held.sequence.generated - held.told, held.sequence.generated
        return count

    def horizon(self) -> int:
        """For how many StepDone events from now no decision can change, if no other event comes and no text stops.

        Until then the same sequences decode together, nothing ends by its length, nothing is admitted (pages only get
        fewer, so the head of the queue stays blocked) and the pages suffice. Each of several stages then has its own
        batch, which is launched again as soon as it ends, so one event is a step of the oldest of them.

        Returns:
            0 when no step is in flight, one computes prompts, or the very next StepDone decides something.
        """
        if self._steady is None:
            self._steady = self._find_horizon()
        return self._steady

    def _find_horizon(self) -> int:
        flights = self._flights
        if not flights or self._idle or (self._resting and any(self._resting)):
            return 0
        if self._depth == 1:
            batch = flights[0].batch
            if batch is None or flights[0].parts or batch.leaving or not batch.members:
                return 0
            most = batch.left() - 1
            return pages_last((batch,), self.pool.available, most) if most else 0
        total = 0
        for flight in flights:
            if flight.parts or not flight.batch or flight.batch.leaving:
                return 0
            total += len(flight.batch)
        share = -(-total // self._depth)
        batches = [flight.batch for flight in flights if flight.batch]
        for batch in batches:
            # a batch that is no equal share, or that two free places would split, is dealt anew
            if len(batch) > share or (len(batch) > 1 and self._places):
                return 0
        most = min(place + (batch.left() - 1) * len(batches) for place, batch in enumerate(batches))
        return pages_last(batches, self.pool.available, most) if most else 0

    def advance(self, k: int, now: int) -> list[Command]:
        """Take ``k`` StepDone events at once: one Emit per sequence, and the step that is launched last.

        A brief machine has nothing to say. State and pages are those that ``k`` single events give.

        Raises:
            ValueError: ``k`` is not between 1 and :meth:`horizon`.
        """
        horizon = self.horizon()
        if not 1 <= k <= horizon:
            raise ValueError(f"k must be between 1 and the horizon {horizon}, got {k}")
        self._steady = horizon - k
        if self._depth == 1:
            return self._advance_one(self._flights[0], k)
        batches = [flight.batch for flight in self._flights if flight.batch]
        turns = len(batches)
        each = [(k - place + turns - 1) // turns for place in range(turns)]
        if isinstance(self.pool, PageCount):
            self.pool.take(sum(batch.growth(steps) for batch, steps in zip(batches, each, strict=True)))
        else:
            for event in range(k):
                batches[event % turns].grow_at(event // turns + 1)
        emits: list[Command] = []
        for batch, steps in zip(batches, each, strict=True):
            batch.step(steps)
            if steps and not self._brief:
                emits += (Emit(held.id, steps) for held in batch.members.values())
        first, self._next_step = self._flights[0].step_id + k, self._next_step + k
        self._flights.clear()
        for place in range(turns):
            self._flights.append(Flight(first + place, (), batches[(place + k) % turns]))
        return emits if self._brief else [*emits, self._told(self._flights[-1])]

    def _advance_one(self, flight: Flight, k: int) -> list[Command]:
        batch = flight.batch
        assert batch is not None
        if isinstance(self.pool, PageCount):
            self.pool.take(batch.growth(k))
        else:
            for ahead in range(1, k + 1):
                batch.grow_at(ahead)
        batch.step(k)
        self._next_step += k
        self._flights[0] = last = Flight(flight.step_id + k, (), batch)
        return [] if self._brief else [*(Emit(held.id, k) for held in batch.members.values()), self._told(last)]


def _features(flight: Flight) -> StepFeatures:
    new = pairs = prefix = 0
    for part in flight.parts:
        new += part.tokens
        pairs += part.tokens * part.tokens
        prefix += part.tokens * part.held.sequence.computed
    batch = flight.batch
    if batch is None:
        return StepFeatures(new, pairs, prefix)
    # each member also attends to the token that is fed in
    return StepFeatures(new, pairs, prefix, len(batch.members), batch.tokens + len(batch.members))


def _chunk(part: Part) -> Chunk:
    held, start = part.held, part.held.sequence.computed
    last = start + part.tokens == held.sequence.prompt_tokens
    return Chunk(held.id, start, part.tokens, tuple(held.table.pages), last)


def decode_seq(held: Held) -> DecodeSeq:
    """The part of a step that decodes one token of ``held``."""
    return DecodeSeq(held.id, held.computed + 1, tuple(held.table.pages))


def watermark_pages(share: float, total: int) -> int:
    """Pages that ``share`` of ``total`` stands for, rounded up (rounding errors of the product aside)."""
    return math.ceil(round(share * total, 6))
