"""Engines whose instances are real worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from jdserve.core.plan import DecodeInstance, HostedStage, Plan, PrefillInstance, Worker
from jdserve.core.request import Request
from jdserve.models.checkpoint import LoadedModel
from jdserve.runtime.channel import new_secret
from jdserve.runtime.engine import Engine
from jdserve.runtime.front import make_worker_engine, settled
from jdserve.runtime.progress import Progress
from jdserve.runtime.remote import ClusterOptions
from runtime.harness import Answer, answer, prompt, request, until
from runtime.harness import settled as all_idle

HEARTBEAT_S = 3.0

PATIENCE_S = 150.0
"""Requests may wait for the slowest restart on a busy machine."""


def plan_of(model: LoadedModel, *instances: PrefillInstance | DecodeInstance, **changes: Any) -> Plan:
    """A plan with a worker per instance, each with the next free devices; checksums are on."""
    workers, device = [], 0
    for instance in instances:
        stages = []
        for stage in range(instance.pp):
            stages.append(HostedStage(instance.name, tuple(range(device, device + instance.tp)), stage))
            device += instance.tp
        workers.append(Worker(instance.name, tuple(stages)))
    fields = {"max_model_len": 128, "transfer_checksums": True, **changes}
    return Plan(model=str(model.folder), instances=instances, workers=tuple(workers), **fields)


def engine_for(model: LoadedModel, plan: Plan, record: Path | None = None, **options: Any) -> Engine:
    """An engine over workers that share this machine's cores."""
    fields = {
        "oversubscribe": True,
        "heartbeat_timeout_s": HEARTBEAT_S,
        "patience_s": PATIENCE_S,
        "secret": new_secret(),
        **options,
    }
    cluster = ClusterOptions(record=str(record) if record else None, **fields)
    return make_worker_engine(settled(plan, cluster), model.spec, cluster, Progress())


def run(engine: Engine, body: Callable) -> Any:
    """Start ``engine``, run the coroutine function ``body`` with it, check its pages, close it; no process stays."""

    async def whole() -> object:
        await engine.start()
        family = workers()
        try:
            result = await body(engine)
            await all_idle(engine)
            assert engine.stats().recompilations == 0
            return result
        finally:
            family |= workers()
            await engine.close()
            assert not [pid for pid in family.values() if psutil.pid_exists(pid) and _runs(pid)]

    return asyncio.run(whole())


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def workers() -> dict[str, int]:
    """Pid of each worker process of this one, by name."""
    found: dict[str, int] = {}
    for child in psutil.Process().children():
        try:
            line = child.cmdline()
        except psutil.Error:
            continue  # it has just ended
        if "jdserve.worker" in line:
            found[line[line.index("--name") + 1]] = child.pid
    return found


def hit(name: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Signal a worker; gives the pid that it had."""
    pid = workers()[name]
    os.kill(pid, number)
    return pid


async def back(engine: Engine, name: str, old: int) -> None:
    """Wait until worker ``name`` runs in another process and its instance takes work."""
    await until(lambda: workers().get(name, old) != old, f"{name} runs again", 120)
    await until(lambda: name not in engine.stats().dead, f"{name} takes work again", 240)


def replaced(plan: Plan, name: str, **changes: Any) -> Plan:
    """The plan with other fields for instance ``name``."""
    instances = tuple(msgspec.structs.replace(i, **changes) if i.name == name else i for i in plan.instances)
    return msgspec.structs.replace(plan, instances=instances)


def long_ones() -> list[Request]:
    """Requests that are still being decoded when something happens to them."""
    return [request(f"long{i}", prompt(9 + 4 * i, i), max_tokens=100) for i in range(4)]


async def ask(engine: Engine, asked: list[Request]) -> list[Answer]:
    return list(await asyncio.gather(*(answer(engine, r) for r in asked)))
