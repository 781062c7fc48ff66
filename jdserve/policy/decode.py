"""Scheduler of a decode instance: pulls KV as pages allow, and decodes everything that has landed.

A sequence arrives with its KV parked elsewhere (PREFILLED), waits in order of arrival until its pages can be reserved,
is pulled (PULLING), and joins the batch at the next step after the KV has landed (DECODING). Pages are reserved before
the pull, so nothing lands that there is no room for. When running sequences need more pages than there are, the
youngest is preempted; it comes back with a longer prompt after it was prefilled again.

With pipeline stages the sequences are dealt to one step per stage, all of them in flight at a time.

Pulls overlap with steps, unless the plan says that they happen between steps.
"""

from __future__ import annotations

from jdserve.core.pages import PagePool, pages_for
from jdserve.core.plan import DecodeInstance
from jdserve.core.request import DECODING, PREFILLED, PULLING, QUEUED, Sequence
from jdserve.policy.base import watermark_pages
from jdserve.policy.commands import Command, Emit, Preempt, Pull, Reject
from jdserve.policy.decoding import DecodingScheduler
from jdserve.policy.events import Cancelled, Event, KVLanded, KVReady, PullFailed, StepDone
from jdserve.policy.held import Held


class DecodeScheduler(DecodingScheduler):
    """Takes KVReady, KVLanded, PullFailed, Cancelled and StepDone.

    Args:
        instance: limits from the plan.
        page_size: token positions per page.
        pool: the pages of the instance; by default a fresh one.
        brief: say only what a simulator needs.
    """

    def __init__(
        self, instance: DecodeInstance, page_size: int, *, pool: PagePool | None = None, brief: bool = False
    ) -> None:
        super().__init__(pool or PagePool(instance.pages, page_size), instance.in_flight or instance.pp, brief)
        self._between_steps = instance.pull == "between_steps"
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
        self._steady = None
        if type(event) is StepDone:
            self._step_done(event, commands)
        elif type(event) is KVReady:
            self._kv_ready(event, commands)
        elif type(event) is KVLanded:
            self._pull_ended(event.request_id, True, commands)
        elif type(event) is PullFailed:
            self._pull_ended(event.request_id, False, commands)
        elif type(event) is Cancelled:
            self._cancelled(event.request_id, commands)
        else:
            raise self._refuse(event)
        if self._between_steps:
            if self._pulling or not self._flights or type(event) is StepDone:
                self._admit(commands)
            if not self._pulling:
                self._launch(commands)
            return commands
        if len(self._flights) < self._depth:
            self._launch(commands)
        if self._queue:
            self._admit(commands)
        return commands

    def _find_horizon(self) -> int:
        # between steps, what came while one ran is pulled at its end
        steps = super()._find_horizon()
        if steps and self._between_steps and (self._pulling or self._admissible() is not None):
            return 0
        return steps

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
        sequence = Sequence(event.request_id, event.prompt_tokens, event.max_new_tokens, PREFILLED)
        sequence.computed = event.prompt_tokens
        self._enqueue(Held(sequence, source=event.source))

    def _pull_ended(self, request_id: str, landed: bool, commands: list[Command]) -> None:
        held = self._pulling.pop(request_id, None)
        if held is None:
            return
        if held.cancelled:
            commands += self._end(held)
        elif landed:
            held.sequence.move(DECODING)
            self._begin(held)
            self._decodes_next(held)
        else:
            commands += self._end(held, QUEUED)  # the router has it prefilled again

    def _cancelled(self, request_id: str, commands: list[Command]) -> None:
        if request_id in self._pulling:
            self._pulling[request_id].cancelled = True  # the pull writes its pages until it ends
        self._cancel(request_id, commands)

    def _step_done(self, event: StepDone, commands: list[Command]) -> None:
        batch = self._step_ended(event).batch
        assert batch is not None
        self._decoded(batch, event, commands)

    def _launch(self, commands: list[Command]) -> None:
        while len(self._flights) < self._depth and (batch := self._next_batch()) is not None:
            victims = self._make_room(batch)
            for victim in victims:
                if untold := self._untold(victim, 0):
                    commands.append(Emit(victim.id, untold))
                commands += (Preempt(victim.id), *self._forget(victim.id))
            if batch.members:
                commands.append(self._run(batch=batch))
            elif not victims:
                return

    def _admit(self, commands: list[Command]) -> None:
        while (held := self._admissible()) is not None:
            held.table = self.pool.reserve(self._needed(held))
            self._leave_queue(held, PULLING)
            self._pulling[held.id] = held
            commands.append(Pull(held.id, held.source, held.sequence.prompt_tokens, self._ids(held)))

    def _admissible(self) -> Held | None:
        """The head of the queue, if it can be pulled now."""
        if not self._queue or len(self._running) + len(self._pulling) + self._leaving >= self._max_num_seqs:
            return None
        held = next(iter(self._queue.values()))
        if held.id in self._pulling:
            return None  # an abandoned pull of the same request must end first
        spare = self._spare if self._running or self._pulling else 0
        return held if self._needed(held) <= self.pool.available - spare else None

    def _needed(self, held: Held) -> int:
        # the next step writes the KV of the token that prefill sampled
        return pages_for(held.sequence.prompt_tokens + 1, self.pool.page_size)
