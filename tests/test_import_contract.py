"""The architecture, enforced: imports go down only, towers never meet above ``policy/``, laptops load no jax."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jdserve"

DEVICE = {"ops": 2, "sharding": 2, "models": 3, "transfer": 3, "runtime": 4, "server": 5}
MODEL = {"cost": 2, "sim": 3, "placement": 4}
SHARED = {"core": 0, "policy": 1}
ROOF = {"__init__", "aot", "cli", "llm", "worker"}
LEAF = {"compat"}
"""Knows jax and nothing of ours; for the device tower only."""

NO_JAX = {"jax", "jaxlib", "flax", "orbax"}
PURE = NO_JAX | {"numpy", "threading", "time", "socket", "random", "asyncio"}


def parts(package: Path) -> Iterator[tuple[str, Path, str]]:
    """(package or module on the first level, file, imported module) of every import in the tree."""
    for file in sorted(package.rglob("*.py")):
        relative = file.relative_to(package)
        home = relative.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((home, relative, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{relative}: relative import"
                module = node.module or ""
                names = [f"{module}.{alias.name}" for alias in node.names] if module == "jdserve" else [module]
                yield from ((home, relative, name) for name in names)


def allowed(home: str, target: str) -> bool:
    """Whether code in ``home`` may import from ``target``, both on the first level below ``jdserve``."""
    if home in ROOF or home == target:
        return True
    if home == "loadgen":
        return target == "core"
    if target in LEAF:
        return home in DEVICE
    for tower in (DEVICE, MODEL):
        floors = SHARED | tower
        if home in floors and target in floors:
            return floors[target] < floors[home]
    return False


def violations(package: Path) -> list[str]:
    found = []
    for home, file, module in parts(package):
        path = module.split(".")
        if path[0] == "jdserve" and not allowed(home, path[1] if len(path) > 1 else "__init__"):
            found.append(f"{file} imports {module}")
        banned = PURE if home in SHARED else NO_JAX if home in MODEL or home == "loadgen" else set()
        if path[0] in banned:
            found.append(f"{file} imports {module}")
    return found


def test_imports_follow_the_house() -> None:
    assert violations(PACKAGE) == []


def test_every_package_has_a_floor() -> None:
    homes = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    known = set(DEVICE) | set(MODEL) | set(SHARED) | ROOF | LEAF | {"loadgen"}
    assert homes - {"__pycache__"} <= known


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("core/a.py", "from jdserve.policy.router import Router"),
        ("policy/a.py", "import time"),
        ("policy/a.py", "from jdserve.ops import attention"),
        ("ops/a.py", "from jdserve.sharding.rules import ShardingRules"),
        ("models/a.py", "import jdserve.transfer.local"),
        ("runtime/a.py", "def f():\n    from jdserve.server import app"),
        ("sim/a.py", "from jdserve.runtime import engine"),
        ("sim/a.py", "import jax.numpy as jnp"),
        ("runtime/a.py", "from jdserve.sim import loop"),
        ("cost/a.py", "from jdserve import compat"),
        ("loadgen/a.py", "from jdserve.server import app"),
        ("core/a.py", "import numpy as np"),
        ("runtime/a.py", "import jdserve"),
        ("sharding/a.py", "from jdserve.aot import dryrun"),
        ("server/a.py", "from jdserve import LLM"),
        ("compat.py", "from jdserve.core import errors"),
    ],
)
def test_a_planted_arrow_is_found(file: str, line: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(line)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("jdserve", NO_JAX | {"numpy"}),
        ("jdserve.core.plan", NO_JAX | {"numpy"}),
        ("jdserve.core.profile", NO_JAX | {"numpy"}),
        ("jdserve.policy.build", NO_JAX | {"numpy"}),
        ("jdserve.cli", NO_JAX | {"numpy"}),
        ("jdserve.aot.command", NO_JAX),
        ("jdserve.loadgen.bench", NO_JAX),
        ("jdserve.placement.commands.plan", NO_JAX),
        ("jdserve.placement.commands.replan", NO_JAX),
    ],
)
def test_a_laptop_loads_no_jax(module: str, banned: set[str]) -> None:
    script = f"import sys, {module}; print(sorted({banned!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
