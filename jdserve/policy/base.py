"""What the machines of all instances share: a queue, a page pool, and at most one step in flight."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from typing import Protocol

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
        in_step: the step in flight writes its pages.
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


class Scheduler(ABC):
    """Base of the instance machines.

    Attributes:
        pool: the pages of the instance.
        preemptions: how often a running sequence lost its pages.

    Args:
        pages: pages in the pool.
        page_size: token positions per page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pool = PagePool(pages, page_size)
        self.preemptions = 0
        self._queue: OrderedDict[str, Held] = OrderedDict()
        self._running: dict[str, Held] = {}
        # a request may come back while its cancelled run still waits for the end of a step or pull
        self._runs: Counter[str] = Counter()
        self._in_flight = False
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

    def _make_room(self) -> list[Held]:
        """Give every decoding sequence a page for its next token; preempt the youngest until there are enough.

        Returns:
            The preempted sequences, youngest first: without pages, QUEUED, and no longer among the running ones.
        """
        victims: list[Held] = []
        while len(short := self._short()) > self.pool.available:
            victim = max(self._running.values(), key=lambda held: held.admitted)
            del self._running[victim.id]
            self.pool.release(victim.table)
            victim.sequence.move(State.QUEUED)
            victims.append(victim)
        for held in short:
            self.pool.grow(held.table, 1)
        self.preemptions += len(victims)
        return victims

    def _short(self) -> list[Held]:
        size = self.pool.page_size
        return [
            held
            for held in self._running.values()
            if held.sequence.state is State.DECODING and held.sequence.computed == len(held.table) * size
        ]

    def _run(self, chunks: tuple[Chunk, ...] = (), decodes: tuple[DecodeSeq, ...] = ()) -> RunStep:
        step = RunStep(self._next_step, chunks, decodes)
        self._next_step += 1
        self._in_flight = True
        return step

    def _step_ended(self, event: StepDone) -> None:
        if not self._in_flight or event.step_id != self._next_step - 1:
            expected = f"step {self._next_step - 1}" if self._in_flight else "no step"
            raise ValueError(f"step_id {event.step_id} ended, but {expected} is in flight")
        self._in_flight = False


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
