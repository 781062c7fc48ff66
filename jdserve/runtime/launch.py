"""From a plan to running instances in this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import platformdirs

from jdserve.compat import Device, keep_compilations, offer_cpu_devices
from jdserve.core.errors import InvalidPlan
from jdserve.core.pages import NULL_PAGE
from jdserve.core.plan import DecodeInstance, Plan, PrefillInstance
from jdserve.core.plan import Instance as InstancePlan
from jdserve.core.spec import ModelSpec
from jdserve.models.checkpoint import LoadedModel
from jdserve.models.load import Place, load_params
from jdserve.models.skeleton import Skeleton
from jdserve.policy.base import Machine
from jdserve.policy.build import RouterConfig, machine_for, router_for
from jdserve.policy.record import Header, Recorder
from jdserve.runtime.client import EngineClient
from jdserve.runtime.engine import Engine
from jdserve.runtime.executor import Executor, JaxExecutor
from jdserve.runtime.instance import PULL_TIMEOUT_S, Instance
from jdserve.runtime.outputs import Report
from jdserve.runtime.progress import Progress
from jdserve.transfer.base import Transport
from jdserve.transfer.layout import KVLayout
from jdserve.transfer.local import LocalTransport

MakeExecutor = Callable[[InstancePlan], Executor]
"""Makes the executor of an instance, with its weights loaded and nothing compiled yet."""


def make_engine(
    plan: Plan,
    spec: ModelSpec,
    make_executor: MakeExecutor,
    progress: Progress | None = None,
    record: Path | None = None,
) -> Engine:
    """An engine over instances in this process, not started yet.

    Args:
        plan: to serve.
        spec: of its model.
        make_executor: called on a thread per instance when the engine starts.
        progress: of the start.
        record: folder that gets an event log per machine, for ``jdserve replay``.

    Raises:
        InvalidPlan: the plan does not fit the model, or asks for what this version cannot run.
    """
    plan.check(spec)
    for index, instance in enumerate(plan.instances):
        if instance.pp != 1:
            raise InvalidPlan(f"$.instances[{index}].pp", f"this version runs pp = 1, got {instance.pp}")
    for index, worker in enumerate(plan.workers):
        if worker.host != "localhost":
            raise InvalidPlan(f"$.workers[{index}].host", f"this version runs on localhost only, got {worker.host!r}")
    progress = progress or Progress()

    def connect(report: Callable[[Report], None]) -> Mapping[str, EngineClient]:
        return _start_instances(plan, spec, make_executor, report, progress, record)

    config = RouterConfig.of(plan)
    router = _recorded(router_for(plan), config, plan, record, "router")
    return Engine(plan, spec, router, connect, progress)


def jax_executors(plan: Plan, model: LoadedModel, progress: Progress) -> MakeExecutor:
    """Makes executors that run ``model`` on the devices that the plan gives them.

    Raises:
        InvalidPlan: the plan names a device that this machine does not have.
    """
    keep_compilations(Path(platformdirs.user_cache_dir("jdserve")) / "compilations")
    devices = plan_devices(plan)

    def make(instance: InstancePlan) -> Executor:
        def load(kv_heads: int, place: Place) -> tuple[Skeleton, tuple[jax.Array, ...]]:
            layers = range(model.spec.layers)
            return load_params(model, layers, kv_heads=kv_heads, dtype=plan.dtype, place=place, progress=progress)

        return JaxExecutor(plan, instance, model.spec, devices[instance.name], load)

    return make


def plan_devices(plan: Plan) -> Mapping[str, Seq[Device]]:
    """The jax devices of each instance, by number; CPU devices are made as many as the plan names.

    Raises:
        InvalidPlan: the plan names a device that this machine does not have.
    """
    numbers = {instance.name: [device for _, device in plan.devices(instance.name)] for instance in plan.instances}
    wanted = 1 + max(device for devices in numbers.values() for device in devices)
    offer_cpu_devices(wanted)
    have = jax.devices()
    if len(have) < wanted:
        raise InvalidPlan(
            "$.workers",
            f"device {wanted - 1} is named, jax runs here with {len(have)} {have[0].platform} devices (on CPU their"
            f" number is fixed when jax starts: call jax.config.update('jax_num_cpu_devices', {wanted}) first)",
        )
    return {name: [have[device] for device in devices] for name, devices in numbers.items()}


def _start_instances(
    plan: Plan,
    spec: ModelSpec,
    make_executor: MakeExecutor,
    report: Callable[[Report], None],
    progress: Progress,
    record: Path | None,
) -> Mapping[str, EngineClient]:
    """Load and compile all instances side by side, then start their threads."""
    done = {instance.name: 0.0 for instance in plan.instances}

    def warm(instance: InstancePlan) -> Executor:
        executor = make_executor(instance)

        def compiled(share: float) -> None:
            done[instance.name] = share
            progress("compile", sum(done.values()) / len(done))

        executor.warm_up(compiled)
        return executor

    with ThreadPoolExecutor(len(plan.instances), thread_name_prefix="start") as pool:
        executors = dict(zip(plan.instances, pool.map(warm, plan.instances), strict=True))
    transport = LocalTransport()
    destinations = _decode_layouts(executors)
    _warm_transfers(executors, transport)
    clients: dict[str, EngineClient] = {}
    for instance, executor in executors.items():
        scheduler = machine_for(instance, plan.page_size)
        machine = _recorded(scheduler, instance, plan, record, instance.name)
        client = Instance(instance, scheduler, executor, transport, destinations, spec.eos, report, machine)
        client.start()
        clients[instance.name] = client
    progress("ready", 1.0)
    return clients


def _warm_transfers(executors: Mapping[InstancePlan, Executor], transport: Transport) -> None:
    """Run one hand-off of every size between every pair, from null pages to null pages, so that nothing is compiled
    later.
    """
    sources = [(plan.name, executor) for plan, executor in executors.items() if isinstance(plan, PrefillInstance)]
    targets = [executor for plan, executor in executors.items() if isinstance(plan, DecodeInstance)]
    for (name, source), target in itertools.product(sources, targets):
        for size in source.transfer_sizes:
            copy = source.gather((NULL_PAGE,) * size)
            handle = transport.offer("warm-up", name, copy, target.layout, PULL_TIMEOUT_S)
            landed = target.pull(lambda layout, meshes: transport.pull(handle, layout, meshes, PULL_TIMEOUT_S))  # noqa: B023
            target.insert(landed, source.layout, ())
            transport.release(handle)


def _decode_layouts(executors: Mapping[InstancePlan, Executor]) -> Seq[KVLayout]:
    """The distinct layouts that KV may be pulled into."""
    layouts = [executor.layout for instance, executor in executors.items() if isinstance(instance, DecodeInstance)]
    return list(dict.fromkeys(layouts))


def _recorded(
    machine: Machine, config: InstancePlan | RouterConfig, plan: Plan, record: Path | None, name: str
) -> Machine:
    if record is None:
        return machine
    record.mkdir(parents=True, exist_ok=True)
    file = (record / f"{name}.jsonl").open("w", buffering=1)
    return Recorder(machine, Header(config, plan.page_size), file, keep=False)
