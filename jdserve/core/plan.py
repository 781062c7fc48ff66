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
from jdserve.core.errors import InvalidPlan
from jdserve.core.pages import pages_for
from jdserve.core.request import SLO
from jdserve.core.spec import DType, ModelSpec
from jdserve.core.steptime import StepTime

PLAN_VERSION = 1

Positive = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]


class _Instance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="role"):
    """What instances of every role have.

    Attributes:
        name: unique in the plan.
        tp, pp: tensor- and pipeline-parallel degree; the instance has tp * pp devices.
        pages: KV pages in the pool of the instance.
        steptime: fitted coefficients, None where nothing was measured.
    """

    name: Name
    tp: Positive = 1
    pp: Positive = 1
    pages: Positive
    steptime: StepTime | None = None


class PrefillInstance(_Instance, frozen=True, kw_only=True, tag="prefill"):
    """An instance that computes prompts and parks their KV until it is pulled.

    Attributes:
        batching: ``"lm"`` fills a batch up to ``lm_tokens`` new tokens and runs longer prompts alone (DistServe,
            section 4.1); ``"kv_capacity"`` takes everything queued that the page pool holds.
        lm_tokens: L_m, the new tokens that saturate the devices.
        max_batch: most sequences in one step.
        prefix_cache: keep the KV of finished prompts and share it with prompts that start the same way.
        lease_s: seconds that parked KV waits for its pull before it is dropped.
    """

    batching: Literal["lm", "kv_capacity"] = "lm"
    lm_tokens: Positive
    max_batch: Positive = 16
    prefix_cache: bool = True
    lease_s: Annotated[float, Meta(gt=0)] = 300.0


class DecodeInstance(_Instance, frozen=True, kw_only=True, tag="decode"):
    """An instance that pulls KV and generates.

    Attributes:
        max_num_seqs: largest batch.
        watermark: share of the pages that stays free when another sequence is admitted, so that those that run can
            grow before one must be preempted.
    """

    max_num_seqs: Positive
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01


class ColocatedInstance(_Instance, frozen=True, kw_only=True, tag="colocated"):
    """An instance that does both phases: the baseline, and the answer when disaggregation does not pay.

    Attributes:
        mode: ``"prefill_first"`` runs waiting prompts before the next decode step; ``"chunked"`` fills what the
            decoding sequences leave of ``token_budget`` with chunks of prompts, in one mixed step.
        token_budget: most new tokens of one step.
        max_num_seqs: most sequences at a time.
        watermark, prefix_cache: as in the other roles.
    """

    mode: Literal["prefill_first", "chunked"] = "prefill_first"
    token_budget: Positive
    max_num_seqs: Positive
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    prefix_cache: bool = True


Instance = PrefillInstance | DecodeInstance | ColocatedInstance

Role = Literal["prefill", "decode", "colocated"]


def role_of(instance: Instance) -> Role:
    """The role that an instance plays, as the plan spells it."""
    match instance:
        case PrefillInstance():
            return "prefill"
        case DecodeInstance():
            return "decode"
        case ColocatedInstance():
            return "colocated"


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
        host: name or address of the machine.
    """

    name: Name
    stages: Annotated[tuple[HostedStage, ...], Meta(min_length=1)]
    host: str = "localhost"


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A placement, complete.

    Attributes:
        version: of this format.
        model: ``smollm2-135m-instruct`` (built in), or the path of a checkpoint.
        dtype: of weights, activations and KV.
        page_size: token positions per page, the same on every instance.
        max_model_len: most tokens (prompt and output) of one request.
        slo: latency objective the plan was made for.
        transport: how KV moves between instances; ``local`` needs them in one process.
        instances, workers: who serves, and where.
    """

    version: Literal[1] = PLAN_VERSION
    model: str
    dtype: DType = "float32"
    page_size: Positive = 16
    max_model_len: Positive
    slo: SLO | None = None
    transport: Literal["local"] = "local"
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
        self._check_pages()
        self._check_devices()
        if spec is None:
            return
        if self.max_model_len > spec.context:
            raise InvalidPlan(
                "$.max_model_len", f"{self.max_model_len} is above the {spec.context} positions of the model"
            )
        for index, instance in enumerate(self.instances):
            spec.check_parallel(instance.tp, instance.pp, f"$.instances[{index}]")

    def _check_roles(self) -> None:
        roles = {type(instance) for instance in self.instances}
        if (PrefillInstance in roles) != (DecodeInstance in roles):
            raise InvalidPlan("$.instances", "prefill and decode instances need each other: one role is missing")

    def _check_pages(self) -> None:
        needed = pages_for(self.max_model_len, self.page_size)
        for index, instance in enumerate(self.instances):
            if instance.pages < needed:
                raise InvalidPlan(
                    f"$.instances[{index}].pages",
                    f"{instance.pages} pages of {self.page_size} tokens do not hold one request of max_model_len"
                    f" {self.max_model_len}: at least {needed} needed",
                )
            if isinstance(instance, ColocatedInstance) and instance.token_budget < instance.max_num_seqs:
                raise InvalidPlan(
                    f"$.instances[{index}].token_budget",
                    f"{instance.token_budget} is below max_num_seqs {instance.max_num_seqs}: a full batch could not"
                    " decode",
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
