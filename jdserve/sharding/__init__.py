"""How a model lies on a mesh, and what that costs."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    # They compile whole step programs, so they live on the roof: nothing below may name them here.
    if name in ("compare", "dryrun"):
        return getattr(import_module("jdserve.aot"), name)
    raise AttributeError(f"module 'jdserve.sharding' has no attribute {name!r}")
