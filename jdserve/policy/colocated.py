"""Scheduler of a colocated instance: both phases on the same devices.

``prefill_first`` runs every prompt that can be admitted before the next decode step, so a prompt delays all running
sequences by its whole length. ``chunked`` gives each step one token of every decoding sequence and fills the rest of
the token budget with chunks of prompts, so the delay is bounded and the prompt takes several steps.

A preempted sequence loses its pages, returns to the head of the queue, and is prefilled again with what it had
generated as part of its prompt.

With pipeline stages one step per stage is in flight, and the decoding sequences are dealt to them. A prompt has one
chunk in flight at a time.
"""

from __future__ import annotations

from jdserve.core.pages import PagePool, pages_for
from jdserve.core.plan import ColocatedInstance
from jdserve.core.request import DECODING
from jdserve.policy.base import Part, watermark_pages
from jdserve.policy.commands import Command, Emit, Preempt, Reject
from jdserve.policy.decoding import DecodingScheduler
from jdserve.policy.events import Arrived, Cancelled, Event, StepDone
from jdserve.policy.held import Batch, Held


class ColocatedScheduler(DecodingScheduler):
    """Takes Arrived, Cancelled and StepDone.

    Args:
        instance: limits from the plan.
        page_size: token positions per page.
        pool: the pages of the instance; by default a fresh one.
        brief: say only what a simulator needs.
    """

    def __init__(
        self, instance: ColocatedInstance, page_size: int, *, pool: PagePool | None = None, brief: bool = False
    ) -> None:
        super().__init__(pool or PagePool(instance.pages, page_size), instance.pp, brief)
        self._instance = instance
        self._prefilling: dict[str, Held] = {}
        self._blocked = False  # the head of the queue was refused in the last launch, and nothing has changed since
        self._spare = watermark_pages(instance.watermark, instance.pages)

    def handle(self, event: Event, now: int) -> list[Command]:
        """Take ``event`` at ``now`` (nanoseconds) and say what is to be done.

        Raises:
            TypeError: a colocated instance takes no such event.
            ValueError: Arrived with an id that is here already, or StepDone of another step than the oldest.
        """
        commands: list[Command] = []
        self._steady = None
        if type(event) is StepDone:
            self._step_done(event, commands)
        elif type(event) is Arrived:
            head = next(iter(self._queue), None)
            self._arrived(event, commands)
            self._blocked = self._blocked and head is not None and head == next(iter(self._queue))
        elif type(event) is Cancelled:
            self._blocked = False
            self._cancel(event.request_id, commands)
        else:
            raise self._refuse(event)
        self._launch(commands)
        return commands

    def _find_horizon(self) -> int:
        # prompts that wait are in the way, unless they were refused and nothing changes
        # with several stages the batches leave different parts of a token budget
        refused = self._blocked and self._depth == 1
        if self._prefilling or (self._queue and not refused):
            return 0
        return super()._find_horizon()

    def _arrived(self, event: Arrived, commands: list[Command]) -> None:
        held = self._new_prompt(event, self._instance.prefix_cache)
        # the KV of the last generated token is never written
        tokens = event.prompt_tokens + max(event.max_new_tokens - 1, 0)
        needed = pages_for(tokens, self.pool.page_size)
        if needed > self.pool.total:
            reason = f"{tokens} tokens of prompt and output need {needed} pages, there are {self.pool.total}"
            commands.append(Reject(held.id, reason, retryable=False))
            return
        self._enqueue(held)

    def _step_done(self, event: StepDone, commands: list[Command]) -> None:
        flight = self._step_ended(event)
        for part in flight.parts:
            held = part.held
            if held.id not in event.failed:
                held.sequence.computed += part.tokens
                self._publish(held)
        for part in flight.parts:
            held = part.held
            if held.cancelled:
                del self._prefilling[held.id]
                commands += self._end(held)
            elif held.id in event.failed or held.sequence.computed == held.sequence.prompt_tokens:
                self._first_token(held, event, commands)
        if flight.batch is not None:
            self._decoded(flight.batch, event, commands)

    def _first_token(self, held: Held, event: StepDone, commands: list[Command]) -> None:
        emit = self._sampled(held, event)
        commands.append(emit)
        del self._prefilling[held.id]
        if emit.finish is not None:
            del self._running[held.id]
            commands += self._end(held)
        else:
            held.sequence.move(DECODING)
            self._decodes_next(held)

    def _withdraw(self, held: Held) -> None:
        if self._prefilling.pop(held.id, None) is None:
            super()._withdraw(held)

    def _launch(self, commands: list[Command]) -> None:
        while self._places:
            batch, preempted = None, self.preemptions
            if self._instance.mode == "chunked":
                batch = self._decodes(commands)
                parts = self._chunks(self._instance.token_budget - (len(batch) if batch else 0))
            else:
                parts = self._whole_prompts()
                if not parts:
                    batch = self._decodes(commands)
            self._blocked = not parts and preempted == self.preemptions
            if not parts and not batch:
                return
            commands.append(self._run(parts, batch))

    def _decodes(self, commands: list[Command]) -> Batch | None:
        """The sequences that get one token each in the next step."""
        batch = self._next_batch()
        if batch is None:
            return None
        for victim in self._make_room(batch):
            if untold := self._untold(victim, 0):
                commands.append(Emit(victim.id, untold))
            commands.append(Preempt(victim.id))
            sequence = victim.sequence
            sequence.prompt_tokens += sequence.generated
            sequence.max_new_tokens -= sequence.generated
            sequence.generated = sequence.computed = victim.told = 0
            # the youngest comes first, so the oldest victim ends up at the head
            self._queue = {victim.id: victim, **self._queue}
        return batch or None

    def _whole_prompts(self) -> list[Part]:
        """Prompts up to the token budget, in order of arrival; a longer one alone."""
        prompts: list[Part] = []
        total = 0
        while (held := self._head()) is not None:
            total += self._uncached(held)
            if (prompts and total > self._instance.token_budget) or not self._admit(held):
                break
            prompts.append(Part(held, _left(held)))
        return prompts

    def _chunks(self, budget: int) -> list[Part]:
        """Chunks of at most ``budget`` tokens in all: of the prompts that were begun, then of new ones."""
        chunks: list[Part] = []
        # the first begun prompt had a token of an earlier budget beside all that decode now, so one is left for it
        begun = [held for held in self._prefilling.values() if not held.in_step]
        while budget > 0:
            held = begun.pop(0) if begun else self._head()
            if held is None or (held.id in self._queue and not self._admit(held)):
                break
            chunks.append(Part(held, min(_left(held), budget)))
            budget -= chunks[-1].tokens
        return chunks

    def _head(self) -> Held | None:
        """The sequence that may be admitted next, None when there is none or the batch is full."""
        if not self._queue or len(self._running) + self._leaving >= self._instance.max_num_seqs:
            return None
        return next(iter(self._queue.values()))

    def _admit(self, held: Held) -> bool:
        admitted = self._reserve_prompt(held, self._spare if self._running else 0)
        if admitted:
            self._prefilling[held.id] = held
        return admitted


def _left(held: Held) -> int:
    """Prompt tokens that are still to be computed."""
    return held.sequence.prompt_tokens - held.sequence.computed
