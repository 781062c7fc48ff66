"""``plan.json``: everything the server needs to run a placement, and the only thing the planner hands over.

A plan names the model, the instances (each one model replica in one role, with its parallel degrees, pages and
scheduling limits) and the workers (OS processes, with the devices and the stages they host). It is frozen; what is not
in it is not an option.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jdserve.core import jsonio
from jdserve.core.backends import Attention, attention_for
from jdserve.core.errors import InvalidPlan
from jdserve.core.instances import (
    ColocatedInstance,
    DecodeInstance,
    Instance,
    Name,
    Positive,
    PrefillInstance,
    Role,
    role_of,
)
from jdserve.core.pages import pages_for
from jdserve.core.request import SLO
from jdserve.core.spec import DType, ModelSpec, WeightFormat

__all__ = [
    "LOCALHOST",
    "PLAN_VERSION",
    "Addition",
    "ColocatedInstance",
    "DecodeInstance",
    "HostedStage",
    "Instance",
    "Plan",
    "Platform",
    "Prediction",
    "PrefillInstance",
    "Role",
    "TransportKind",
    "Worker",
    "role_of",
]

PLAN_VERSION = 1

LOCALHOST = "localhost"

Platform = Literal["auto", "cpu", "gpu", "tpu"]

TransportKind = Literal["local", "shm", "pull", "device_put"]


class HostedStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pipeline stage (or the part of it) that a worker hosts.

    Attributes:
        instance: name of the instance.
        devices: device ids of the worker's host; on CPU, cores.
        stage: index of the stage, from 0.
    """

    instance: str
    devices: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    stage: Annotated[int, Meta(ge=0)] = 0


