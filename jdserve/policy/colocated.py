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

from jdserve.core.pages import pages_for
from jdserve.core.plan import ColocatedInstance
from jdserve.core.request import State
from jdserve.policy.base import Held, Scheduler, sampled, watermark_pages
from jdserve.policy.commands import Chunk, Command, Preempt, Reject
from jdserve.policy.events import Arrived, Cancelled, Event, StepDone


class ColocatedScheduler(Scheduler):
    """Takes Arrived, Cancelled and StepDone.

    Args:
        instance: limits from the plan.
        page_size: token positions per page.
    """

    def __init__(self, instance: ColocatedInstance, page_size: int) -> None:
        super().__init__(instance.pages, page_size, instance.pp)
        self._instance = instance
        self._spare = watermark_pages(instance.watermark, instance.pages)

    def handle(self, event: Event, now: int) -> list[Command]:
        """Take ``event`` at ``now`` (nanoseconds) and say what is to be done.

        Raises:
            TypeError: a colocated instance takes no such event.
            ValueError: Arrived with an id that is here already, or StepDone of another step than the oldest.
        """
        commands: list[Command] = []
        match event:
            case Arrived():
                self._arrived(event, commands)
            case Cancelled():
                self._cancel(event.request_id, commands)
            case StepDone():
                self._step_done(event, commands)
            case _:
                raise self._refuse(event)
        self._launch(commands)
        return commands

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
        for held, chunk in zip(flight.prefilling, flight.step.chunks, strict=True):
            if held.id not in event.failed:
                held.sequence.computed += chunk.count
                self._publish(held)
        for held in flight.prefilling:
            if held.cancelled:
                commands += self._end(held)
            elif held.id in event.failed or held.sequence.computed == held.sequence.prompt_tokens:
                self._sampled(held, event, commands)
        for held in flight.decoding:
            if held.cancelled:
                commands += self._end(held)
            else:
                held.sequence.computed += 1
                self._sampled(held, event, commands)

    def _sampled(self, held: Held, event: StepDone, commands: list[Command]) -> None:
        emit = sampled(held, event)
        commands.append(emit)
        if emit.finish is not None:
            del self._running[held.id]
            commands += self._end(held)
        elif held.sequence.state is State.PREFILLING:
            held.sequence.move(State.DECODING)

    def _launch(self, commands: list[Command]) -> None:
        while self._places:
            if self._instance.mode == "chunked":
                decoding = self._decodes(commands)
                prefilling = self._chunks(self._instance.token_budget - len(decoding))
            else:
                prefilling = self._whole_prompts()
                decoding = [] if prefilling else self._decodes(commands)
            if not prefilling and not decoding:
                return
            chunks = [_chunk(held, count) for held, count in prefilling]
            commands.append(self._run(chunks, [held for held, _ in prefilling], decoding))

    def _decodes(self, commands: list[Command]) -> list[Held]:
        """The sequences that get one token each in the next step."""
        batch = self._micro_batch()
        for victim in self._make_room(batch):
            commands.append(Preempt(victim.id))
            sequence = victim.sequence
            sequence.prompt_tokens += sequence.generated
            sequence.max_new_tokens -= sequence.generated
            sequence.generated = sequence.computed = 0
            self._queue[victim.id] = victim
            # the youngest comes first, so the oldest victim ends up at the head
            self._queue.move_to_end(victim.id, last=False)
        return batch

    def _whole_prompts(self) -> list[tuple[Held, int]]:
        """Prompts up to the token budget, in order of arrival, and their tokens; a longer one alone."""
        prompts: list[tuple[Held, int]] = []
        total = 0
        while (held := self._head()) is not None:
            total += self._uncached(held)
            if (prompts and total > self._instance.token_budget) or not self._admit(held):
                break
            prompts.append((held, _left(held)))
        return prompts

    def _chunks(self, budget: int) -> list[tuple[Held, int]]:
        """Chunks of at most ``budget`` tokens in all: of the prompts that were begun, then of new ones."""
        chunks: list[tuple[Held, int]] = []
        # the first begun prompt had a token of an earlier budget beside all that decode now, so one is left for it
        begun = [
            held for held in self._running.values() if held.sequence.state is State.PREFILLING and not held.in_step
        ]
        while budget > 0:
            held = begun.pop(0) if begun else self._head()
            if held is None or (held.id in self._queue and not self._admit(held)):
                break
            chunks.append((held, min(_left(held), budget)))
            budget -= chunks[-1][1]
        return chunks

    def _head(self) -> Held | None:
        """The sequence that may be admitted next, None when there is none or the batch is full."""
        if len(self._running) + self._leaving >= self._instance.max_num_seqs:
            return None
        return next(iter(self._queue.values()), None)

    def _admit(self, held: Held) -> bool:
        return self._reserve_prompt(held, self._spare if self._running else 0)


def _left(held: Held) -> int:
    """Prompt tokens that are still to be computed."""
    return held.sequence.prompt_tokens - held.sequence.computed


def _chunk(held: Held, count: int) -> Chunk:
    start = held.sequence.computed
    return Chunk(held.id, start, count, held.table.pages, last=count == _left(held))
