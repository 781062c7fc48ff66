"""``simulate``: a plan under a workload, on a virtual clock.

Nothing is decided here. Requests go through the very machines that the server runs: a router, and one scheduler per
instance. This module only says when a command is done: a step after the time that its cost gives, each pipeline stage
being a resource of its own; a pull when its links have moved the KV. See :mod:`jdserve.sim.loop`.
"""

from __future__ import annotations

from collections.abc import Mapping

from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import Plan
from jdserve.cost.stepcost import Linear, StepCost
from jdserve.sim.links import Instant, Network
from jdserve.sim.loop import Loop, Verdict
from jdserve.sim.result import SimResult
from jdserve.sim.workload import Workload


def simulate(
    plan: Plan,
    workload: Workload,
    *,
    costs: Mapping[str, StepCost] | None = None,
    network: Network | None = None,
    verdict: Verdict | None = None,
    jump: bool = True,
) -> SimResult:
    """Run ``workload`` through the instances of ``plan``.

    Args:
        plan: checked here; failures of workers and stop tokens are not simulated.
        workload: the requests.
        costs: time of the steps of each instance, by name; by default from the coefficients in the plan.
        network: routes of the KV from prefill to decode instances; by default it moves in no time.
        verdict: stop as soon as it is certain whether enough requests meet an SLO.
        jump: skip decode steps in which nothing can be decided, in closed form; the result is the same without.

    Raises:
        InvalidPlan: the plan is refused, or gives no step times for an instance that ``costs`` leaves out.
    """
    plan.check()
    return Loop(plan, workload, step_costs(plan, costs), network or Instant(), verdict, jump).run()


def step_costs(plan: Plan, costs: Mapping[str, StepCost] | None = None) -> dict[str, StepCost]:
    """Step times of every instance of ``plan``: from ``costs``, else from its coefficients.

    Raises:
        InvalidPlan: an instance has neither, or a cost is for another number of stages.
    """
    found: dict[str, StepCost] = {}
    for index, instance in enumerate(plan.instances):
        path = f"$.instances[{index}]"
        cost = None if costs is None else costs.get(instance.name)
        if cost is None:
            if instance.steptime is None:
                raise InvalidPlan(f"{path}.steptime", f"{instance.name} has no step times, so it cannot be simulated")
            cost = Linear.of(instance.steptime, instance.pp)
        if cost.pp != instance.pp:
            raise InvalidPlan(f"{path}.pp", f"the cost of {instance.name} is for pp {cost.pp}, not {instance.pp}")
        found[instance.name] = cost
    return found
