"""jdserve: goodput-optimal, disaggregated serving of large language models on JAX.

Importing the package loads no jax: plans, schedulers and load generation run on a laptop. What needs devices is loaded
when it is first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jdserve.core.version import VERSION

if TYPE_CHECKING:
    from jdserve.core.plan import Plan
    from jdserve.core.profile import Profile
    from jdserve.core.request import SLO, SamplingParams
    from jdserve.core.spec import ModelSpec
    from jdserve.llm import LLM, Completion

__version__ = VERSION

_HOMES = {
    "LLM": "jdserve.llm",
    "Completion": "jdserve.llm",
    "ModelSpec": "jdserve.core.spec",
    "Plan": "jdserve.core.plan",
    "Profile": "jdserve.core.profile",
    "SLO": "jdserve.core.request",
    "SamplingParams": "jdserve.core.request",
}

__all__ = ["LLM", "SLO", "Completion", "ModelSpec", "Plan", "Profile", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jdserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
