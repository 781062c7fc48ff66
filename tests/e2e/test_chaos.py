"""One seed of ``bench/chaos.py``: workers are killed and stopped under load, and no stream may be wrong or lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "chaos.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_seed_of_chaos(environment: dict[str, str]) -> None:
    paths = os.pathsep.join([str(BENCH.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(BENCH), "--quick", "--check", "--first-seed", "3"]
    done = subprocess.run(
        command, env=os.environ | environment | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (seed,) = json.loads(done.stdout.splitlines()[-1])["seeds"]
    assert seed["ends"]["right"] > 100
    assert seed["restarts"] >= 1
    assert seed["leaked"] == 0
