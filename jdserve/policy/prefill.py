"""Scheduler of a prefill instance: prompts in order of arrival, in batches that just saturate the devices.

A prompt waits QUEUED, runs whole in one step (PREFILLING), and its KV then stays parked (PREFILLED) until a decode
instance has pulled it, the request is cancelled, or the lease runs out.

The batch rule is DistServe's (OSDI'24, section 4.1): beyond L_m new tokens a step only gets longer, so prompts are
batched up to L_m and a longer prompt runs alone. ``kv_capacity`` takes everything that the page pool holds instead.
With pipeline stages one such batch per stage is in flight.
"""

from __future__ import annotations

from jdserve.core.pages import PagePool, pages_for
from jdserve.core.plan import PrefillInstance
from jdserve.core.request import PREFILLED
from jdserve.policy.base import Part, Scheduler
from jdserve.policy.commands import Command, Emit, Reject
from jdserve.policy.events import Arrived, Cancelled, Event, KVLanded, LeaseExpired, StepDone
from jdserve.policy.held import Held


class PrefillScheduler(Scheduler):
    """Takes Arrived, Cancelled, StepDone, KVLanded and LeaseExpired.

    Args:
        instance: limits from the plan.
        page_size: token positions per page.
        pool: the pages of the instance; by default a fresh one.
        brief: say only what a simulator needs.
    """

    def __init__(
        self, instance: PrefillInstance, page_size: int, *, pool: PagePool | None = None, brief: bool = False
    ) -> None:
        super().__init__(pool or PagePool(instance.pages, page_size), instance.pp, brief)
        self._instance = instance
        self._parked: dict[str, Held] = {}

    @property
    def parked(self) -> int:
        """Sequences whose KV waits for its pull."""
        return len(self._parked)

    def handle(self, event: Event, now: int) -> list[Command]:
        """Take ``event`` at ``now`` (nanoseconds) and say what is to be done.

        Raises:
            TypeError: a prefill instance takes no such event.
            ValueError: Arrived with an id that is here already, or StepDone of another step than the oldest.
        """
        commands: list[Command] = []
        if type(event) is StepDone:
            self._step_done(event, commands)
        elif type(event) is Arrived:
            self._arrived(event, commands)
        elif type(event) is KVLanded or type(event) is LeaseExpired:
            self._drop_parked(event.request_id, commands)
        elif type(event) is Cancelled:
            self._cancelled(event.request_id, commands)
        else:
            raise self._refuse(event)
        if self._queue:
            self._launch(commands)
        return commands

    def _arrived(self, event: Arrived, commands: list[Command]) -> None:
        held = self._new_prompt(event, self._instance.prefix_cache)
        if held.id in self._parked:
            raise ValueError(f"request {held.id} is here already")
        needed = pages_for(event.prompt_tokens, self.pool.page_size)
        if needed > self.pool.total:
            reason = f"a prompt of {event.prompt_tokens} tokens needs {needed} pages, there are {self.pool.total}"
            commands.append(Reject(held.id, reason, retryable=False))
            return
        self._enqueue(held)

    def _cancelled(self, request_id: str, commands: list[Command]) -> None:
        self._cancel(request_id, commands)
        self._drop_parked(request_id, commands)

    def _withdraw(self, held: Held) -> None:
        raise AssertionError(f"request {held.id} runs, but is in no step")

    def _drop_parked(self, request_id: str, commands: list[Command]) -> None:
        held = self._parked.pop(request_id, None)
        if held is not None:
            # pages that a pull still reads may be handed out: gathers are ordered before later steps
            commands += self._end(held)

    def _step_done(self, event: StepDone, commands: list[Command]) -> None:
        parts = self._step_ended(event).parts
        for part in parts:
            held = part.held
            if not event.failed or held.id not in event.failed:
                held.sequence.computed = held.sequence.prompt_tokens
                if held.prefix:
                    self._publish(held)
        for part in parts:
            held = part.held
            if held.cancelled:
                commands += self._end(held)
                continue
            del self._running[held.id]
            emit = self._sampled(held, event)
            if emit.finish is None:
                held.sequence.move(PREFILLED)
                self._parked[held.id] = held
                commands.append(Emit(held.id, emit.count, parked=True))
            else:
                commands += (emit, *self._end(held))

    def _launch(self, commands: list[Command]) -> None:
        while len(self._flights) < self._depth and (parts := self._batch()):
            commands.append(self._run(parts))

    def _batch(self) -> list[Part]:
        """The prompts of the next step, with their pages."""
        batch: list[Part] = []
        instance, queue, total = self._instance, self._queue, 0
        while queue and len(batch) < instance.max_batch:
            held = next(iter(queue.values()))
            total += self._uncached(held)
            if batch and total > instance.lm_tokens and instance.batching == "lm":
                break
            if not self._reserve_prompt(held):
                break  # strictly in order: what comes behind must not starve the head
            batch.append(Part(held, held.sequence.prompt_tokens - held.sequence.computed))
        return batch
