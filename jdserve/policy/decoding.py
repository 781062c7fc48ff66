"""What the machines share whose instances decode: batches that stay together from step to step.

Sequences are dealt to one batch per pipeline stage. As long as nobody joins, ends or lacks a page, every step is like
the one before; :meth:`DecodingScheduler.horizon` says for how long, and :meth:`DecodingScheduler.advance` takes these
steps at once.
"""

from __future__ import annotations

import itertools

from jdserve.core.pages import PageCount, PagePool
from jdserve.core.request import QUEUED
from jdserve.policy.base import Scheduler
from jdserve.policy.commands import Command, Emit
from jdserve.policy.events import StepDone
from jdserve.policy.held import Batch, Held, in_order, pages_last


class DecodingScheduler(Scheduler):
    """Base of the machines of decode and colocated instances.

    Args:
        pool: the pages of the instance.
        depth: most steps in flight.
        brief: say only what a simulator needs.
    """

    def __init__(self, pool: PagePool, depth: int, brief: bool) -> None:
        super().__init__(pool, depth, brief)
        # sequences that decode, and are in no step: in batches whose step has ended, or in none yet
        self._resting: list[Batch] = []
        self._idle: dict[str, Held] = {}
        self._steady: int | None = None  # the horizon, where it is known

    def _decodes_next(self, held: Held) -> None:
        """A sequence has its prompt computed, and waits for its first decode step."""
        behind = next(reversed(self._idle.values())).order if self._idle else -1
        self._idle[held.id] = held
        if held.order < behind:
            self._idle = {held.id: held for held in in_order(self._idle.values())}

    def _withdraw(self, held: Held) -> None:
        """Take a sequence that is in no step out of those that decode."""
        if held.batch is not None:
            held.batch.leave(held)
        else:
            self._idle.pop(held.id, None)

    def _next_batch(self) -> Batch | None:
        """The decoding sequences of the next step, oldest first: an equal share of all, and of those in no step.

        A stage waits for the longest step, and the steps of a pipeline take each other's time: hence equal ones
        (DistServe, OSDI'24, section 3.3). With one stage these are all sequences that decode.
        """
        if self._depth == 1:
            return self._everybody()
        flights, depth = self._flights, self._depth
        waiting = len(self._idle)
        for batch in self._resting:
            waiting += len(batch.members)
        if not waiting:
            self._resting.clear()
            return None
        everybody = waiting
        for flight in flights:
            batch = flight.batch
            if batch is not None:
                everybody += len(batch.members) - len(batch.leaving)
        size = min(-(-everybody // depth), -(-waiting // (depth - len(flights))))
        batch = self._gather(size)
        idle = self._idle
        if idle:
            for held in list(itertools.islice(idle.values(), size - len(batch.members))):
                del idle[held.id]
                batch.join(held)
        return batch

    def _everybody(self) -> Batch | None:
        """All sequences that decode and are in no step, in one batch."""
        batch = self._resting.pop() if self._resting else None
        if batch is None or not batch.members:
            if not self._idle:
                return None
            batch = Batch(self.pool)
        elif self._idle:
            self._disband(batch, self._elder(batch))
        if self._idle:
            for held in self._idle.values():
                batch.join(held)
            self._idle.clear()
        return batch

    def _gather(self, size: int) -> Batch:
        """A batch of at most ``size`` of those in no step: a resting one, where the oldest of them are its members."""
        resting, self._resting = self._resting, []
        if len(resting) > 1:
            resting = [batch for batch in resting if batch.members]
        if not resting or not resting[0].members:
            return Batch(self.pool)
        if len(resting) > 1:
            for other in resting:
                self._disband(other)
            return Batch(self.pool)
        batch = resting[0]
        if self._idle or len(batch.members) > size:
            self._disband(batch, min(size, self._elder(batch)))
        return batch

    def _elder(self, batch: Batch) -> int:
        """Members of ``batch`` that began to run before all sequences that wait in no batch."""
        members = batch.members
        count = len(members)
        if self._idle:
            oldest = next(iter(self._idle.values())).order
            for held in reversed(members.values()):
                if held.order < oldest:
                    break
                count -= 1
        return count

    def _disband(self, batch: Batch, keep: int = 0) -> None:
        """Let all members but the first ``keep`` go and wait in no batch."""
        if keep >= len(batch.members):
            return
        idle = self._idle
        for held in list(itertools.islice(batch.members.values(), keep, None)):
            batch.leave(held)
            idle[held.id] = held
        self._idle = {held.id: held for held in in_order(idle.values())}

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
            victim.sequence.move(QUEUED)
            victims.append(victim)
            self.preemptions += 1
        if short:
            batch.grow(short)
        return victims

    def _decoded(self, batch: Batch, event: StepDone, commands: list[Command]) -> None:
        """Say what the members of a batch got from the step that has ended, and end those that are done."""
        batch.flying = False
        batch.step()
        self._resting.append(batch)
        ended = batch.ended()
        if batch.leaving or event.stopped or event.failed:
            done = {held.id: held for held in (*ended, *batch.leaving)}
            done |= {id: batch.members[id] for id in (*event.stopped, *event.failed) if id in batch.members}
            batch.leaving.clear()
            ended = in_order(done.values())
        if self._brief:
            for held in ended:
                self._last_token(batch, held, event, commands)
            return
        done = {held.id for held in ended}
        for held in list(batch.members.values()):
            if held.id in done:
                self._last_token(batch, held, event, commands)
            else:
                commands.append(Emit(held.id))

    def _last_token(self, batch: Batch, held: Held, event: StepDone, commands: list[Command]) -> None:
        batch.leave(held)
        if not held.cancelled:
            held.sequence.generated -= 1  # counted by the batch, and again here
            commands.append(self._sampled(held, event))
            del self._running[held.id]
        commands += self._end(held)

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
        if self._depth > 1:
            return self._horizon_of_several()
        flight = flights[0]
        batch = flight.batch
        if batch is None or flight.parts or batch.leaving or not batch.members:
            return 0
        most = batch.left() - 1
        if not most:
            return 0
        available = self.pool.available
        if available >= len(batch.members) * (most // batch.page_size + 1):
            return most
        return pages_last((batch,), available, most)

    def _horizon_of_several(self) -> int:
        most = 0
        sizes: list[int] = []
        turns = len(self._flights)
        for place, flight in enumerate(self._flights):
            batch = flight.batch
            if batch is None or flight.parts or batch.leaving:
                return 0
            steps = place + (batch.left() - 1) * turns
            if not steps:
                return 0
            if not place or steps < most:
                most = steps
            sizes.append(len(batch.members))
        # a batch that is no equal share, or that two free places would split, is dealt anew
        total, largest = sum(sizes), max(sizes)
        if largest > -(-total // self._depth) or (largest > 1 and turns < self._depth):
            return 0
        available = self.pool.available
        if available >= total * (most // (turns * self.pool.page_size) + 2):
            return most
        return pages_last([flight.batch for flight in self._flights if flight.batch], available, most)

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
        flights, pool = self._flights, self.pool
        turns = len(flights)
        counts = isinstance(pool, PageCount)
        emits: list[Command] = []
        pages = 0
        if not counts:
            batches = [flight.batch for flight in flights if flight.batch]
            for event in range(k):
                batches[event % turns].grow_at(event // turns + 1)
        for place, flight in enumerate(flights):
            batch = flight.batch
            steps = (k - place + turns - 1) // turns
            if not steps or batch is None:
                break
            if counts:
                pages += batch.growth(steps)
            if not self._brief:
                emits += (Emit(held.id, steps) for held in batch.members.values())
            batch.step(steps)
        if counts:
            pool.take(pages)
        self._next_step += k
        flights.rotate(-k)
        return emits if self._brief else [*emits, self._told((), flights[-1].batch)]
