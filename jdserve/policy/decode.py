"""Scheduler of a decode instance: pulls KV as pages allow, and decodes everything that has landed.

A sequence arrives with its KV parked elsewhere (PREFILLED), waits in order of arrival until its pages can be reserved,
is pulled (PULLING), and joins the batch at the next step after the KV has landed (DECODING). Pages are reserved before
the pull, so nothing lands that there is no room for. When running sequences need more pages than there are, the
youngest is preempted; it comes back with a longer prompt after it was prefilled again.

With pipeline stages the sequences are dealt to one step per stage, all of them in flight at a time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jdserve.core.pages import BlockTable, pages_for
from jdserve.core.plan import DecodeInstance
from jdserve.core.request import Sequence, State
from jdserve.policy.base import Held, Scheduler, sampled, watermark_pages
from jdserve.policy.commands import Command, Emit, Preempt, Pull, Reject
from jdserve.policy.events import Cancelled, Event, KVLanded, KVReady, PullFailed, StepDone


class DecodeScheduler(Scheduler):
    """Takes KVReady, KVLanded, PullFailed, Cancelled and StepDone.

    Args:
        instance: limits from the plan.
        page_size: token positions per page.
    """

    def __init__(self, instance: DecodeInstance, page_size: int) -> None:
        super().__init__(instance.pages, page_size, instance.pp)
        self._max_num_seqs = instance.max_num_seqs
        self._spare = watermark_pages(instance.watermark, instance.pages)
        self._pulling: dict[str, Held] = {}

    @property
    def pulling(self) -> int:
        """Sequences whose KV is on its way, cancelled ones included."""
        return len(self._pulling)

    def handle(self, event: Event, now: int) -> list[Command]:
        """Take ``event`` at ``now`` (nanoseconds) and say what is to be done.

        Raises:
            TypeError: a decode instance takes no such event.
            ValueError: KVReady with an id that is here already, or StepDone of another step than the oldest.
        """
        commands: list[Command] = []
        match event:
            case KVReady():
                self._kv_ready(event, commands)
            case KVLanded() | PullFailed():
                self._pull_ended(event.request_id, isinstance(event, KVLanded), commands)
            case Cancelled():
                self._cancelled(event.request_id, commands)
            case StepDone():
                self._step_done(event, commands)
            case _:
                raise self._refuse(event)
        self._launch(commands)
        self._admit(commands)
        return commands

    def horizon(self) -> int:
        """For how many StepDone events from now no decision can change, if no other event comes and no text stops.

        Until then the batch stays the same, nothing ends by its length, nothing is admitted (pages only get fewer, so
        the head of the queue stays blocked) and the pages suffice. With B sequences, page size S and A available pages,
        sequence i has room for s_i < S more tokens: after m S + r steps (0 < r <= S) the batch has taken m B pages and
        one more for each s_i < r. So with m, rest = divmod(A, B) the pages last m S + s steps, where s is the
        (rest + 1)-th smallest s_i.

        Returns:
            0 when no step is in flight, or when the very next StepDone changes the batch; always 0 with several
            pipeline stages, where each step waits for those before it.
        """
        batch = self._flights[0].decoding if self._flights else ()
        if self._depth > 1 or not batch or list(batch) != list(self._running.values()):
            return 0
        full, rest = divmod(self.pool.available, len(batch))
        pages_last = full * self.pool.page_size + sorted(self._room(held) for held in batch)[rest]
        left = min(held.sequence.max_new_tokens - held.sequence.generated for held in batch)
        return min(pages_last, left - 1)

    def advance(self, k: int, now: int) -> list[Command]:
        """Take ``k`` StepDone events at once: one Emit per sequence, and the step that is launched last.

        The time is proportional to the batch and the pages it grows by, not to ``k``; state and pages are those that
        ``k`` single events give.

        Raises:
            ValueError: ``k`` is not between 1 and :meth:`horizon`.
        """
        horizon = self.horizon()
        if not 1 <= k <= horizon:
            raise ValueError(f"k must be between 1 and the horizon {horizon}, got {k}")
        batch = self._flights.popleft().decoding
        self._grow(batch, k)
        for held in batch:
            held.sequence.computed += k
            held.sequence.generated += k
        self._next_step += k - 1
        return [*(Emit(held.id, k) for held in batch), self._run(decoding=batch)]

    def _room(self, held: Held) -> int:
        """Tokens that still fit into the pages of a sequence after the step in flight."""
        return len(held.table) * self.pool.page_size - held.sequence.computed - 1

    def _grow(self, batch: Seq[Held], steps: int) -> None:
        """Give the batch the pages of the next ``steps`` steps, dealt out as single steps would do it."""
        size = self.pool.page_size
        # within each page's worth of steps the sequences need a page in this order (sorted is stable)
        order = sorted((self._room(held), index) for index, held in enumerate(batch))
        turns = [index for start in range(0, steps, size) for room, index in order if start + room < steps]
        grown = BlockTable(())
        self.pool.grow(grown, len(turns))
        dealt: list[list[int]] = [[] for _ in batch]
        for index, page in zip(turns, grown.pages, strict=True):
            dealt[index].append(page)
        for held, pages in zip(batch, dealt, strict=True):
            held.table.pages += tuple(pages)

    def _kv_ready(self, event: KVReady, commands: list[Command]) -> None:
        if event.prompt_tokens < 1 or event.max_new_tokens < 1:
            raise ValueError(
                f"request {event.request_id}: prompt_tokens and max_new_tokens must be at least 1, got"
                f" {event.prompt_tokens} and {event.max_new_tokens}"
            )
        tokens = event.prompt_tokens + event.max_new_tokens
        needed = pages_for(tokens, self.pool.page_size)
        if needed > self.pool.total:
            reason = f"{tokens} tokens of prompt and output need {needed} pages, there are {self.pool.total}"
            commands.append(Reject(event.request_id, reason, retryable=False))
            return
        pulling = self._pulling.get(event.request_id)
        if pulling is not None and not pulling.cancelled:
            raise ValueError(f"request {event.request_id} is here already")
        sequence = Sequence(event.request_id, event.prompt_tokens, event.max_new_tokens, State.PREFILLED)
        sequence.computed = event.prompt_tokens
        self._enqueue(Held(sequence, source=event.source))

    def _pull_ended(self, request_id: str, landed: bool, commands: list[Command]) -> None:
        held = self._pulling.pop(request_id, None)
        if held is None:
            return
        if held.cancelled:
            commands += self._end(held)
        elif landed:
            held.sequence.move(State.DECODING)
            self._running[request_id] = held
        else:
            commands += self._end(held, State.QUEUED)  # the router has it prefilled again

    def _cancelled(self, request_id: str, commands: list[Command]) -> None:
        if request_id in self._pulling:
            self._pulling[request_id].cancelled = True  # the pull writes its pages until it ends
        self._cancel(request_id, commands)

    def _step_done(self, event: StepDone, commands: list[Command]) -> None:
        for held in self._step_ended(event).decoding:
            if held.cancelled:
                commands += self._end(held)
                continue
            held.sequence.computed += 1
            emit = sampled(held, event)
            commands.append(emit)
            if emit.finish is not None:
                del self._running[held.id]
                commands += self._end(held)

    def _launch(self, commands: list[Command]) -> None:
        while self._places and (batch := self._micro_batch()):
            victims = self._make_room(batch)
            for victim in victims:
                commands += (Preempt(victim.id), *self._forget(victim.id))
            if batch:
                commands.append(self._run(decoding=batch))
            elif not victims:
                return

    def _admit(self, commands: list[Command]) -> None:
        while self._queue and len(self._running) + len(self._pulling) + self._leaving < self._max_num_seqs:
            held = next(iter(self._queue.values()))
            if held.id in self._pulling:
                break  # an abandoned pull of the same request must end first
            # the next step writes the KV of the token that prefill sampled
            count = pages_for(held.sequence.prompt_tokens + 1, self.pool.page_size)
            spare = self._spare if self._running or self._pulling else 0
            if count > self.pool.available - spare:
                break
            held.table = self.pool.reserve(count)
            self._leave_queue(held, State.PULLING)
            self._pulling[held.id] = held
            commands.append(Pull(held.id, held.source, held.sequence.prompt_tokens, held.table.pages))
