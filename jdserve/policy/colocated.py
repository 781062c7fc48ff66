"""Scheduler of a colocated instance: both phases on the same devices.

``prefill_first`` runs every prompt that can be admitted before the next decode step, so a prompt delays all running
sequences by its whole length. ``chunked`` gives each step one token of every decoding sequence and fills the rest of
the token budget with chunks of prompts, so the delay is bounded and the prompt takes several steps.

A preempted sequence loses its pages, returns to the head of the queue, and is prefilled again with what it had
generated as part of its prompt.
"""

from __future__ import annotations

from jdserve.core.pages import pages_for
from jdserve.core.plan import ColocatedInstance
from jdserve.core.request import State
from jdserve.policy.base import Held, Scheduler, decode_seq, sampled, watermark_pages
from jdserve.policy.commands import Chunk, Command, DecodeSeq, Preempt, Reject
from jdserve.policy.events import Arrived, Cancelled, Event, StepDone


class ColocatedScheduler(Scheduler):
    """Takes Arrived, Cancelled and StepDone.

    Args:
        instance: limits from the plan.
        page_size: token positions per page.
    """

    def __init__(self, instance: ColocatedInstance, page_size: int) -> None:
        super().__init__(instance.pages, page_size)
        self._instance = instance
        self._spare = watermark_pages(instance.watermark, instance.pages)
        self._prefilling: list[tuple[Held, int]] = []
        self._decoding: list[Held] = []

    def handle(self, event: Event, now: int) -> list[Command]:
        """Take ``event`` at ``now`` (nanoseconds) and say what is to be done.

        Raises:
            TypeError: a colocated instance takes no such event.
            ValueError: Arrived with an id that is here already, or StepDone of a step that is not in flight.
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
        self._step_ended(event)
        prefilling, self._prefilling = self._prefilling, []
        decoding, self._decoding = self._decoding, []
        for held, count in prefilling:
            held.in_step = False
            if held.id not in event.failed:
                held.sequence.computed += count
                self._publish(held)
        for held, _ in prefilling:
            if held.cancelled:
                commands += self._end(held)
            elif held.id in event.failed or held.sequence.computed == held.sequence.prompt_tokens:
                self._sampled(held, event, commands)
        for held in decoding:
            held.in_step = False
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
        if self._in_flight:
            return
        decodes: tuple[DecodeSeq, ...] = ()
        if self._instance.mode == "chunked":
            decodes = self._decodes(commands)
            chunks = self._chunks(self._instance.token_budget - len(decodes))
        else:
            chunks = self._whole_prompts()
            if not chunks:
                decodes = self._decodes(commands)
        if chunks or decodes:
            commands.append(self._run(chunks, decodes))

    def _decodes(self, commands: list[Command]) -> tuple[DecodeSeq, ...]:
        """One token of every decoding sequence."""
        for victim in self._make_room():
            commands.append(Preempt(victim.id))
            sequence = victim.sequence
            sequence.prompt_tokens += sequence.generated
            sequence.max_new_tokens -= sequence.generated
            sequence.generated = sequence.computed = 0
            self._queue[victim.id] = victim
            # the youngest comes first, so the oldest victim ends up at the head
            self._queue.move_to_end(victim.id, last=False)
        self._decoding = [held for held in self._running.values() if held.sequence.state is State.DECODING]
        for held in self._decoding:
            held.in_step = True
        return tuple(decode_seq(held) for held in self._decoding)

    def _whole_prompts(self) -> tuple[Chunk, ...]:
        """Prompts up to the token budget, in order of arrival; a longer one alone."""
        chunks: list[Chunk] = []
        total = 0
        while (held := self._head()) is not None:
            total += self._uncached(held)
            if (chunks and total > self._instance.token_budget) or not self._admit(held):
                break
            chunks.append(self._chunk(held, held.sequence.prompt_tokens))
        return tuple(chunks)

    def _chunks(self, budget: int) -> tuple[Chunk, ...]:
        """Chunks of at most ``budget`` tokens in all: of the prompts that were begun, then of new ones."""
        chunks: list[Chunk] = []
        for held in self._running.values():
            # such a prompt had a token of an earlier budget beside all that decode now, so there is one left for it
            if held.sequence.state is State.PREFILLING:
                chunks.append(self._chunk(held, budget))
                budget -= chunks[-1].count
        while budget > 0 and (held := self._head()) is not None and self._admit(held):
            chunks.append(self._chunk(held, budget))
            budget -= chunks[-1].count
        return tuple(chunks)

    def _head(self) -> Held | None:
        """The sequence that may be admitted next, None when there is none or the batch is full."""
        if len(self._running) >= self._instance.max_num_seqs:
            return None
        return next(iter(self._queue.values()), None)

    def _admit(self, held: Held) -> bool:
        return self._reserve_prompt(held, self._spare if self._running else 0)

    def _chunk(self, held: Held, limit: int) -> Chunk:
        start, end = held.sequence.computed, held.sequence.prompt_tokens
        count = min(end - start, limit)
        held.in_step = True
        self._prefilling.append((held, count))
        return Chunk(held.id, start, count, held.table.pages, last=start + count == end)
