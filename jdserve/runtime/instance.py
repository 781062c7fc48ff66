"""One instance: its state machine beside its mesh, on one launcher thread.

The life of a request here: ``submit`` posts Arrived; the machine answers with a RunStep some time later; the thread
launches it, a reader thread waits for the tokens, the launcher thread posts StepDone, and turns the commands that come
back into one Report. On a prefill instance the KV of a prompt is copied out of the pool right behind the step that ends
it, because a copy behind the next one would wait for all of it. On a decode instance ``hand_off`` posts KVReady; when
the machine has reserved pages a pull runs on a transfer thread, and the launcher thread inserts what has landed. A step
in flight keeps the launcher thread from none of this.

All launches on the mesh, and all calls of the machine, are made by the launcher thread. Everybody else posts messages.
"""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

import msgspec

from jdserve.core.pages import pages_for
from jdserve.core.plan import DecodeInstance, PrefillInstance, role_of
from jdserve.core.plan import Instance as InstancePlan
from jdserve.core.request import Request
from jdserve.policy.base import Machine, Scheduler
from jdserve.policy.commands import Command, Emit, Preempt, Pull, Reject, Release, RunStep
from jdserve.policy.events import Arrived, Cancelled, Event, KVLanded, KVReady, LeaseExpired, PullFailed, StepDone
from jdserve.runtime.executor import Executor
from jdserve.runtime.guides import Guided, Guides
from jdserve.runtime.links import Links, Offering
from jdserve.runtime.live import Broken, Compiled, HandOff, Live, Message, News, PullEnded, StepEnded, Stop, Submit
from jdserve.runtime.outputs import Failed, InstanceStats, Parked, Report, TokenOutput
from jdserve.runtime.results import PendingStep, RowResult
from jdserve.transfer.layout import KVHandle

logger = logging.getLogger(__name__)

PULL_TIMEOUT_S = 30.0
"""Longest wait for KV to land before the pull counts as failed."""

PULLS_AT_A_TIME = 4


