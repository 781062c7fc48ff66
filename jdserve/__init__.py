"""jdserve: goodput-optimal, disaggregated serving of large language models on JAX.

Importing the package loads no jax: plans, schedulers and load generation run on a laptop. What needs devices is loaded
when it is first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jdserve.core.version import VERSION

if TYPE_CHECKING:
    from jdserve.aot import compare, dryrun
    from jdserve.core.plan import Plan
    from jdserve.core.profile import Profile
    from jdserve.core.request import SLO, SamplingParams
    from jdserve.core.spec import ModelSpec
    from jdserve.cost.cluster import Cluster
    from jdserve.llm import LLM, Completion
    from jdserve.placement import SearchResult, search
    from jdserve.sim.goodput import goodput
    from jdserve.sim.simulate import simulate
    from jdserve.sim.workload import Source, Workload

__version__ = VERSION

_HOMES = {
    "LLM": "jdserve.llm",
    "Cluster": "jdserve.cost.cluster",
    "Completion": "jdserve.llm",
    "ModelSpec": "jdserve.core.spec",
    "Plan": "jdserve.core.plan",
    "Profile": "jdserve.core.profile",
    "SLO": "jdserve.core.request",
    "SamplingParams": "jdserve.core.request",
    "SearchResult": "jdserve.placement",
    "Source": "jdserve.sim.workload",
    "Workload": "jdserve.sim.workload",
    "compare": "jdserve.aot",
    "dryrun": "jdserve.aot",
    "goodput": "jdserve.sim.goodput",
    "search": "jdserve.placement",
    "simulate": "jdserve.sim.simulate",
}

__all__ = [
    "LLM",
    "SLO",
    "Cluster",
    "Completion",
    "ModelSpec",
    "Plan",
    "Profile",
    "SamplingParams",
    "SearchResult",
    "Source",
    "Workload",
    "__version__",
    "compare",
    "dryrun",
    "goodput",
    "search",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jdserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
