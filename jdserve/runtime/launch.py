"""From a plan to running instances in this process: all of them (a notebook, a test), or those of one worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import platformdirs

from jdserve.compat import CompilationCounter, Device, keep_compilations, offer_cpu_devices
from jdserve.core.errors import InvalidPlan
from jdserve.core.pages import NULL_PAGE
from jdserve.core.plan import DecodeInstance, Plan, PrefillInstance, Worker
from jdserve.core.plan import Instance as InstancePlan
from jdserve.core.spec import ModelSpec
from jdserve.models.checkpoint import LoadedModel
from jdserve.models.load import Place, load_params
from jdserve.models.skeleton import Skeleton
from jdserve.policy.build import RouterConfig, machine_for, router_of
from jdserve.runtime.client import EngineClient
from jdserve.runtime.engine import Engine
from jdserve.runtime.executor import Executor, JaxExecutor
from jdserve.runtime.guides import Guides
from jdserve.runtime.instance import PULL_TIMEOUT_S, Instance
from jdserve.runtime.links import Links, layout_of, local_route
from jdserve.runtime.outputs import Report
from jdserve.runtime.part import nothing_landed
from jdserve.runtime.progress import Progress
from jdserve.runtime.recording import recorded
from jdserve.runtime.stage import Load
from jdserve.runtime.team import Team
from jdserve.transfer.local import LocalTransport

MakeExecutor = Callable[[InstancePlan], Executor]
"""Makes the executor of an instance, with its weights loaded and nothing compiled yet."""


def make_engine(
    plan: Plan,
    spec: ModelSpec,
    make_executor: MakeExecutor,
    progress: Progress | None = None,
    record: Path | None = None,
    folder: Path | None = None,
) -> Engine:
    """An engine over instances in this process, not started yet. KV moves by ``local``, whatever the plan says.

    Args:
        plan: to serve.
        spec: of its model.
        make_executor: called on a thread per instance when the engine starts.
        progress: of the start.
        record: folder that gets an event log per machine, for ``jdserve replay``.
        folder: of the model, whose tokenizer guided decoding needs; None where nobody asks for that.

    Raises:
        InvalidPlan: the plan does not fit the model, or names another host.
    """
    plan.check(spec)
    for index, worker in enumerate(plan.workers):
        if worker.host != "localhost":
            raise InvalidPlan(f"$.workers[{index}].host", f"one process runs on localhost only, got {worker.host!r}")
    progress = progress or Progress()

    def connect(report: Callable[[Report], None]) -> LocalFleet:
        links = Links(plan, spec, lambda kind: LocalTransport(checksums=plan.transfer_checksums), local_route)
        guides = None if folder is None else Guides(folder, spec)
        hosted = Hosted(plan.instances, links, spec, make_executor, report, progress, record, guides=guides)
        return LocalFleet(hosted)

    config = RouterConfig.of(plan)
    router = recorded(router_of(config), config, plan, record, "router")
    return Engine(plan, spec, router, connect, progress)


def jax_executors(
    plan: Plan, model: LoadedModel, progress: Progress, worker: Worker | None = None, team: Team | None = None
) -> MakeExecutor:
    """Makes executors that run ``model`` on the devices that the plan gives them.

    Args:
        plan: to serve.
        model: of the plan.
        progress: told of loading.
        worker: whose devices this process sees, numbered from 0; None where it runs the whole plan and sees all.
        team: the other processes of the one instance that the worker leads, where it spans several.

    Raises:
        InvalidPlan: the plan names a device that this machine does not have.
    """
    keep_programs()
    devices = plan_devices(plan, worker)
    load = loader(plan, model, progress)

    def make(instance: InstancePlan) -> Executor:
        return JaxExecutor(plan, instance, model.spec, devices[instance.name], load, team=team)

    return make


def keep_programs() -> None:
    """Keep compiled programs for the next start, where users of this machine keep such things."""
    keep_compilations(Path(platformdirs.user_cache_dir("jdserve")) / "compilations")


def loader(plan: Plan, model: LoadedModel, progress: Progress) -> Load:
    """Loads the weights of a stage."""

    def load(layers: range, kv_heads: int, place: Place) -> tuple[Skeleton, tuple[jax.Array, ...]]:
        return load_params(model, layers, kv_heads=kv_heads, dtype=plan.dtype, place=place, progress=progress)

    return load


def plan_devices(plan: Plan, worker: Worker | None = None) -> Mapping[str, Seq[Seq[Device]]]:
    """The jax devices of each stage of each instance; CPU devices are made as many as are named.

    Raises:
        InvalidPlan: a device is named that this machine does not have.
    """
    if worker is not None and len(plan.workers_of(worker.instances[0])) > 1:
        return {worker.instances[0]: _spanned_devices(plan, worker.instances[0])}
    here = plan.instances if worker is None else [plan.instance(name) for name in worker.instances]
    numbers = {
        instance.name: [[device for _, device in plan.devices(instance.name, stage)] for stage in range(instance.pp)]
        for instance in here
    }
    if worker is not None:
        position = {device: index for index, device in enumerate(worker.devices)}
        numbers = {name: [[position[d] for d in stage] for stage in stages] for name, stages in numbers.items()}
    wanted = 1 + max(device for stages in numbers.values() for stage in stages for device in stage)
    offer_cpu_devices(wanted)
    have = jax.local_devices()
    if len(have) < wanted:
        raise InvalidPlan(
            "$.workers",
            f"device {wanted - 1} is named, jax runs here with {len(have)} {have[0].platform} devices (on CPU their"
            f" number is fixed when jax starts: call jax.config.update('jax_num_cpu_devices', {wanted}) first)",
        )
    return {name: [[have[device] for device in stage] for stage in stages] for name, stages in numbers.items()}


def _spanned_devices(plan: Plan, name: str) -> Seq[Seq[Device]]:
    """The devices of each stage of an instance whose workers form this process's world, in the order of its ranks."""
    workers = plan.workers_of(name)
    have: list[list[Device]] = [[] for _ in workers]
    for device in jax.devices():
        have[device.process_index].append(device)
    for worker, here in zip(workers, have, strict=True):
        if len(here) < len(worker.devices):
            raise InvalidPlan(
                f"$.workers[{plan.workers.index(worker)}].stages",
                f"{len(worker.devices)} devices are named, jax runs there with {len(here)}",
            )
    return [
        [
            have[workers.index(worker)][worker.devices.index(device)]
            for worker in plan.workers
            for hosted in worker.stages
            if (hosted.instance, hosted.stage) == (name, stage)
            for device in hosted.devices
        ]
        for stage in range(plan.instance(name).pp)
    ]


