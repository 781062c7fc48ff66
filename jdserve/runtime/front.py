"""An engine whose instances live in workers, and how an operator finds it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from jdserve.core.backends import attention_for
from jdserve.core.errors import InvalidPlan, JdserveError
from jdserve.core.plan import Plan
from jdserve.core.spec import ModelSpec
from jdserve.policy.build import RouterConfig, router_of
from jdserve.runtime import wire
from jdserve.runtime.cluster import WorkerFleet
from jdserve.runtime.engine import Engine
from jdserve.runtime.hosts import check_machine, is_here, platform_here
from jdserve.runtime.outputs import Report
from jdserve.runtime.progress import Progress
from jdserve.runtime.recording import recorded
from jdserve.runtime.remote import ClusterOptions


def settled(plan: Plan, options: ClusterOptions) -> Plan:
    """The plan with its platform settled, after a check of its hosts and of the cores of this one.

    Raises:
        InvalidPlan: a host or a core is not there, the platform cannot run the plan's attention, or workers of another
            host could not join.
    """
    if plan.platform == "auto":
        plan = msgspec.structs.replace(plan, platform=platform_here())
    attention_for(plan.platform, plan.attention)
    check_machine(plan, oversubscribe=options.oversubscribe)
    for index, worker in enumerate(plan.workers):
        if not is_here(worker.host) and options.host.startswith("127."):
            raise InvalidPlan(
                f"$.workers[{index}].host",
                f"{worker.host} is not this machine: say with --control ADDRESS:PORT and --secret-file where its"
                " worker can join",
            )
    return plan


def make_worker_engine(
    plan: Plan,
    spec: ModelSpec,
    options: ClusterOptions,
    progress: Progress,
    meeting_point: Path | None = None,
) -> Engine:
    """An engine over workers, not started yet.

    Args:
        plan: to serve, :func:`settled`.
        spec: of its model.
        options: of the workers.
        progress: of the start.
        meeting_point: file that tells operators of this machine how to reach the engine; gone when it is closed.

    Raises:
        InvalidPlan: the plan does not fit the model.
    """
    plan.check(spec)

    def operate(message: wire.FromOperator, answer: Callable[[wire.ToOperator], None]) -> None:
        asyncio.run_coroutine_threadsafe(_operate(engine, message, answer), engine.loop)

    def connect(report: Callable[[Report], None]) -> WorkerFleet:
        fleet = WorkerFleet(plan, spec, options, report, progress, operate, meeting_point)
        fleet.start()
        return fleet

    config = RouterConfig.of(plan, options.patience_s)
    record = Path(options.record) if options.record is not None else None
    engine = Engine(plan, spec, recorded(router_of(config), config, plan, record, "router"), connect, progress)
    return engine


async def _operate(engine: Engine, message: wire.FromOperator, answer: Callable[[wire.ToOperator], None]) -> None:
    try:
        match message:
            case wire.Drain(instance):
                await engine.drain_instance(instance)
            case wire.Add(instance, worker):
                await engine.add_instance(instance, worker)
    except JdserveError as error:
        answer(wire.Refused(str(error)))
    except Exception as error:
        answer(wire.Refused(f"{type(error).__name__}: {error}"))
        raise
    else:
        answer(wire.Done())
