"""A worker process: some instances of a plan, told what to do by the front door over the control channel.

Threads: this one runs the channel and gives the sign of life; each instance has its launcher thread; a start-up thread
loads and compiles. The process ends when it is told to, when an instance dies (the worker is the unit of failure), or
when the front door falls silent.

Of the workers that share an instance the first one leads and talks for it; in the others the start-up thread goes on to
do what the leader says.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from jdserve.compat import keep_compilations_here, offer_cpu_devices
from jdserve.core.errors import CheckpointError, InvalidPlan
from jdserve.core.plan import Plan, Worker
from jdserve.core.version import VERSION
from jdserve.models.checkpoint import LoadedModel
from jdserve.models.load import resolve
from jdserve.runtime import wire
from jdserve.runtime.channel import Channel, Frames, Keys
from jdserve.runtime.follower import Follower
from jdserve.runtime.guides import Guides
from jdserve.runtime.hosts import address_of
from jdserve.runtime.instance import Instance
from jdserve.runtime.launch import Hosted, jax_executors
from jdserve.runtime.links import Links, layout_of
from jdserve.runtime.outputs import Report
from jdserve.runtime.progress import Progress
from jdserve.runtime.team import Team, make_activations
from jdserve.runtime.transports import transport_maker
from jdserve.transfer.device_put import join_world

logger = logging.getLogger(__name__)

BEAT_S = 0.5
TICK_S = 0.1

SILENCE_S = 15.0
"""A front door that says nothing for so long is gone."""


FAREWELL_S = 8.0
"""Longest wait for the leader to end an instance, when this process is told to stop."""


class WorkerProcess:
    """One worker; see the module.

    Args:
        plan: that the worker was started with; only its own part of it counts, the front door sends the plan in force.
        name: of the worker.
        channel: to the front door.
        keys: of the server, for channels between workers.
    """

    def __init__(self, plan: Plan, name: str, channel: Channel, keys: Keys) -> None:
        self._plan = plan
        self._name = name
        self._channel = channel
        self._keys = keys
        self._hosted: Hosted | None = None
        self._follower: Follower | None = None
        self._starter: threading.Thread | None = None
        self._heard = time.monotonic()
        self._beaten = 0.0
        self._shown: tuple[str, float | None] = ("start", None)
        self._code: int | None = None
        self._ending = threading.Lock()

    def run(self) -> int:
        """Work until the end; returns the exit code."""
        self._post(wire.Hello(self._name, os.getpid(), VERSION))
        self._channel.run(self._take, self._tick, TICK_S)
        assert self._code is not None
        return self._code

    def _post(self, message: wire.FromWorker) -> None:
        self._channel.post((wire.encode(message),))

    def _take(self, frames: Frames) -> None:
        self._heard = time.monotonic()
        message = wire.to_worker.decode(frames[0])
        match message:
            case wire.Welcome():
                self._starter = threading.Thread(target=self._start, args=(message,), name="start", daemon=True)
                self._starter.start()
            case wire.Refused(reason):
                logger.error("the front door refuses worker %s: %s", self._name, reason)
                self._end(1)
            case wire.Stop():
                threading.Thread(target=self._stop, name="stop", daemon=True).start()
            case wire.Alive():
                pass
            case wire.PlanChanged(plan):
                if self._hosted is not None:
                    self._hosted.links.plan = plan
            case wire.Submit(instance, request, prefix):
                self._instance(instance).submit(request, prefix)
            case wire.HandOff(instance, request, source, handles):
                self._instance(instance).hand_off(request, source, handles)
            case wire.Cancel(instance, request_id):
                self._instance(instance).cancel(request_id)
            case wire.Landed(instance, request_id):
                self._instance(instance).landed(request_id)

    def _instance(self, name: str) -> Instance:
        assert self._hosted is not None, "work before Up"
        return self._hosted.clients[name]

    def _start(self, welcome: wire.Welcome) -> None:
        try:
            plan, here = welcome.plan, welcome.plan.worker(self._name)
            ours = self._plan.worker(self._name)
            if here != ours:
                raise InvalidPlan("$.workers", f"worker {self._name} is {here} for the server, {ours} in --plan")
            progress = Progress(self._show)
            model = resolve(plan.model, progress, weights=plan.weights, plugin=plan.model_plugin)
            if welcome.world is not None:
                _join(welcome.world, here, plan)
            plan.check(model.spec)
            spans = len(plan.workers_of(here.instances[0])) > 1
            if spans and welcome.world is not None and welcome.world.rank:
                self._follow(plan, here, welcome.world, model, progress)
                return
            team = None
            if spans and welcome.world is not None:
                layout = layout_of(plan, plan.instance(here.instances[0]), model.spec)
                team = Team(welcome.world, self._keys, make_activations(here, layout))
            links = Links(plan, model.spec, transport_maker(plan, here, welcome.world, team), Plan.transport_between)
            instances = [plan.instance(name) for name in here.instances]
            record = Path(welcome.record) if welcome.record is not None else None
            executors = jax_executors(plan, model, progress, here, team)
            self._hosted = Hosted(
                instances,
                links,
                model.spec,
                executors,
                self._report,
                progress,
                record,
                welcome.generation,
                Guides(model.folder, model.spec),
            )
            if team is not None:
                team.begin()
            self._post(wire.Up())
        except Exception as error:
            final = isinstance(error, InvalidPlan | CheckpointError)
            reason = str(error) if final else f"{type(error).__name__}: {error}"
            logger.log(logging.ERROR, "worker %s ends: %s", self._name, reason, exc_info=not final)
            self._post(wire.Broken(reason, final))
            self._end(1)

    def _follow(self, plan: Plan, here: Worker, world: wire.World, model: LoadedModel, progress: Progress) -> None:
        """Take part in an instance that another worker leads, until that one ends it."""
        self._follower = follower = Follower(plan, here, world, self._keys, model, progress)
        follower.run(lambda: self._post(wire.Up()))

    def _show(self, stage: str, done: float | None) -> None:
        self._shown = (stage, done)

    def _report(self, report: Report) -> None:
        if report.dead is not None:
            self._post(wire.Broken(f"instance {report.instance}: {report.dead}"))
            self._end(1)
            return
        hosted = self._hosted
        if hosted is not None:
            self._post(wire.News(report, hosted.clients[report.instance].stats()))

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._heard > SILENCE_S:
            logger.error("worker %s ends: the front door has been silent for %.0f s", self._name, SILENCE_S)
            self._end(1)
        if now - self._beaten < BEAT_S:
            return
        self._beaten = now
        hosted, follower = self._hosted, self._follower
        if follower is not None and follower.begun:
            self._post(wire.Beat(recompilations=follower.recompilations()))
            return
        if hosted is None:
            self._post(wire.Starting(*self._shown))
            return
        clients = list(hosted.clients.values())
        busy = max((client.busy_s() for client in clients), default=0.0)
        self._post(wire.Beat(tuple(client.stats() for client in clients), hosted.recompilations(), busy))

    def _stop(self) -> None:
        if self._hosted is not None:
            self._hosted.stop()
        if self._follower is not None:
            self._follower.wait(FAREWELL_S)
        self._post(wire.Stopped())
        self._end(0)

    def _end(self, code: int) -> None:
        with self._ending:
            if self._code is None:
                self._code = code
                self._channel.close()


def _join(world: wire.World, here: Worker, plan: Plan) -> None:
    transfer = None
    if plan.platform == "cpu":
        offer_cpu_devices(len(here.devices))
        if plan.transport == "device_put":
            transfer = f"{address_of(here.host)}:{world.ports[world.rank]}"
    join_world(world.coordinator, world.rank, transfer, num_processes=world.size)
    keep_compilations_here()
