"""The front door: takes requests, asks the router, talks to the instances, and streams tokens back.

Everything here runs on one asyncio event loop; instances report from their own threads through that loop. A request
may run several times, on several instances (after a preemption or a failure). Each *run* has an id of its own, so news
of an abandoned run finds nobody and is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from jdserve.core.errors import Busy, InvalidPlan, InvalidRequest, JdserveError, Overloaded
from jdserve.core.pages import block_hashes
from jdserve.core.plan import Instance, Plan, Worker, role_of
from jdserve.core.request import Request
from jdserve.core.spec import ModelSpec
from jdserve.ops.sampling import MAX_STOP_IDS
from jdserve.policy.base import Machine
from jdserve.policy.commands import Command, Dispatch, Reject, Release, Retire
from jdserve.policy.events import (
    Arrived,
    Cancelled,
    Draining,
    Event,
    Finished,
    KVLanded,
    KVReady,
    PeerFailed,
    PeerJoined,
    Preempted,
    PullFailed,
    Tick,
)
from jdserve.runtime.client import EngineClient, Fleet
from jdserve.runtime.outputs import EngineStats, Phases, Report, TokenOutput
from jdserve.runtime.progress import Progress
from jdserve.transfer.layout import KVHandle

Connect = Callable[[Callable[[Report], None]], Fleet]
"""Starts (or finds) the instances of a plan; they report to the given callback, from any thread."""

TICK_S = 1.0
"""How often the router is told the time while an instance is missing."""


@dataclass
class _Record:
    """One open request.

    Attributes:
        request: as it came.
        tokens: generated so far, over all runs.
        news: for its stream; an error ends it.
        run: number of the present run.
        source: prefill instance that its KV is parked on.
        handles: offers of that KV.
        phases: where its time went.
    """

    request: Request
    phases: Phases
    tokens: list[int] = field(default_factory=list)
    news: asyncio.Queue[TokenOutput | JdserveError] = field(default_factory=asyncio.Queue)
    run: int = 0
    source: str = ""
    handles: tuple[KVHandle, ...] = ()

    def pass_on(self, **phases: float | str) -> None:
        """Note when it went where."""
        self.phases = msgspec.structs.replace(self.phases, **phases)

    @property
    def run_id(self) -> str:
        return f"{self.request.id}~{self.run}"

    @property
    def remaining(self) -> int:
        return self.request.params.max_tokens - len(self.tokens)

    def grown(self) -> Request:
        """The request of the present run: every token so far is part of the prompt."""
        params = self.request.params
        if self.tokens:
            params = msgspec.structs.replace(params, prompt_logprobs=None)  # told by the first run
        prompt = (*self.request.prompt, *self.tokens)
        return msgspec.structs.replace(
            self.request, id=self.run_id, prompt=prompt, params=params, generated=len(self.tokens)
        )


class Engine:
    """Serves requests over the instances of a plan.

    Args:
        plan: to serve.
        spec: of its model.
        router: the router's machine, fresh (see :func:`jdserve.policy.build.router_for`), or a recorder around it.
        connect: starts the instances; runs in a thread, because it loads and compiles.
        progress: of the start.

    Attributes:
        plan: in force.
        loop: that the engine was started on.
        started: requests are taken; where an instance is missing the router lets them wait, or rejects them.
        draining: no new request is taken.
        progress: of the start.
    """

    def __init__(
        self, plan: Plan, spec: ModelSpec, router: Machine, connect: Connect, progress: Progress | None = None
    ) -> None:
        self.plan = plan
        self.spec = spec
        self.max_model_len = plan.max_model_len
        self.started = False
        self.draining = False
        self.progress = progress or Progress()
        self.loop: asyncio.AbstractEventLoop
        self._router = router
        self._connect = connect
        self._fleet: Fleet | None = None
        self._records: dict[str, _Record] = {}
        self._runs: dict[str, _Record] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._dead: dict[str, str] = {}
        self._restarts = 0
        self._retries = 0
        self._retired: dict[str, asyncio.Future[None]] = {}
        self._ticking: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start the instances; returns when requests can be taken.

        Raises:
            JdserveError, RuntimeError: an instance could not be started; ``progress.error`` says the same.
        """
        loop = self.loop = asyncio.get_running_loop()

        def report(news: Report) -> None:
            try:
                loop.call_soon_threadsafe(self._on_report, news)
            except RuntimeError:  # the loop is closed: nobody is left to tell
                return

        try:
            self._fleet = await asyncio.to_thread(self._connect, report)
        except BaseException as error:
            self.progress.error = str(error) or type(error).__name__
            raise
        self.started = True

    @property
    def ready(self) -> bool:
        """Whether the instances that live now can serve a request from end to end."""
        if not self.started:
            return False
        roles = {role_of(instance) for instance in self.plan.instances if instance.name not in self._dead}
        return "colocated" in roles or {"prefill", "decode"} <= roles

    def check(self, request: Request) -> None:
        """Check a request against the model and the plan.

        Raises:
            InvalidRequest: names the field and the bound.
        """
        request.params.validate(self.spec.vocab)
        if not request.prompt:
            raise InvalidRequest("prompt must hold at least one token", param="prompt")
        for token in request.prompt:
            if not 0 <= token < self.spec.vocab:
                raise InvalidRequest(f"prompt holds token id {token}, outside 0..{self.spec.vocab - 1}", param="prompt")
        asked = len(request.prompt) + request.params.max_tokens
        if asked > self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.params.max_tokens}; together"
                f" they exceed the {self.max_model_len} tokens of this server",
                param="max_tokens",
                code="context_length_exceeded",
            )
        stops = len(request.params.stop_token_ids) + len(self.spec.eos)
        if stops > MAX_STOP_IDS:
            raise InvalidRequest(
                f"stop_token_ids takes at most {MAX_STOP_IDS - len(self.spec.eos)} ids", param="stop_token_ids"
            )

    async def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        """News of ``request`` until one that has ``finish`` set. Closing the generator cancels the request.

        A failure after the first news is news with ``finish`` "error".

        Raises:
            InvalidRequest: the request can never be served.
            Overloaded: it is not taken now.
        """
        self.check(request)
        if not self.started:
            raise Overloaded(self.progress.error or "the server is starting")
        if request.id in self._records:
            raise InvalidRequest(f"request id {request.id!r} is in use", param="id")
        record = _Record(request, Phases(time.monotonic()))
        self._records[request.id] = record
        self._idle.clear()
        try:
            self._tell(Arrived(request.id, len(request.prompt), request.params.max_tokens))
            while True:
                news = await record.news.get()
                if isinstance(news, JdserveError):
                    raise news
                yield news
                if news.finish is not None:
                    return
        finally:
            if self._records.get(request.id) is record:
                self._tell(Cancelled(request.id))
                self._forget(record)

    @property
    def open_requests(self) -> int:
        """Requests accepted and not ended."""
        return len(self._records)

    def stats(self) -> EngineStats:
        """Numbers for a metrics page."""
        if self._fleet is None:
            return EngineStats(())
        instances = tuple(client.stats() for client in list(self._fleet.clients.values()))
        compiled = self._fleet.recompilations()
        return EngineStats(instances, compiled, dict(self._dead), self._restarts, self._retries)

    async def drain(self, timeout_s: float) -> None:
        """Take no new request and wait for the open ones, at most ``timeout_s``; what is left then is failed."""
        self.draining = True
        self._tell(Draining())
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            for record in list(self._records.values()):
                self._tell(Cancelled(record.request.id))
                self._fail(record, f"the server stopped before the request ended (drain timeout {timeout_s} s)")

    async def close(self) -> None:
        """Stop every instance and give back its memory."""
        self.started = False
        if self._ticking is not None:
            self._ticking.cancel()
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            await asyncio.to_thread(fleet.stop)

    async def drain_instance(self, name: str) -> None:
        """Empty an instance and end it for good; returns when that is done. Requests on it end as if nothing were.

        Raises:
            InvalidPlan: there is no such instance, or it is the last one that can play its part.
        """
        rest = tuple(i for i in self.plan.instances if i.name != name and i.name not in self._retired)
        if len(rest) == len(self.plan.instances) - len(self._retired):
            raise InvalidPlan("$.instances", f"no instance {name!r}; there are {_names(rest)}")
        roles = {role_of(instance) for instance in rest if instance.name not in self._dead}
        if not ("colocated" in roles or {"prefill", "decode"} <= roles):
            raise InvalidPlan("$.instances", f"{name} is the last live instance of its role: add another one first")
        done = self._retired[name] = asyncio.get_running_loop().create_future()
        self._tell(Draining(name))
        await done

    async def add_instance(self, instance: Instance, worker: Worker) -> None:
        """Start one more instance; returns when it takes work.

        Raises:
            InvalidPlan: it does not fit the plan or the machine.
            JdserveError: it could not be started.
        """
        if self._fleet is None:
            raise Overloaded("the server is starting")
        self.plan = await asyncio.to_thread(self._fleet.add, instance, worker)
        self._tell(PeerJoined(instance.name, role_of(instance)))

    def _prefix(self, record: _Record) -> tuple[bytes, ...]:
        # A scored prompt needs the logits of every position, which a cached prefix does not give.
        if record.request.params.prompt_logprobs is not None and not record.tokens:
            return ()
        tokens = (*record.request.prompt, *record.tokens)
        return block_hashes(tokens, self.plan.page_size, record.request.cache_salt.encode())

    def _tell(self, event: Event) -> None:
        for command in self._router.handle(event, time.monotonic_ns()):
            self._do(command)
        if self._dead and self._records and self._ticking is None and self.started:
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        self._tell(Tick())

    def _do(self, command: Command) -> None:
        if isinstance(command, Retire):
            self._retire(command.instance)
            return
        record = self._records.get(getattr(command, "request_id", ""))
        if record is None:
            return
        match command:
            case Dispatch(_, instance, None):
                self._runs.pop(record.run_id, None)
                self._retries += record.run > 0
                record.run += 1
                self._runs[record.run_id] = record
                record.phases = Phases(record.phases.arrived, time.monotonic(), prefill=instance, runs=record.run)
                self._client(instance).submit(record.grown(), self._prefix(record))
            case Dispatch(_, instance, source):
                assert source is not None
                record.pass_on(handed_off=time.monotonic(), decode=instance)
                self._client(instance).hand_off(record.grown(), source, record.handles)
            case Release(_, instance):
                assert instance is not None
                self._client(instance).cancel(record.run_id)
            case Reject(_, reason, _, after_s):
                self._fail(record, reason if self.ready else f"{reason} ({self._why_not})", after_s=after_s)
            case _:
                raise AssertionError(f"a router gives no {type(command).__name__}")

    @property
    def _why_not(self) -> str:
        return "; ".join(f"{name} died: {reason}" for name, reason in self._dead.items())

    def _client(self, instance: str) -> EngineClient:
        assert self._fleet is not None
        return self._fleet.clients[instance]

    def _retire(self, instance: str) -> None:
        assert self._fleet is not None
        self._fleet.retire(instance)
        self._dead.pop(instance, None)
        self.plan = self.plan.without(instance)
        self._retired.pop(instance).set_result(None)

    def _fail(self, record: _Record, reason: str, *, retryable: bool = True, after_s: float | None = None) -> None:
        """End a request that the router knows no more: as a refusal before its first token, as news after it."""
        if record.tokens:
            record.news.put_nowait(TokenOutput(record.request.id, finish="error", error=reason))
        else:
            refusal = Busy(reason, after_s) if after_s is not None else Overloaded(reason)
            record.news.put_nowait(refusal if retryable else InvalidRequest(reason))
        self._forget(record)

    def _forget(self, record: _Record) -> None:
        del self._records[record.request.id]
        self._runs.pop(record.run_id, None)
        if not self._records:
            self._idle.set()

    def _on_report(self, report: Report) -> None:
        for output in report.outputs:
            self._on_output(output)
        for parked in report.parked:
            record = self._runs.get(parked.request_id)
            if record is not None:
                record.source, record.handles = report.instance, parked.handles
                tokens = len(record.request.prompt) + len(record.tokens) - 1
                self._tell(KVReady(record.request.id, report.instance, tokens, record.remaining))
        for run_id in report.landed:
            record = self._runs.get(run_id)
            if record is not None:
                record.pass_on(landed=time.monotonic())
                self._client(record.source).landed(run_id)
                self._tell(KVLanded(record.request.id))
        for run_id in report.preempted:
            record = self._runs.get(run_id)
            if record is not None:
                tokens = len(record.request.prompt) + len(record.tokens)
                self._tell(Preempted(record.request.id, tokens, record.remaining))
        for failed in report.pull_failed:
            record = self._runs.get(failed.request_id)
            if record is not None:
                self._tell(PullFailed(record.request.id, failed.reason))
        for failed in report.rejected:
            record = self._runs.get(failed.request_id)
            if record is not None:
                self._tell(Finished(record.request.id))
                self._fail(record, failed.reason, retryable=failed.retryable)
        known = any(instance.name == report.instance for instance in self.plan.instances)
        if not known:
            return  # it was drained, and its worker is on its way out
        if report.dead is not None:
            self._dead[report.instance] = report.dead
            self._tell(PeerFailed(report.instance))
        if report.joined:
            self._restarts += self._dead.pop(report.instance, None) is not None
            self._tell(PeerJoined(report.instance))
        if report.dead is not None or report.joined:
            self.progress.error = None if self.ready else self._why_not

    def _on_output(self, output: TokenOutput) -> None:
        record = self._runs.get(output.request_id)
        if record is None:
            return
        first = not record.tokens
        if not record.phases.prefilled:
            record.pass_on(prefilled=time.monotonic(), launched=record.phases.dispatched + output.waited_s)
        record.tokens.extend(output.tokens)
        cached = output.cached_tokens if first and record.run == 1 else 0
        news = msgspec.structs.replace(output, request_id=record.request.id, cached_tokens=cached, phases=record.phases)
        record.news.put_nowait(news)
        if output.finish is not None:
            self._tell(Finished(record.request.id))
            self._forget(record)


def _names(instances: Sequence[Instance]) -> str:
    return ", ".join(instance.name for instance in instances)
