"""How much memory a load takes on the host: from sharded safetensors, and from a converted checkpoint.

    python bench/loading.py [--quick] [--check]

A random LLaMA of 1.0 GB in bfloat16 (0.1 GB where it must be quick), cut into eight safetensors files, is loaded onto
four CPU devices of one process: by tensor parallelism 4, and by 2 with two pipeline stages. The peak is of resident
memory (VmHWM) over what was resident before; a small model was loaded first, so that what libraries take once is not in
it. From safetensors it must stay within what the devices hold + 1.3 x the largest file; a converted checkpoint has no
files to hold it against, and is shown beside. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
from conclusion import HOLDS, conclude, save, show_checks
from machine import describe, peak_memory, reset_peak_memory
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from jdserve.core.spec import ModelSpec
from jdserve.models.convert import Conversion, convert
from jdserve.models.skeleton import checkpoint_parameters

RESULTS = Path(__file__).parent / "results" / "loading.json"
DEVICES = 4
FILES = 8
SHARE = 1.3
"""Of the largest file, that the peak may be above what the devices hold."""
MEBI = 1 << 20

SMALL = ModelSpec("LlamaForCausalLM", 2, 64, 128, 8, 8, 8, 256, 128)
QUICK = ModelSpec("LlamaForCausalLM", 8, 512, 2048, 8, 8, 64, 16_384, 1024)
FULL = ModelSpec("LlamaForCausalLM", 8, 2048, 8192, 16, 16, 128, 32_768, 1024)


@dataclass(frozen=True)
class Found:
    """One load; bytes."""

    source: str
    dtype: str
    tp: int
    pp: int
    held: int
    peak: int
    largest_file: int
    seconds: float

    @property
    def name(self) -> str:
        """For tables and messages."""
        return f"{self.source} as {self.dtype}, tp {self.tp} pp {self.pp}"

    @property
    def above(self) -> float:
        """What the peak is above what the devices hold, in largest files."""
        return (self.peak - self.held) / self.largest_file


def write(folder: Path, spec: ModelSpec) -> None:
    """A random checkpoint in ``FILES`` files."""
    folder.mkdir()
    random = np.random.default_rng(0)
    names = [(one.name, one.shape) for one in checkpoint_parameters(spec)]
    sizes = np.cumsum([np.prod(shape) for _, shape in names])
    files: dict[str, str] = {}
    for number in range(FILES):
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        mine = [one for one, end in zip(names, sizes, strict=True) if (end - 1) * FILES // sizes[-1] == number]
        weights = {
            name: random.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) * ml_dtypes.bfloat16(0.02)
            for name, shape in mine
        }
        if weights:
            save_file(weights, folder / file)
        files |= dict.fromkeys(weights, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps(spec.config()))
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))


def load(folder: Path, dtype: str, tp: int, pp: int) -> int:
    """Load a model onto this process's devices; gives the bytes that they hold."""
    import jax

    from jdserve.models.load import load_params, resolve
    from jdserve.sharding.rules import ShardingRules, instance_mesh

    model = resolve(folder)
    spec, count = model.spec, model.spec.layers // pp
    held = 0
    kept = []
    for stage in range(pp):
        mesh = instance_mesh(jax.devices()[stage * tp : (stage + 1) * tp])
        layers, place = range(stage * count, (stage + 1) * count), partial(ShardingRules().sharding, mesh)
        _, leaves = load_params(model, layers, kv_heads=spec.stored_kv_heads(tp), dtype=dtype, place=place)
        kept.append(leaves)
        held += sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    return held


def resident() -> int:
    """Resident bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def child(small: Path, folder: Path, dtype: str, tp: int, pp: int) -> None:
    """Load in this process, and print what it took."""
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    load(small, dtype, tp, pp)
    before = resident()
    reset_peak_memory()
    started = time.perf_counter()
    held = load(folder, dtype, tp, pp)
    print(json.dumps({"held": held, "peak": peak_memory() - before, "seconds": time.perf_counter() - started}))


def measure(source: str, small: Path, folder: Path, largest: int, dtype: str, tp: int, pp: int) -> Found:
    """Load in a process of its own."""
    command = [sys.executable, __file__, "--child", str(small), str(folder), dtype, str(tp), str(pp)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return Found(source, dtype, tp, pp, largest_file=largest, **json.loads(done.stdout.splitlines()[-1]))


def show(found: Sequence[Found], console: Console) -> None:
    """Print the table."""
    table = Table(title=f"loading onto {DEVICES} CPU devices, MiB")
    for column in ("from", "as", "tp", "pp", "devices hold", "peak", "largest file", "above, in files", "s"):
        table.add_column(column, justify="right")
    for one in found:
        bytes = (f"{value / MEBI:.0f}" for value in (one.held, one.peak, one.largest_file))
        table.add_row(one.source, one.dtype, str(one.tp), str(one.pp), *bytes, f"{one.above:.2f}", f"{one.seconds:.1f}")
    console.print(table)


def run(spec: ModelSpec, work: Path) -> list[Found]:
    """All cases."""
    small, folder = work / "small", work / "model"
    write(small, SMALL)
    write(folder, spec)
    largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    converted = {}
    for source in (small, folder):
        target = work / f"{source.name}-converted"
        convert(Conversion(source, source.name, target=target))
        converted[source] = target
    cases = [(dtype, tp, pp) for dtype in ("bfloat16", "float32") for tp, pp in ((4, 1), (2, 2))]
    found = [measure("safetensors", small, folder, largest, *case) for case in cases]
    found += [measure("converted", converted[small], converted[folder], largest, *case) for case in cases]
    return found


def main() -> int:
    """Run the bench; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--check", action="store_true", help="exit 1 naming what does not hold")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        small, folder, dtype, tp, pp = args.child
        child(Path(small), Path(folder), dtype, int(tp), int(pp))
        return 0
    spec = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory() as work:
        found = run(spec, Path(work))
    console = Console(stderr=True)
    show(found, console)
    report = {
        "machine": describe(),
        "spec": msgspec.to_builtins(spec),
        "cases": [asdict(one) | {"above": one.above} for one in found],
        "checks": {
            one.name: HOLDS if one.above <= SHARE else f"{one.above:.2f} files above what devices hold, allowed {SHARE}"
            for one in found
            if one.source == "safetensors"
        },
    }
    show_checks(report["checks"], console)
    save(report, RESULTS, args.quick)
    return conclude(report, args.check)


if __name__ == "__main__":
    sys.exit(main())
