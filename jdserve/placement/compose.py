"""From units to a complete plan."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Literal, NamedTuple

import msgspec

from jdserve.core.pages import pages_for
from jdserve.core.plan import DecodeInstance, HostedStage, Instance, Plan, PrefillInstance, Worker
from jdserve.cost.network import Network
from jdserve.cost.stepcost import NOTHING, Linear, StepCost
from jdserve.placement.candidates import Part, Unit
from jdserve.placement.job import Job
from jdserve.placement.layout import Group, lay_out
from jdserve.placement.sizing import Sized, Sizer
from jdserve.sim.links import Wired

LETTER = {"prefill": "p", "decode": "d", "colocated": "c"}

OPEN_REQUESTS = 1 << 20
"""The front door refuses nobody: what is too much shows as attainment."""


class Composed(NamedTuple):
    """A plan and what its simulation needs.

    Attributes:
        plan: complete but for the prediction.
        costs: of each instance.
        network: routes of its KV.
    """

    plan: Plan
    costs: Mapping[str, StepCost]
    network: Wired | None

    @property
    def devices(self) -> int:
        """Devices in all."""
        return sum(instance.tp * instance.pp for instance in self.plan.instances)


def compose(job: Job, sizer: Sizer, units: Seq[Unit], reach: Literal["any", "host"]) -> Composed:
    """The plan of ``units`` on the cluster.

    Raises:
        NoRoom: they do not fit on the nodes.
    """
    counts: dict[str, int] = {}
    costs: dict[str, StepCost] = {}
    groups: list[Group] = []
    for unit in units:
        members: list[Instance] = []
        for part in unit.parts:
            sized = sizer.size(part)
            assert isinstance(sized, Sized), sized
            for _ in range(part.count):
                letter = LETTER[part.role]
                name = f"{letter}{counts.get(letter, 0)}"
                counts[letter] = counts.get(letter, 0) + 1
                costs[name] = sized.cost
                members.append(msgspec.structs.replace(sized.instance, name=name))
        groups.append(Group(tuple(members), 0 if unit.family in ("high", "colocated") else unit.span))
    plan = _plan(job, tuple(i for group in groups for i in group.instances), lay_out(job.cluster, groups), reach)
    network = Network(job.cluster.device, job.link_share)
    return Composed(plan, costs, Wired(plan, network, job.spec.kv_bytes_per_token(job.dtype)))


def alone_plan(job: Job, sizer: Sizer, part: Part) -> Composed:
    """One phase by itself: the instances of ``part``, and an ideal partner that takes no time."""
    sized = sizer.size(part)
    assert isinstance(sized, Sized), sized
    names = [f"{LETTER[part.role]}{n}" for n in range(part.count)]
    instances: list[Instance] = [msgspec.structs.replace(sized.instance, name=name) for name in names]
    pages = 4 * sum(
        pages_for(int(i + o), job.page_size) for i, o in zip(job.sample.inputs, job.sample.outputs, strict=True)
    )
    endless = 1 << 40
    if part.role == "prefill":
        partner: Instance = DecodeInstance(name="partner", pages=pages, max_num_seqs=endless)
    else:
        partner = PrefillInstance(
            name="partner",
            pages=pages,
            batching="kv_capacity",
            lm_tokens=1,
            max_batch=endless,
            lease_s=1e9,
            prefix_cache=False,
        )
    costs: dict[str, StepCost] = dict.fromkeys(names, sized.cost) | {"partner": Linear(NOTHING)}
    instances.append(partner)
    workers = tuple(
        Worker(
            instance.name,
            tuple(
                HostedStage(instance.name, tuple(range(stage * instance.tp, (stage + 1) * instance.tp)), stage)
                for stage in range(instance.pp)
            ),
            f"host-{instance.name}",
        )
        for instance in instances
    )
    return Composed(_plan(job, tuple(instances), workers, "any"), costs, None)


def label(composed: Composed) -> str:
    """The instances of a plan, for people."""
    kinds: dict[str, int] = {}
    for instance in composed.plan.instances:
        role = {"p": "prefill", "d": "decode", "c": "colocated"}[instance.name[0]]
        how = f" {mode}" if (mode := getattr(instance, "mode", "")) else ""
        key = f"{role}{how} tp{instance.tp} pp{instance.pp}"
        kinds[key] = kinds.get(key, 0) + 1
    return " + ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _plan(
    job: Job, instances: tuple[Instance, ...], workers: tuple[Worker, ...], reach: Literal["any", "host"]
) -> Plan:
    return Plan(
        model=job.model,
        dtype=job.dtype,
        weights=job.weights,
        page_size=job.page_size,
        max_model_len=job.max_model_len,
        slo=job.slo,
        platform=job.cluster.device.platform,
        max_open_requests=OPEN_REQUESTS,
        reach=reach,
        instances=instances,
        workers=workers,
    )
