"""What the machines of all instances share: a queue, a page pool, and the steps in flight, one per pipeline stage."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from jdserve.core.errors import OutOfPages
from jdserve.core.pages import BlockTable, PagePool, pages_for
from jdserve.core.request import Sequence, State
from jdserve.policy.commands import Chunk, Command, DecodeSeq, Emit, Release, RunStep
from jdserve.policy.events import Arrived, Event, StepDone


class Machine(Protocol):
    """Anything that decides: the router, or the scheduler of an instance."""

    def handle(self, event: Event, now: int) -> list[Command]:
        """Take ``event`` at ``now`` (nanoseconds) and say what is to be done."""
        ...


class Held:
    """One sequence on an instance, with its pages.

    Attributes:
        sequence: its state and token counts.
        prefix: chained hashes of the leading full prompt pages that may be shared.
        source: prefill instance on which its KV is parked; "" where the instance computes the prompt itself.
        table: its pages, empty until they are reserved.
        admitted: counts admissions; the largest is the youngest sequence.
        in_step: a step in flight writes its pages.
        cancelled: it ends as soon as nothing writes its pages any more.
    """

    __slots__ = ("admitted", "cancelled", "in_step", "prefix", "sequence", "source", "table")

    def __init__(self, sequence: Sequence, prefix: tuple[bytes, ...] = (), source: str = "") -> None:
        self.sequence = sequence
        self.prefix = prefix
        self.source = source
        self.table = BlockTable(())
        self.admitted = 0
        self.in_step = False
        self.cancelled = False

    @property
    def id(self) -> str:
        """Request id."""
        return self.sequence.id


class Flight(NamedTuple):
    """A step in flight.

    Attributes:
        step: as it was launched.
        prefilling: the sequences of its chunks, in their order.
        decoding: its decoding sequences.
    """

    step: RunStep
    prefilling: tuple[Held, ...]
    decoding: tuple[Held, ...]

    @property
    def sequences(self) -> tuple[Held, ...]:
        """All of them."""
        return self.prefilling + self.decoding


class Scheduler(ABC):
    """Base of the instance machines.

    An instance of several pipeline stages keeps as many steps in flight, so that no stage waits for another; no two of
    them hold the same sequence, and they end in the order of their launch.

    Attributes:
        pool: the pages of the instance.
        preemptions: how often a running sequence lost its pages.

    Args:
        pages: pages in the pool.
        page_size: token positions per page.
        depth: most steps in flight: the pipeline stages of the instance.
    """

    def __init__(self, pages: int, page_size: int, depth: int) -> None:
        self.pool = PagePool(pages, page_size)
        self.preemptions = 0
        self._queue: OrderedDict[str, Held] = OrderedDict()
        self._running: dict[str, Held] = {}
        # a request may come back while its cancelled run still waits for the end of a step or pull
        self._runs: Counter[str] = Counter()
        self._depth = depth
        self._flights: deque[Flight] = deque()
        self._next_step = 0
        self._admissions = 0

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
        self._runs[held.id] += 1

    def _shareable(self, held: Held) -> tuple[bytes, ...]:
        # the last prompt token is always computed, because its logits give the next token
        return held.prefix[: (held.sequence.prompt_tokens - 1) // self.pool.page_size]

    def _uncached(self, held: Held) -> int:
        """Prompt tokens of a queued sequence that a step would have to compute."""
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
        self._running[held.id] = held
        return True

    def _leave_queue(self, held: Held, to: State) -> None:
        del self._queue[held.id]
        held.sequence.move(to)
        held.admitted = self._admissions
        self._admissions += 1

    def _publish(self, held: Held) -> None:
        self.pool.publish(held.table, held.prefix[: held.sequence.computed // self.pool.page_size])

    def _end(self, held: Held, to: State = State.FINISHED) -> list[Command]:
        """Give back the pages of a sequence that no list refers to any more."""
        self.pool.release(held.table)
        held.sequence.move(to)
        return self._forget(held.id)

    def _forget(self, request_id: str) -> list[Command]:
        """Release a request with its last run."""
        self._runs[request_id] -= 1
        if self._runs[request_id]:
            return []
        del self._runs[request_id]
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
        else:
            commands += self._end(held)

    @property
    def _places(self) -> int:
        """Steps that may be launched now."""
        return self._depth - len(self._flights)

    @property
    def _leaving(self) -> int:
        """Cancelled sequences that are still in a step at the next launch, and until then keep their place."""
        # where no step may be launched, the oldest ends before the next one is
        flights = itertools.islice(self._flights, 0 if self._places else 1, None)
        return sum(held.cancelled for flight in flights for held in flight.sequences)

    def _micro_batch(self) -> list[Held]:
        """The decoding sequences of the next step, oldest first: an equal share of all, and of those in no step.

        A stage waits for the longest step, and the steps of a pipeline take each other's time: hence equal ones
        (DistServe, OSDI'24, section 3.3). With one stage these are all sequences that decode.
        """
        decoding = [held for held in self._running.values() if held.sequence.state is State.DECODING]
        idle = [held for held in decoding if not held.in_step]
        return idle[: min(-(-len(decoding) // self._depth), -(-len(idle) // self._places))]

    def _make_room(self, batch: list[Held]) -> list[Held]:
        """Give each sequence of ``batch`` a page for its next token; preempt the youngest until there are enough.

        A sequence in a step is not preempted. Where its single sequence in no step would have to give way to itself,
        ``batch`` is emptied instead, to wait for the end of a step: only a sequence alone is preempted for itself.

        Returns:
            The preempted sequences, youngest first: without pages, QUEUED, no longer among the running ones, and no
            longer in ``batch``.
        """
        victims: list[Held] = []
        while len(self._short(batch)) > self.pool.available:
            idle = [held for held in self._running.values() if not held.in_step]
            if len(idle) == 1 and self._flights:
                batch.clear()
                break
            victim = max(idle, key=lambda held: held.admitted)
            if victim in batch:
                batch.remove(victim)
            del self._running[victim.id]
            self.pool.release(victim.table)
            victim.sequence.move(State.QUEUED)
            victims.append(victim)
        for held in self._short(batch):
            self.pool.grow(held.table, 1)
        self.preemptions += len(victims)
        return victims

    def _short(self, batch: list[Held]) -> list[Held]:
        return [held for held in batch if held.sequence.computed == len(held.table) * self.pool.page_size]

    def _run(self, chunks: Seq[Chunk] = (), prefilling: Seq[Held] = (), decoding: Seq[Held] = ()) -> RunStep:
        """Launch ``chunks`` of the sequences ``prefilling``, and one token of each of ``decoding``."""
        step = RunStep(self._next_step, tuple(chunks), tuple(decode_seq(held) for held in decoding))
        flight = Flight(step, tuple(prefilling), tuple(decoding))
        for held in flight.sequences:
            held.in_step = True
        self._next_step += 1
        self._flights.append(flight)
        return step

    def _step_ended(self, event: StepDone) -> Flight:
        """Take the oldest step out of the flight; its sequences are in no step any more."""
        oldest = self._flights[0].step.step_id if self._flights else None
        if event.step_id != oldest:
            expected = "no step is in flight" if oldest is None else f"step {oldest} is the oldest in flight"
            raise ValueError(f"step_id {event.step_id} ended, but {expected}")
        flight = self._flights.popleft()
        for held in flight.sequences:
            held.in_step = False
        return flight


def sampled(held: Held, done: StepDone) -> Emit:
    """Count the token that ``held`` got from the step, and say what goes out.

    The end of the text is, in this order: a failure, a prompt that was only to be scored, a stop token, the length.
    """
    sequence = held.sequence
    if held.id in done.failed:
        return Emit(held.id, 0, "error")
    if sequence.max_new_tokens == 0:
        return Emit(held.id, 0, "length")
    sequence.generated += 1
    if held.id in done.stopped:
        return Emit(held.id, 1, "stop")
    return Emit(held.id, 1, "length" if sequence.generated == sequence.max_new_tokens else None)


def decode_seq(held: Held) -> DecodeSeq:
    """The part of a step that decodes one token of ``held``."""
    return DecodeSeq(held.id, held.sequence.computed + 1, held.table.pages)


def watermark_pages(share: float, total: int) -> int:
    """Pages that ``share`` of ``total`` stands for, rounded up (rounding errors of the product aside)."""
    return math.ceil(round(share * total, 6))
