"""Units: workers that live and die together, because they form one ``jax.distributed`` world.

Such are the workers of an instance that spans processes, and the pair of a ``device_put`` plan. Every other worker is a
unit of its own and needs no world.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence as Seq

from jdserve.core.plan import Plan, PrefillInstance, Worker
from jdserve.runtime.hosts import address_of, is_here
from jdserve.runtime.wire import World

REMOTE_PORTS = range(20000, 32000)
"""Where ports on other hosts are guessed; a taken one costs a restart of the unit."""


class Unit:
    """Workers that restart as a whole.

    Attributes:
        workers: names, in the order of their ranks.
        generation: how often the unit was started.
    """

    def __init__(self, workers: tuple[str, ...]) -> None:
        self.workers = workers
        self.generation = 0
        self._begun = False
        self._world: World | None = None

    def begin(self, plan: Plan) -> None:
        """A worker of the unit starts; the first one since the last end settles the ports of a new world."""
        if self._begun:
            return
        self._begun = True
        self.generation += 1
        if len(self.workers) > 1:
            hosts = [plan.worker(name).host for name in self.workers]
            self._world = World(
                coordinator=f"{address_of(hosts[0])}:{_free_port(hosts[0])}",
                size=len(hosts),
                rank=0,
                ports=tuple(_free_port(host) for host in hosts),
                steps=f"{address_of(hosts[0])}:{_free_port(hosts[0])}",
            )

    def end(self) -> None:
        """All its workers are gone."""
        self._begun = False

    def world(self, worker: Worker) -> World | None:
        """The world that ``worker`` joins; None when it needs none."""
        if self._world is None:
            return None
        world = self._world
        rank = self.workers.index(worker.name)
        return World(world.coordinator, world.size, rank, world.ports, world.steps)


def units_of(plan: Plan, known: Seq[Unit] = ()) -> list[Unit]:
    """The units of a plan; those of ``known`` that are still the same are kept."""
    groups = [[worker.name] for worker in plan.workers]
    together = [[worker.name for worker in plan.workers_of(instance.name)] for instance in plan.instances]
    if plan.transport == "device_put":
        first = sorted(plan.instances, key=lambda instance: not isinstance(instance, PrefillInstance))
        together.append([worker.name for instance in first for worker in plan.workers_of(instance.name)])
    for names in together:
        touched = [group for group in groups if set(group) & set(names)]
        merged = list(dict.fromkeys([*names, *(name for group in touched for name in group)]))
        groups = [group for group in groups if group not in touched] + [merged]
    old = {unit.workers: unit for unit in known}
    return [old.get(tuple(group)) or Unit(tuple(group)) for group in groups]


def _free_port(host: str) -> int:
    if not is_here(host):
        return random.SystemRandom().choice(REMOTE_PORTS)
    with socket.socket() as probe:
        probe.bind((address_of(host), 0))
        return probe.getsockname()[1]
