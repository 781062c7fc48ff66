"""The front door's side of the workers: who is there, who is missing, and what is to be done about it.

One thread runs the control channel, watches the processes of this machine and the signs of life of all workers. A
worker that is lost takes its instances with it: each is reported dead, and reported joined when it is back.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec

from jdserve.core.errors import InvalidPlan, JdserveError
from jdserve.core.plan import Instance, Plan, Worker, role_of
from jdserve.core.spec import ModelSpec
from jdserve.core.version import VERSION
from jdserve.runtime import wire
from jdserve.runtime.channel import Channel, Frames, Keys
from jdserve.runtime.client import EngineClient
from jdserve.runtime.hosts import check_machine, is_here
from jdserve.runtime.operator import publish
from jdserve.runtime.outputs import InstanceStats, Report
from jdserve.runtime.processes import Process, write_files
from jdserve.runtime.progress import STAGES, Progress
from jdserve.runtime.remote import ClusterOptions, Link, RemoteInstance
from jdserve.runtime.worlds import Unit, units_of

logger = logging.getLogger(__name__)

TICK_S = 0.05
BEAT_S = 0.5
"""How often both sides give a sign of life."""

STUCK_S = 120.0
"""A step that takes longer than this is never going to end."""

STOP_TIMEOUT_S = 10.0


class WorkerFleet:
    """The instances of a plan in worker processes; see :class:`~jdserve.runtime.client.Fleet`.

    Args:
        plan: to serve; see :func:`~jdserve.runtime.front.settled`.
        spec: of its model.
        options: see there.
        report: takes news, on the thread of the channel.
        progress: of the start.
        operate: takes what operators want, with a function that answers them.
        meeting_point: file that tells operators of this machine how to reach the fleet, while it runs.

    Raises:
        OSError: the address for workers cannot be bound.
    """

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        options: ClusterOptions,
        report: Callable[[Report], None],
        progress: Progress,
        operate: Callable[[wire.FromOperator, Callable[[wire.ToOperator], None]], None],
        meeting_point: Path | None = None,
    ) -> None:
        self.plan = plan
        self._spec = spec
        self._options = options
        self._report = report
        self._progress = progress
        self._operate = operate
        self._meeting_point = meeting_point
        self._channel = Channel.listen(options.host, options.port, Keys(options.secret))
        self.address = self._channel.address
        self._folder = Path(tempfile.mkdtemp(prefix="jdserve-"))
        write_files(self._folder, plan, options.secret)
        self._clients: dict[str, RemoteInstance] = {}
        self._links: dict[str, Link] = {}
        self._units: list[Unit] = []
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._failure = ""
        self._stopping = False
        self._last_beat = 0.0
        for worker in plan.workers:
            self._expect(worker)
        for instance in plan.instances:
            self._make_client(instance)
        self._units = units_of(plan)
        self._thread = threading.Thread(
            target=self._channel.run, args=(self._take, self._tick, TICK_S), name="control-channel", daemon=True
        )

    @property
    def clients(self) -> Mapping[str, EngineClient]:
        """Of each instance, by name."""
        return self._clients

    def recompilations(self) -> int:
        """In all workers that live."""
        return sum(link.recompilations for link in self._links.values())

    def start(self) -> None:
        """Start the workers of this machine and wait until every worker of the plan is up.

        Raises:
            JdserveError: one could not start or did not join; all are stopped then.
        """
        self._thread.start()
        if failure := self._await(list(self._links.values())):
            self.stop()
            raise JdserveError(failure)
        if self._meeting_point is not None:
            publish(self._meeting_point, self.address, self._options.secret)
        for stage in ("load", "compile", "ready"):  # workers tell now and then, and may have left out the end
            self._progress(stage, 1.0)

    def _await(self, links: Seq[Link]) -> str:
        """Wait until all are up; gives why one never will be, or nothing."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._failure) or all(link.up for link in links))
            failure, self._failure = self._failure, ""
            for link in links:
                link.awaited = False
            return failure

    def add(self, instance: Instance, worker: Worker) -> Plan:
        """Start one more instance in a worker of its own; gives the plan that is in force then.

        Raises:
            InvalidPlan: it does not fit the plan or the machine.
            JdserveError: it could not be started.
        """
        plan = msgspec.structs.replace(
            self.plan, instances=(*self.plan.instances, instance), workers=(*self.plan.workers, worker)
        )
        plan.check(self._spec)
        if worker.instances != (instance.name,):
            raise InvalidPlan("$.worker.stages", f"the worker must host {instance.name} and nothing else")
        check_machine(plan, oversubscribe=self._options.oversubscribe)
        with self._lock:
            self._change_plan(plan)
            self._expect(worker)
            self._make_client(instance)
            link = self._links[worker.name]
        if failure := self._await([link]):
            with self._lock:
                self._drop(link)
                self._clients.pop(instance.name)
                self._change_plan(self.plan.without(instance.name))
            raise JdserveError(failure)
        return plan

    def retire(self, instance: str) -> None:
        """End an instance that holds nothing any more, and its worker when that hosts nothing else."""
        with self._lock:
            leaving = [link for link in self._links.values() if link.worker.instances == (instance,)]
            self._clients.pop(instance)
            self._change_plan(self.plan.without(instance))
            for link in leaving:
                link.leaving = True
                self._post(link, wire.Stop())

    def stop(self) -> None:
        """Stop all workers; those that do not stop in time are killed."""
        with self._lock:
            self._stopping = True
            for link in self._links.values():
                self._post(link, wire.Stop())
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for link in self._links.values():
            if link.process is not None:
                if link.identity is None:
                    link.process.kill()
                link.process.join(max(0.0, deadline - time.monotonic()))
        self._channel.close()
        if self._thread.is_alive():
            self._thread.join()
        if self._meeting_point is not None:
            self._meeting_point.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _expect(self, worker: Worker) -> None:
        process = Process(worker) if is_here(worker.host) else None
        self._links[worker.name] = Link(worker, process, heard=time.monotonic())

    def _make_client(self, instance: Instance) -> None:
        def post(message: wire.ToWorker) -> None:
            link = self._links.get(self.plan.workers_of(instance.name)[0].name)
            # What is sent to a worker that is gone is lost; the report of its death is on its way.
            if link is not None and link.up:
                self._post(link, message)

        self._clients[instance.name] = RemoteInstance(instance.name, role_of(instance), post)

    def _change_plan(self, plan: Plan) -> None:
        self.plan = plan
        self._units = units_of(plan, self._units)
        write_files(self._folder, plan, self._options.secret)
        for link in self._links.values():
            if link.up:
                self._post(link, wire.PlanChanged(plan))

    def _post(self, link: Link, message: wire.ToWorker) -> None:
        if link.identity is not None:
            self._channel.post((link.identity, wire.encode(message)))

    # What follows runs on the thread of the channel.

    def _take(self, frames: Frames) -> None:
        identity, payload = frames
        try:
            message = wire.to_front.decode(payload)
        except msgspec.MsgspecError as error:
            logger.warning("a message from a worker was refused: %s", error)
            return
        with self._lock:
            if isinstance(message, wire.Hello):
                self._hello(identity, message)
            elif isinstance(message, wire.Drain | wire.Add):
                self._operate(message, lambda answer: self._channel.post((identity, wire.encode(answer))))
            else:
                link = next((link for link in self._links.values() if link.identity == identity), None)
                if link is not None:  # else it was given up already
                    link.heard = time.monotonic()
                    self._hear(link, message)

    def _hello(self, identity: bytes, hello: wire.Hello) -> None:
        link = self._links.get(hello.worker)
        reason = ""
        if link is None:
            reason = f"the plan has no worker {hello.worker!r}; it has {', '.join(self._links)}"
        elif hello.version != VERSION:
            reason = f"the worker runs jdserve {hello.version}, the server {VERSION}"
        elif link.identity is not None:
            reason = f"worker {hello.worker} is here already"
        elif link.process is not None and link.process.pid != hello.pid:
            reason = f"worker {hello.worker} is started by the server itself"
        if link is None or reason:
            self._channel.post((identity, wire.encode(wire.Refused(reason))))
            return
        link.identity, link.heard = identity, time.monotonic()
        unit = self._unit(link)
        unit.begin(self.plan)
        self._post(link, wire.Welcome(self.plan, unit.world(link.worker), self._options.record, unit.generation))

    def _hear(self, link: Link, message: wire.FromWorker) -> None:
        match message:
            case wire.Starting(stage, done):
                link.progress = (stage, done)
                self._show_progress()
            case wire.Up():
                self._came_up(link)
            case wire.News(report, stats):
                self._note(stats)
                self._report(report)
            case wire.Beat(stats, recompilations, busy_s):
                for one in stats:
                    self._note(one)
                link.recompilations = recompilations
                if busy_s > STUCK_S:
                    self._lose(link, f"a step has not ended for {busy_s:.0f} s")
            case wire.Broken(reason, final):
                link.reason, link.final = reason, final
            case wire.Stopped():
                link.identity, link.up = None, False
            case _:
                raise AssertionError(f"handled elsewhere: {type(message).__name__}")

    def _note(self, stats: InstanceStats) -> None:
        client = self._clients.get(stats.name)
        if client is not None:
            client.last = stats

    def _came_up(self, link: Link) -> None:
        link.up = True
        self._changed.notify_all()
        if link.awaited:
            return
        for name in link.worker.instances:
            if all(self._links[worker.name].up for worker in self.plan.workers_of(name)):
                self._report(Report(name, joined=True))

    def _show_progress(self) -> None:
        if waiting := [link.progress for link in self._links.values() if link.awaited and not link.up]:
            stage = min((stage for stage, _ in waiting), key=STAGES.index)
            shares = [1.0 if name != stage else done for name, done in waiting]
            known = [share for share in shares if share is not None]
            self._progress(stage, sum(known) / len(shares) if len(known) == len(shares) else None)

    def _tick(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._stopping:
                return
            if now - self._last_beat > BEAT_S:
                self._last_beat = now
                for link in self._links.values():
                    self._post(link, wire.Alive())
            for link in list(self._links.values()):
                self._watch(link, now)

    def _watch(self, link: Link, now: float) -> None:
        process = link.process
        how = process.ended() if process is not None else None
        if how is not None:
            self._lose(link, link.reason or how)
        elif link.identity is not None and now - link.heard > self._options.heartbeat_timeout_s:
            self._lose(link, f"no sign of life for {self._options.heartbeat_timeout_s:g} s")
        elif link.leaving and link.identity is None and process is None:
            self._drop(link)
        elif process is None and link.identity is None and link.awaited:
            if now - link.heard > self._options.join_timeout_s:
                self._fail_start(self._never_came(link))
        elif process is not None and process.due is not None and now >= process.due:
            unit = self._unit(link)
            if all(self._links[name].identity is None for name in unit.workers):
                unit.begin(self.plan)
                link.heard = now
                process.start(self._folder, self.address, self._options.flags())

    def _lose(self, link: Link, reason: str) -> None:
        """A worker is gone, or must be: its unit restarts as a whole."""
        if link.leaving:
            self._drop(link)
            return
        logger.warning("worker %s is lost: %s", link.worker.name, reason)
        unit = self._unit(link)
        lost = [self._links[name] for name in unit.workers]
        names = dict.fromkeys(name for one in lost if one.up for name in one.worker.instances)
        for one in lost:
            one.identity, one.up, one.progress = None, False, ("start", None)
            if one.process is not None:
                one.process.kill()
        unit.end()
        for name in names:
            self._note(InstanceStats(name, role_of(self.plan.instance(name))))
            self._report(Report(name, dead=f"worker {link.worker.name}: {reason}"))
        if link.awaited:
            self._fail_start(f"worker {link.worker.name} could not start: {reason}")
            return
        for one in lost:
            if one.process is not None and not one.final:
                wait = one.process.restart_later()
                logger.warning("worker %s starts again in %.1f s", one.worker.name, wait)
        link.reason = ""

    def _drop(self, link: Link) -> None:
        if link.process is not None:
            link.process.kill()
        self._links.pop(link.worker.name, None)

    def _fail_start(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._changed.notify_all()

    def _never_came(self, link: Link) -> str:
        worker = link.worker
        return (
            f"worker {worker.name} on {worker.host} has not joined within {self._options.join_timeout_s:g} s: start it"
            f" there with python -m jdserve.worker --plan PLAN --name {worker.name} --join {self.address} --secret-file"
            " FILE"
        )

    def _unit(self, link: Link) -> Unit:
        return next(unit for unit in self._units if link.worker.name in unit.workers)