class Worker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One OS process: the unit that fails, and the owner of devices.

    Attributes:
        name: unique in the plan.
        stages: what it hosts.
        host: name or address of the machine; KV is offered on this address, so it must be a private one.
    """

    name: Name
    stages: Annotated[tuple[HostedStage, ...], Meta(min_length=1)]
    host: Annotated[str, Meta(min_length=1)] = LOCALHOST

    @property
    def instances(self) -> tuple[str, ...]:
        """Names of the instances that live here, wholly or in part."""
        return tuple(dict.fromkeys(hosted.instance for hosted in self.stages))

    @property
    def devices(self) -> tuple[int, ...]:
        """All device ids, ascending: the order in which jax numbers them inside the process."""
        return tuple(sorted(device for hosted in self.stages for device in hosted.devices))


class Addition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One more instance for a running server.

    Attributes:
        instance: its plan.
        worker: a process of its own for it, which hosts nothing else.
    """

    instance: Instance
    worker: Worker


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the planner expects of a plan; the server only passes it on.

    Attributes:
        workload: name of the workload it was planned for.
        rate: requests per second that were simulated.
        attainment: share of them that met both latencies.
        low, high: bounds of its 95 % confidence interval.
        goodput: highest rate at which the wanted share still meets them; None where it was not looked for.
    """

    workload: str
    rate: Annotated[float, Meta(ge=0)]
    attainment: Annotated[float, Meta(ge=0, le=1)]
    low: Annotated[float, Meta(ge=0, le=1)]
    high: Annotated[float, Meta(ge=0, le=1)]
    goodput: Annotated[float, Meta(ge=0)] | None = None


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A placement, complete.

    Attributes:
        version: of this format.
        model: ``smollm2-135m-instruct`` (built in), the path of a checkpoint, or an id of the Hugging Face hub.
        dtype: of weights, activations and KV.
        weights: how matrices are stored; None for in ``dtype``, or as the checkpoint was converted.
        model_plugin: ``module:Class`` from outside the package that computes the model, None for what its architecture
            says. Every worker imports it, so it must be installed there.
        page_size: token positions per page, the same on every instance.
        max_model_len: most tokens (prompt and output) of one request.
        slo: latency objective the plan was made for.
        transport: how KV moves between workers. ``auto`` takes ``shm`` between CPU workers of one host and ``pull``
            otherwise; ``device_put`` makes one prefill and one decode worker a lockstep unit; ``local`` says that there
            is one worker. Inside a worker it is always ``local``.
        transfer_checksums: check every piece of KV on arrival: to hunt for a fault, at the price of waiting for it.
        platform: what the devices are; ``auto`` lets the machine of the server say.
        attention: its back end; ``auto`` for that of the platform. ``pallas_triton`` runs on GPUs, ``tpu`` on
            TPUs, ``pallas_interpret`` interprets the kernels of GPUs on CPU, slowly, and ``xla`` runs everywhere.
        max_open_requests: requests that are open at a time; more are refused at the door.
        shed: refuse a request whose prompt would wait longer than the SLO's TTFT, by the step times of the prefill
            instances: it would miss the objective and make others miss theirs.
        reach: how far KV may go. ``any`` takes the least loaded decode instance of all; ``host`` the least loaded one
            on the same hosts as the prefill instance, for clusters whose links between hosts are slow (DistServe's low
            node affinity). When none of these is live, any other serves.
        predicted: what the planner expects, None for a plan that was written by hand.
        instances, workers: who serves, and where.
    """

    version: Literal[1] = PLAN_VERSION
    model: str
    dtype: DType = "float32"
    weights: WeightFormat | None = None
    model_plugin: Annotated[str, Meta(pattern=r"^[\w.]+:\w+$")] | None = None
    page_size: Positive = 16
    max_model_len: Positive
    slo: SLO | None = None
    transport: Literal["auto", "local", "shm", "pull", "device_put"] = "auto"
    transfer_checksums: bool = False
    platform: Platform = "auto"
    attention: Attention = "auto"
    max_open_requests: Positive = 1024
    shed: bool = False
    reach: Literal["any", "host"] = "any"
    predicted: Prediction | None = None
    instances: Annotated[tuple[Instance, ...], Meta(min_length=1)]
    workers: Annotated[tuple[Worker, ...], Meta(min_length=1)]

    @classmethod
    def from_json(cls, data: bytes | str) -> Plan:
        """Parse and check a plan.

        Raises:
            InvalidPlan: with the JSON path and the bound.
        """
        plan = jsonio.decode(data, cls)
        plan.check()
        return plan

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read and check the plan at ``path``.

        Raises:
            InvalidPlan: the file cannot be read, or is refused.
        """
        plan = jsonio.read(path, cls)
        plan.check()
        return plan

    def to_json(self) -> bytes:
        """The plan as indented JSON."""
        return jsonio.encode(self)

    def instance(self, name: str) -> Instance:
        """The instance called ``name``."""
        return next(instance for instance in self.instances if instance.name == name)

    def worker(self, name: str) -> Worker:
        """The worker called ``name``."""
        return next(worker for worker in self.workers if worker.name == name)

    def workers_of(self, name: str) -> tuple[Worker, ...]:
        """Workers that host instance ``name`` or a part of it; the first one leads it."""
        hosts = {
            hosted.stage: worker
            for worker in reversed(self.workers)
            for hosted in worker.stages
            if hosted.instance == name
        }
        lead = [hosts[stage] for stage in sorted(hosts)]
        rest = [worker for worker in self.workers if name in worker.instances]
        return tuple({worker.name: worker for worker in (*lead, *rest)}.values())

    def processes(self, name: str) -> tuple[int, ...]:
        """For each device of instance ``name``, stage by stage in mesh order, the index of its worker in
        :meth:`workers_of`; empty where one worker has them all."""
        workers = self.workers_of(name)
        if len(workers) == 1:
            return ()
        return tuple(
            workers.index(worker)
            for stage in range(self.instance(name).pp)
            for worker in self.workers
            for hosted in worker.stages
            if hosted.instance == name and hosted.stage == stage
            for _ in hosted.devices
        )

    def transport_between(self, source: str, destination: str) -> TransportKind:
        """How KV moves from prefill instance ``source`` to decode instance ``destination``."""
        there, here = self.workers_of(source), self.workers_of(destination)
        if there == here and len(here) == 1:
            return "local"
        if self.transport in ("shm", "pull", "device_put"):
            return self.transport
        one_host = len({worker.host for worker in (*there, *here)}) == 1
        alone = len(there) == len(here) == 1
        return "shm" if one_host and alone and self.platform == "cpu" else "pull"

    def near(self, source: str) -> tuple[str, ...]:
        """Decode instances that the KV of prefill instance ``source`` should stay with; empty where any will do."""
        if self.reach == "any":
            return ()
        hosts = self.hosts(source)
        return tuple(
            instance.name
            for instance in self.instances
            if isinstance(instance, DecodeInstance) and self.hosts(instance.name) == hosts
        )

    def hosts(self, name: str) -> frozenset[str]:
        """Hosts on which instance ``name`` lies."""
        return frozenset(worker.host for worker in self.workers_of(name))

    def without(self, name: str) -> Plan:
        """The plan after instance ``name`` has left, and the workers that hosted nothing else; not checked."""
        parts = [
            msgspec.structs.replace(worker, stages=tuple(part for part in worker.stages if part.instance != name))
            for worker in self.workers
        ]
        return msgspec.structs.replace(
            self,
            instances=tuple(instance for instance in self.instances if instance.name != name),
            workers=tuple(worker for worker in parts if worker.stages),
        )

    def devices(self, name: str, stage: int = 0) -> tuple[tuple[str, int], ...]:
        """(host, device id) of each device of a stage of instance ``name``, in mesh order."""
        return tuple(
            (worker.host, device)
            for worker in self.workers
            for hosted in worker.stages
            if hosted.instance == name and hosted.stage == stage
            for device in hosted.devices
        )

    def check(self, spec: ModelSpec | None = None) -> None:
        """Check everything that the types cannot say; with ``spec``, also against the model.

        Raises:
            InvalidPlan: with the JSON path and the bound.
        """
        _check_names("$.instances", [instance.name for instance in self.instances])
        _check_names("$.workers", [worker.name for worker in self.workers])
        self._check_roles()
        self._check_limits()
        self._check_shedding()
        self._check_devices()
        self._check_transport()
        self._check_spanning()
        if self.platform != "auto":
            attention_for(self.platform, self.attention)
        if spec is None:
            return
        if self.max_model_len > spec.context:
            raise InvalidPlan(
                "$.max_model_len", f"{self.max_model_len} is above the {spec.context} positions of the model"
            )
        for index, instance in enumerate(self.instances):
            spec.check_parallel(instance.tp, instance.pp, f"$.instances[{index}]")
            if not isinstance(instance, DecodeInstance) and instance.prefix_cache:
                spec.check_prefix_cache(self.max_model_len, f"$.instances[{index}].prefix_cache")

    def _check_roles(self) -> None:
        roles = {type(instance) for instance in self.instances}
        if (PrefillInstance in roles) != (DecodeInstance in roles):
            raise InvalidPlan("$.instances", "prefill and decode instances need each other: one role is missing")

    def _check_shedding(self) -> None:
        if not self.shed:
            return
        if self.slo is None:
            raise InvalidPlan("$.shed", "without an slo there is no wait to compare with")
        for index, instance in enumerate(self.instances):
            if isinstance(instance, ColocatedInstance):
                raise InvalidPlan("$.shed", f"{instance.name} is colocated; the wait is known of prefill instances")
            if isinstance(instance, PrefillInstance) and instance.steptime is None:
                raise InvalidPlan(f"$.instances[{index}].steptime", "shed needs the step times of prefill instances")

    def _check_limits(self) -> None:
        needed = pages_for(self.max_model_len, self.page_size)
        for index, instance in enumerate(self.instances):
            if instance.pages < needed:
                raise InvalidPlan(
                    f"$.instances[{index}].pages",
                    f"{instance.pages} pages of {self.page_size} tokens do not hold one request of max_model_len"
                    f" {self.max_model_len}: at least {needed} needed",
                )
            if isinstance(instance, DecodeInstance) and (instance.in_flight or 1) > instance.pp:
                raise InvalidPlan(
                    f"$.instances[{index}].in_flight",
                    f"{instance.in_flight} is above pp {instance.pp}: a stage runs one step at a time",
                )
            if isinstance(instance, ColocatedInstance) and instance.token_budget < instance.max_num_seqs:
                raise InvalidPlan(
                    f"$.instances[{index}].token_budget",
                    f"{instance.token_budget} is below max_num_seqs {instance.max_num_seqs}: a full batch could not"
                    " decode",
                )

    def _check_transport(self) -> None:
        several = len(self.workers) > 1
        if self.transport == "local" and several:
            raise InvalidPlan("$.transport", f"local needs one worker, there are {len(self.workers)}")
        hosts = {worker.host for worker in self.workers}
        if self.transport == "shm" and len(hosts) > 1:
            raise InvalidPlan("$.transport", f"shm needs all workers on one host, there are {', '.join(sorted(hosts))}")
        if self.transport == "shm" and self.platform in ("gpu", "tpu"):
            raise InvalidPlan("$.transport", f"shm moves the memory of CPU devices, the platform is {self.platform}")
        if self.transport == "device_put":
            roles = sorted(role_of(instance) for instance in self.instances)
            if roles != ["decode", "prefill"] or len(self.workers) != 2:
                raise InvalidPlan(
                    "$.transport", "device_put needs one prefill and one decode instance, in one worker each"
                )

    def _check_spanning(self) -> None:
        """What an instance that spans workers cannot do."""
        for index, instance in enumerate(self.instances):
            path, name = f"$.instances[{index}]", instance.name
            workers = self.workers_of(name)
            if len(workers) == 1:
                continue
            for worker in workers:
                if worker.instances != (name,):
                    other = next(one for one in worker.instances if one != name)
                    raise InvalidPlan(
                        f"$.workers[{self.workers.index(worker)}].stages",
                        f"{name} spans {len(workers)} workers, so {worker.name} must host nothing else; it hosts"
                        f" {other}",
                    )
            for stage in range(instance.pp):
                parts = [part for worker in workers for part in worker.stages if part.stage == stage]
                counts = sorted({len(part.devices) for part in parts})
                if len(counts) > 1:
                    raise InvalidPlan(
                        f"{path}.tp",
                        f"stage {stage} of {name} lies on workers with {counts[0]} and {counts[-1]} devices: give each"
                        " worker of a stage as many",
                    )
            if self.transport in ("shm", "device_put"):
                raise InvalidPlan(
                    "$.transport",
                    f"{name} spans {len(workers)} workers, which only pull can serve, not {self.transport}",
                )
            if self.transfer_checksums and isinstance(instance, PrefillInstance):
                raise InvalidPlan(
                    "$.transfer_checksums", f"{name} spans {len(workers)} workers, none of which sees all pieces of KV"
                )

    def _check_devices(self) -> None:
        names = {instance.name for instance in self.instances}
        taken: dict[tuple[str, int], str] = {}
        for w, worker in enumerate(self.workers):
            for s, hosted in enumerate(worker.stages):
                path = f"$.workers[{w}].stages[{s}]"
                if hosted.instance not in names:
                    raise InvalidPlan(f"{path}.instance", f"no instance is called {hosted.instance!r}")
                pp = self.instance(hosted.instance).pp
                if hosted.stage >= pp:
                    raise InvalidPlan(f"{path}.stage", f"{hosted.instance} has stages 0..{pp - 1}, got {hosted.stage}")
                for device in hosted.devices:
                    owner = taken.setdefault((worker.host, device), path)
                    if owner != path or Counter(hosted.devices)[device] > 1:
                        raise InvalidPlan(
                            f"{path}.devices", f"device {device} of {worker.host} is already taken by {owner}"
                        )
        for index, instance in enumerate(self.instances):
            for stage in range(instance.pp):
                have = len(self.devices(instance.name, stage))
                if have != instance.tp:
                    raise InvalidPlan(
                        f"$.instances[{index}].tp",
                        f"stage {stage} of {instance.name} needs {instance.tp} devices, the workers give it {have}",
                    )


def _check_names(path: str, names: Seq[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidPlan(f"{path}[{index}].name", f"{name!r} is used twice")
