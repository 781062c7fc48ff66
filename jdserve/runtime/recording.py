"""Event logs of live machines, for ``jdserve replay``."""

from __future__ import annotations

from pathlib import Path

from jdserve.core.plan import Instance, Plan
from jdserve.policy.base import Machine
from jdserve.policy.build import RouterConfig
from jdserve.policy.record import Header, Recorder


def recorded(machine: Machine, config: Instance | RouterConfig, plan: Plan, folder: Path | None, name: str) -> Machine:
    """``machine``, behind a recorder that writes ``name.jsonl`` where a folder for logs is given."""
    if folder is None:
        return machine
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{name}.jsonl").open("w", buffering=1)
    return Recorder(machine, Header(config, plan.page_size), file, keep=False)
