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
from jdserve.core.pages import PagePool, pages_for
from jdserve.core.request import FINISHED, PREFILLING, Sequence, State
from jdserve.core.steptime import StepFeatures
from jdserve.policy.commands import BriefStep, Chunk, Command, DecodeSeq, Emit, Release, RunStep
from jdserve.policy.events import Arrived, Event, StepDone
from jdserve.policy.held import Batch, Held


class Machine(Protocol):
    """Anything that decides: the router, or the scheduler of an instance."""

    def handle(self, event: Event, now: int) -> list[Command]:
        """Take ``event`` at ``now`` (nanoseconds) and say what is to be done."""
        ...


class Part(msgspec.Struct, frozen=True):
    """The next ``tokens`` prompt tokens of a sequence, in one step."""

    held: Held
    tokens: int


class Flight(msgspec.Struct):
    """A step in flight.

    Attributes:
        parts: what it computes of prompts.
        batch: what it decodes; None where it only computes prompts.
    """

    parts: Seq[Part]
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
        self.preemptions: int = 0
        self._brief = brief
        self._queue: dict[str, Held] = {}
        self._ranked = False  # a request had a priority: until then nobody looks for an order
        self._running: dict[str, Held] = {}
        # a request may come back while its cancelled run still waits for the end of a step or pull
        self._runs: dict[str, int] = {}
        self._depth = depth
        self._flights: deque[Flight] = deque()
        self._next_step: int = 0
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
        return Held(sequence, event.prefix if prefix_cache else (), priority=event.priority)

    def _enqueue(self, held: Held) -> None:
        id = held.id
        if id in self._queue or id in self._running:
            raise ValueError(f"request {id} is here already")
        self._ranked = self._ranked or held.priority != 0
        later = [other for other in self._queue.values() if other.priority > held.priority] if self._ranked else []
        self._queue[id] = held
        for other in later:  # a dictionary keeps the order in which entries came
            self._queue[other.id] = self._queue.pop(other.id)
        self._runs[id] = self._runs.get(id, 0) + 1

    def _begin(self, held: Held) -> None:
        """A sequence runs from now on."""
        self._running[held.id] = held
        held.order = self._begun
        self._begun += 1

    def _shareable(self, held: Held) -> tuple[bytes, ...]:
        # the last prompt token is always computed, because its logits give the next token
        return held.prefix[: (held.sequence.prompt_tokens - 1) // self.pool.page_size]

    def _uncached(self, held: Held) -> int:
        """Prompt tokens of a queued sequence that a step would have to compute."""
        if not held.prefix:
            return held.sequence.prompt_tokens
        return held.sequence.prompt_tokens - self.pool.match(self._shareable(held)) * self.pool.page_size

    def _reserve_prompt(self, held: Held, spare: int = 0) -> bool:
        """Reserve the pages of a whole prompt, if at least ``spare`` stay available; say whether it was done."""
        pool = self.pool
        count = pages_for(held.sequence.prompt_tokens, pool.page_size)
        shareable = self._shareable(held) if held.prefix else ()
        if spare:
            shared = pool.match(shareable)
            # shared pages that nobody owns stop being available too; how many that is, the pool does not tell
            if count - shared + min(shared, pool.cached) > pool.available - spare:
                return False
        try:
            held.table = table = pool.reserve(count, shareable)
        except OutOfPages:
            return False
        held.sequence.computed = table.shared * pool.page_size
        self._leave_queue(held, PREFILLING)
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

    def _end(self, held: Held, to: State = FINISHED) -> list[Command]:
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

    @abstractmethod
    def _withdraw(self, held: Held) -> None:
        """Take a running sequence that is in no step out of what is kept besides of those that run."""

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

    def _run(self, parts: Seq[Part] = (), batch: Batch | None = None) -> Command:
        """Launch ``parts`` of prompts, and one token of each member of ``batch``."""
        for part in parts:
            part.held.computing = True
        if batch is not None:
            batch.flying = True
        self._next_step += 1
        self._flights.append(Flight(parts, batch))
        return self._told(parts, batch)

    def _told(self, parts: Seq[Part], batch: Batch | None) -> BriefStep | RunStep:
        """The command that launches the newest step."""
        step_id = self._next_step - 1
        if self._brief:
            prompts = tuple([part.held.id for part in parts]) if parts else ()
            return BriefStep(step_id, _features(parts, batch), prompts)
        chunks = tuple(_chunk(part) for part in parts)
        decodes = () if batch is None else tuple(decode_seq(held) for held in batch.members.values())
        return RunStep(step_id, chunks, decodes)

    def _ids(self, held: Held) -> tuple[int, ...]:
        """Pages of a sequence, as a command names them; a brief one does not."""
        return () if self._brief else tuple(held.table.pages)

    def _step_ended(self, event: StepDone) -> Flight:
        """Take the oldest step out of the flight; its sequences are in no step any more."""
        flights = self._flights
        oldest = self._next_step - len(flights)
        if not flights or event.step_id != oldest:
            expected = f"step {oldest} is the oldest in flight" if flights else "no step is in flight"
            raise ValueError(f"step_id {event.step_id} ended, but {expected}")
        flight = flights.popleft()
        for part in flight.parts:
            part.held.computing = False
        return flight

    def _sampled(self, held: Held, done: StepDone) -> Emit:
        """Count the token that ``held`` got from the step, and say what goes out.

        The end of the text is, in this order: a failure, a prompt that was only to be scored, a stop token, the length.
        """
        sequence, id = held.sequence, held.id
        if done.failed and id in done.failed:
            return Emit(id, self._untold(held, 0), "error")
        most = sequence.max_new_tokens
        if most == 0:
            return Emit(id, 0, "length")
        sequence.generated = generated = sequence.generated + 1
        count = self._untold(held, 1)
        if done.stopped and id in done.stopped:
            return Emit(id, count, "stop")
        return Emit(id, count, "length" if generated == most else None)

    def _untold(self, held: Held, newest: int) -> int:
        """Tokens that the next Emit tells, of which the last step gave ``newest``."""
        if not self._brief:
            return newest
        count, held.told = held.sequence.generated - held.told, held.sequence.generated
        return count


def _features(parts: Seq[Part], batch: Batch | None) -> StepFeatures:
    members = context = 0
    if batch is not None:
        members = len(batch.members)
        context = batch.tokens + members  # each member also attends to the token that is fed in
    if not parts:
        return StepFeatures(0, 0, 0, members, context)
    new = pairs = prefix = 0
    for part in parts:
        tokens = part.tokens
        new += tokens
        pairs += tokens * tokens
        prefix += tokens * part.held.sequence.computed
    return StepFeatures(new, pairs, prefix, members, context)


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