class Hosted:
    """Instances of a plan in this process, loaded, compiled and running once the constructor returns.

    Attributes:
        clients: of each instance, by name.

    Args:
        instances: to run.
        links: between them and to others.
        spec: of the model.
        make_executor: called on a thread per instance.
        report: takes news, on the launcher threads.
        progress: of the start.
        record: folder for event logs.
        generation: how often these were started before, plus one; told apart in the names of the logs.
        guides: of the model.
    """

    def __init__(
        self,
        instances: Seq[InstancePlan],
        links: Links,
        spec: ModelSpec,
        make_executor: MakeExecutor,
        report: Callable[[Report], None],
        progress: Progress,
        record: Path | None = None,
        generation: int = 1,
        guides: Guides | None = None,
    ) -> None:
        self.links = links
        plan = links.plan
        executors = _warm(instances, make_executor, progress)
        for instance, executor in executors.items():
            _warm_transfers(instance, executor, links, spec)
        self._guides = guides
        if guides is not None:
            guides.wait()
        self.clients: dict[str, Instance] = {}
        for instance, executor in executors.items():
            scheduler = machine_for(instance, plan.page_size)
            name = instance.name if generation == 1 else f"{instance.name}-{generation}"
            machine = recorded(scheduler, instance, plan, record, name)
            client = Instance(instance, scheduler, executor, links, spec.eos, report, machine, guides=guides)
            client.start()
            self.clients[instance.name] = client
        self._compilations = CompilationCounter()
        progress("ready", 1.0)

    def recompilations(self) -> int:
        """Programs compiled in this process since."""
        return self._compilations.count

    def retire(self, instance: str) -> None:
        """Stop one instance; waits for the step in flight."""
        self.clients.pop(instance).stop()

    def stop(self) -> None:
        """Stop all instances and free what is offered."""
        self._compilations.close()
        for name in list(self.clients):
            self.retire(name)
        self.links.close()
        if self._guides is not None:
            self._guides.close()


class LocalFleet:
    """The fleet of one process; see :class:`~jdserve.runtime.client.Fleet`."""

    def __init__(self, hosted: Hosted) -> None:
        self._hosted = hosted

    @property
    def clients(self) -> Mapping[str, EngineClient]:
        """Of each instance, by name."""
        return self._hosted.clients

    def recompilations(self) -> int:
        """Programs compiled in this process since the start."""
        return self._hosted.recompilations()

    def retire(self, instance: str) -> None:
        """End an instance on a thread of its own, since that waits for its step."""
        threading.Thread(target=self._hosted.retire, args=(instance,), name=f"retire-{instance}").start()

    def add(self, instance: InstancePlan, worker: Worker) -> Plan:
        """Not in one process: its devices were settled when jax started.

        Raises:
            InvalidPlan: always.
        """
        raise InvalidPlan("$.worker", "instances can be added to a server with workers, not to one process")

    def stop(self) -> None:
        """Stop all instances."""
        self._hosted.stop()


def _warm(
    instances: Seq[InstancePlan], make_executor: MakeExecutor, progress: Progress
) -> Mapping[InstancePlan, Executor]:
    """Load and compile instances side by side."""
    done = {instance.name: 0.0 for instance in instances}

    def warm(instance: InstancePlan) -> Executor:
        executor = make_executor(instance)

        def compiled(share: float) -> None:
            done[instance.name] = share
            progress("compile", sum(done.values()) / len(done))

        executor.warm_up(compiled)
        return executor

    with ThreadPoolExecutor(len(instances), thread_name_prefix="start") as pool:
        return dict(zip(instances, pool.map(warm, instances), strict=True))


def _warm_transfers(instance: InstancePlan, executor: Executor, links: Links, spec: ModelSpec) -> None:
    """Run the programs of every hand-off once, from null pages or to null pages, so that nothing is compiled later."""
    if isinstance(instance, PrefillInstance):
        for size in executor.transfer_sizes:
            pages = (NULL_PAGE,) * size
            ways = links.begin("warm-up", instance.name, lambda: executor.leaving(pages), PULL_TIMEOUT_S)  # noqa: B023
            links.complete(ways)
            links.drop(ways)
    if isinstance(instance, DecodeInstance):
        sources = [
            layout_of(links.plan, peer, spec) for peer in links.plan.instances if isinstance(peer, PrefillInstance)
        ]
        for layout in dict.fromkeys(sources):
            for size in executor.transfer_sizes:
                landed = executor.pull(lambda here, meshes: nothing_landed(layout, here, meshes, size))  # noqa: B023
                executor.insert(landed, layout, ())()