class Instance:
    """Runs one instance of a plan; see the module, and :class:`~jdserve.runtime.client.EngineClient`.

    Args:
        plan: of the instance.
        scheduler: its fresh state machine.
        executor: its mesh, warmed up.
        links: move KV to and from it.
        eos: token ids that end a text.
        report: takes news; called on the launcher thread.
        recorder: stands between the runtime and ``scheduler`` to keep a log.
        clock: nanoseconds, for the machine and for leases.
        guides: compiles what texts must look like; without it a request that has a guide is refused.
    """

    def __init__(
        self,
        plan: InstancePlan,
        scheduler: Scheduler,
        executor: Executor,
        links: Links,
        eos: Seq[int],
        report: Callable[[Report], None],
        recorder: Machine | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        guides: Guides | None = None,
    ) -> None:
        self.name = plan.name
        self._plan = plan
        self._scheduler = scheduler
        self._machine = recorder or scheduler
        self._executor = executor
        self._links = links
        self._eos = tuple(eos)
        self._report = report
        self._clock = clock
        self._guides = guides
        self._compiling: dict[str, Submit | HandOff] = {}  # they go on when their guide is ready
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._live: dict[str, Live] = {}
        self._leases: dict[str, int] = {}
        self._flights: deque[tuple[RunStep, PendingStep, int]] = deque()
        self._ended = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=f"{self.name}-read")
        self._rows: dict[str, RowResult] = {}
        self._error = ""
        self._news = News()
        self._counts = InstanceStats(self.name, role_of(plan))
        self._stats = self._counts
        self._pulls = ThreadPoolExecutor(PULLS_AT_A_TIME, thread_name_prefix=f"{self.name}-pull")
        self._thread = threading.Thread(target=self._run, name=f"{self.name}-launch", daemon=True)

    def start(self) -> None:
        """Start the launcher thread."""
        self._snapshot()
        self._thread.start()

    def submit(self, request: Request, prefix: tuple[bytes, ...]) -> None:
        """Have a prompt computed."""
        self._inbox.put(Submit(request, prefix))

    def hand_off(self, request: Request, source: str, handles: Seq[KVHandle]) -> None:
        """Have a request decoded whose KV is parked on ``source``."""
        self._inbox.put(HandOff(request, source, handles))

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        self._inbox.put(Cancelled(request_id))

    def landed(self, request_id: str) -> None:
        """Say that parked KV has arrived where it was pulled to."""
        self._inbox.put(KVLanded(request_id))

    def stats(self) -> InstanceStats:
        """State after the last event."""
        return self._stats

    def busy_s(self) -> float:
        """Seconds since the oldest step in flight was launched, 0 where none is."""
        try:
            return (self._clock() - self._flights[0][2]) / 1e9
        except IndexError:
            return 0.0

    def stop(self) -> None:
        """End the launcher thread after the step in flight."""
        for live in list(self._live.values()):
            live.abandoned.set()
        self._inbox.put(Stop())
        if self._thread.is_alive():
            self._thread.join()
        self._pulls.shutdown(wait=True, cancel_futures=True)
        self._executor.close()
        self._reader.shutdown()

    def _run(self) -> None:
        try:
            while True:
                message = self._next_message()
                if isinstance(message, Stop):
                    return
                if message is not None:
                    self._take(message)
                self._expire_leases()
        except Exception as error:
            # A dead thread must be an event, never a hang: the front door sends its requests elsewhere.
            logger.exception("instance %s died", self.name)
            self._report(Report(self.name, dead=f"{type(error).__name__}: {error}"))

    def _next_message(self) -> Message | None:
        """The next message; None where a lease may have run out."""
        try:
            if not self._leases:
                return self._inbox.get()
            wait = min(self._leases.values()) - self._clock()
            return self._inbox.get(timeout=max(wait / 1e9, 0.0))
        except queue.Empty:
            return None

    def _take(self, message: Message, guided: Guided | None = None) -> None:
        match message:
            case Submit(request) | HandOff(request) if request.params.guide is not None and guided is None:
                self._compile(message, request)
            case Submit(request, prefix):
                self._live[request.id] = Live(request, self._clock(), guided=guided)
                self._handle(Arrived(request.id, len(request.prompt), request.remaining, prefix, request.priority))
            case HandOff(request, source, handles):
                self._live[request.id] = Live(request, handles=handles, guided=guided)
                self._handle(KVReady(request.id, source, len(request.prompt) - 1, request.remaining))
            case PullEnded():
                self._pull_ended(message)
            case StepEnded():
                self._finish_step()
            case Stop():
                raise AssertionError("handled by the loop")
            case Compiled():
                self._compiled(message)
            case Cancelled(request_id):
                self._compiling.pop(request_id, None)
                if request_id in self._live:
                    self._live[request_id].abandoned.set()
                self._handle(message)
            case event:
                self._handle(event)

    def _compile(self, message: Submit | HandOff, request: Request) -> None:
        """Keep a request until its guide is ready: its KV, or its place in the queue, can wait better than others."""
        if self._guides is None:
            self._news.rejected.append(Failed(request.id, "guided decoding is not offered here", retryable=False))
            self._flush()
            return
        self._compiling[request.id] = message
        compiled = self._guides.begin(request)
        compiled.add_done_callback(lambda done: self._inbox.put(Compiled(request.id, done)))

    def _compiled(self, compiled: Compiled) -> None:
        message = self._compiling.pop(compiled.request_id, None)
        if message is None:
            return  # it was cancelled meanwhile
        try:
            guided = compiled.guided.result()
        except Exception as error:
            self._news.rejected.append(Failed(compiled.request_id, str(error), retryable=False))
            self._flush()
            return
        self._take(message, guided)

    def _handle(self, event: Event) -> None:
        commands = self._machine.handle(event, self._clock())
        for command in commands:
            self._do(command)
        self._flush()

    def _do(self, command: Command) -> None:
        match command:
            case RunStep():
                self._flush()  # tokens go out before the host prepares the next step
                self._launch(command)
            case Emit():
                self._emit(command)
            case Release(request_id):
                self._release(request_id)
            case Pull():
                self._pull(command)
            case Preempt(request_id):
                self._preempt(request_id)
            case Reject(request_id, reason, retryable):
                self._news.rejected.append(Failed(request_id, reason, retryable))
                self._release(request_id)
            case _:
                raise AssertionError(f"an instance machine gives no {type(command).__name__}")

    def _launch(self, step: RunStep) -> None:
        started = self._clock()
        try:
            for part in itertools.chain(step.chunks, step.decodes):
                live = self._live[part.request_id]
                live.pages = part.pages
                if not live.admitted:
                    self._executor.admit(live.request, part.pages, live.guided)
                    live.admitted = True
            for chunk in step.chunks:
                live = self._live[chunk.request_id]
                if live.cached is None:
                    live.cached, live.waited_s = chunk.start, (started - live.since) / 1e9
                    self._count(prefix_queries=len(live.request.prompt), prefix_hits=chunk.start)
            self._count(prefilled_tokens=sum(chunk.count for chunk in step.chunks))
            pending = self._executor.launch(step)
            if isinstance(self._plan, PrefillInstance):
                self._begin_offers(step, self._plan.lease_s)
        except Exception as error:
            if not self._executor.intact:
                raise
            pending = Broken(error)
        tokens = self._reader.submit(pending.result)
        self._flights.append((step, tokens, started))
        tokens.add_done_callback(lambda _: self._inbox.put(StepEnded()))

    def _begin_offers(self, step: RunStep, lease_s: float) -> None:
        """Have the KV of the prompts that end in ``step`` copied, where it is to be parked."""
        for chunk in step.chunks:
            live = self._live[chunk.request_id]
            if not chunk.last or live.request.remaining <= 1:
                continue
            try:
                live.offering = self._links.begin(
                    chunk.request_id, self.name, functools.partial(self._executor.leaving, chunk.pages), lease_s
                )
            except Exception:
                # Without an offer the pull fails, and the router has the prompt computed again.
                logger.exception("%s cannot offer the KV of request %s", self.name, chunk.request_id)

    def _finish_step(self) -> None:
        step, pending, started = self._flights[0]  # in flight until the tokens are here: others watch for how long
        names = [part.request_id for part in itertools.chain(step.chunks, step.decodes)]
        try:
            rows = pending.result()
            failed = [name for name, row in rows.items() if row.error or not row.finite]
            self._error = "the model gave no finite logits"
        except Exception as error:
            if not self._executor.intact:
                raise
            self._error = f"{type(error).__name__}: {error}"
            rows, failed = {}, names
        self._flights.popleft()
        self._rows = rows
        stopped = [name for name, row in rows.items() if self._live[name].is_stop(row.token, self._eos)]
        if isinstance(self._plan, PrefillInstance):
            # What decodes next is another instance: the slot is free as soon as the prompt is computed.
            for name in names:
                self._executor.forget(name)
        now = self._clock()
        self._count(steps=1, busy_s=(now - max(started, self._ended)) / 1e9)  # steps of a pipeline overlap
        self._ended = now
        self._handle(StepDone(step.step_id, tuple(stopped), tuple(failed)))

    def _emit(self, emit: Emit) -> None:
        live = self._live[emit.request_id]
        row = self._rows.get(emit.request_id)
        tokens: tuple[int, ...] = ()
        if emit.count:
            assert row is not None
            assert emit.count == 1
            tokens = (row.token,)
            live.tokens.append(row.token)
        self._news.outputs.append(
            TokenOutput(
                emit.request_id,
                tokens,
                (row.logprobs,) if tokens and row is not None and row.logprobs is not None else (),
                row.prompt_logprobs if row is not None else None,
                emit.finish,
                ((row and row.error) or self._error) if emit.finish == "error" else None,
                live.cached or 0,
                refused=row is not None and bool(row.error),
                waited_s=live.waited_s,
            )
        )
        if emit.parked:
            self._park(emit.request_id, live)

    def _park(self, request_id: str, live: Live) -> None:
        assert isinstance(self._plan, PrefillInstance)
        offering = live.offering or Offering(request_id, self.name, self._plan.lease_s)
        try:
            self._links.complete(offering)
        except Exception:
            logger.exception("%s cannot offer all of the KV of request %s", self.name, request_id)
        self._leases[request_id] = self._clock() + int(self._plan.lease_s * 1e9)
        self._news.parked.append(Parked(request_id, tuple(offering.handles)))

    def _expire_leases(self) -> None:
        now = self._clock()
        for request_id in [name for name, deadline in self._leases.items() if deadline <= now]:
            del self._leases[request_id]
            self._handle(LeaseExpired(request_id))

    def _release(self, request_id: str) -> None:
        self._executor.forget(request_id)
        self._leases.pop(request_id, None)
        live = self._live.pop(request_id, None)
        if live is not None and live.offering is not None:
            self._links.drop(live.offering)

    def _preempt(self, request_id: str) -> None:
        if isinstance(self._plan, DecodeInstance):
            self._news.preempted.append(request_id)
            return
        live = self._live[request_id]
        self._executor.forget(request_id)
        live.request, live.tokens, live.admitted = live.grown(), [], False

    def _pull(self, pull: Pull) -> None:
        live = self._live[pull.request_id]

        def run() -> None:
            started = time.monotonic()
            landed, error = None, ""
            try:
                handle = self._links.pick(live.handles, pull.source, self.name, self._executor.layout)
                landed = self._executor.pull(
                    lambda layout, meshes: self._links.pull(
                        handle, layout, meshes, PULL_TIMEOUT_S, live.abandoned.is_set
                    )
                )
            except Exception as problem:
                error = str(problem)
            self._inbox.put(PullEnded(pull, landed, error, time.monotonic() - started))

        self._count(pulling=1)
        self._pulls.submit(run)

    def _pull_ended(self, ended: PullEnded) -> None:
        self._count(pulling=-1)
        request_id = ended.pull.request_id
        live = self._live[request_id]
        error = ended.error
        if ended.landed is not None:
            landed = ended.landed
            used = pages_for(ended.pull.tokens, self._executor.layout.page_size)
            read = self._executor.insert(landed, live.handles[0].layout, ended.pull.pages[:used])
            self._pulls.submit(_return_memory, read, landed.done)
            self._count(transfers=1, transfer_bytes=ended.landed.bytes, transfer_s=ended.seconds)
            self._news.landed.append(request_id)
            self._handle(KVLanded(request_id))
            return
        self._news.pull_failed.append(Failed(request_id, error))
        self._handle(PullFailed(request_id, error))

    def _flush(self) -> None:
        news, self._news = self._news, News()
        self._snapshot()
        report = news.report(self.name)
        if report is not None:
            self._report(report)

    def _count(self, **more: float) -> None:
        """Add to the numbers that are counted here."""
        grown = {name: getattr(self._counts, name) + value for name, value in more.items()}
        self._counts = msgspec.structs.replace(self._counts, **grown)

    def _snapshot(self) -> None:
        """Publish the machine's state for other threads: one immutable value, so that it is consistent."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        self._stats = msgspec.structs.replace(
            self._counts,
            waiting=scheduler.waiting,
            running=scheduler.running,
            parked=scheduler.parked,
            pages_total=pool.total,
            pages_free=pool.free,
            pages_owned=pool.owned,
            pages_cached=pool.cached,
            preemptions=scheduler.preemptions,
            bubble_s=self._executor.bubble_s,
        )


def _return_memory(read: Callable[[], None], done: Callable[[], None]) -> None:
    """Wait until the insert has read what has landed, which may lie in memory that the source reuses then."""
    read()
    done()
