"""Gate: the step programs of large models, compiled for GPUs and TPUs that are not here, are what they should be.

    python bench/aot_gate.py [--quick] [--check]

A batch of 64 sequences at a context of 8k tokens. Llama-3-70B: two layers in the middle of a pipeline, for 8 x H100 and
a v5e 2x4. Llama-3-8B: the whole decode step for one H100 and 4 x A100, and two layers for a v6e 2x2. Each program must

- have two all-reduces per layer, and no other collective in its layers (none at all on one device),
- leave the KV pool where it is, and copy none of it; a decode step copies no activations over 1 MiB either,
- spill no registers (CUDA), and
- need at most 16 MiB of temporaries where it is decode layers alone.

Attention is what the platform selects. Nothing runs, so nothing here is a speed. ``--quick`` has two layers in place of
the whole of Llama-3-8B, and leaves out A100 and v6e. A target whose compiler is not installed is skipped by name.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from machine import describe
from rich.console import Console

from jdserve.aot import dryrun
from jdserve.aot.report import Program
from jdserve.aot.targets import MissingExtra
from jdserve.core.plan import DecodeInstance, HostedStage, Plan, PrefillInstance, Worker
from jdserve.core.spec import ModelSpec
from jdserve.cost.models import model

RESULTS = Path(__file__).parent / "results" / "aot_gate.json"

BATCH, CONTEXT, PAGE = 64, 8192, 64
MOST_TEMPORARIES = 16 << 20

STEP_TEMPORARIES = 64 << 10
"""Room for rows, positions and block tables of the step, which are no layer's."""

STAGES = 3
"""Of a pipeline that has a stage with layers and nothing else."""


@dataclass(frozen=True)
class Case:
    """Programs of one model on one target; ``layers`` alone where there are some, else the whole model."""

    target: str
    model: str
    devices: int
    programs: tuple[str, ...]
    layers: int | None = None
    quick: bool = True

    def report(self, quick: bool) -> list[Program]:
        """Compile them."""
        spec = model(self.model)
        if self.layers is not None:
            spec = msgspec.structs.replace(spec, layers=STAGES * self.layers)
        elif quick:
            spec = msgspec.structs.replace(spec, layers=2)
        plan = plan_of(spec, self)
        stage = 0 if self.layers is None else 1
        stages = [(name[0], stage) for name in self.programs]
        return list(dryrun(plan, self.target, spec=spec, buckets=self.programs, stages=stages).programs)


CASES = (
    Case("h100", "llama-3-70b", 8, ("decode-64", "prefill-512x16"), layers=2),
    Case("h100", "llama-3-8b", 1, ("decode-64",)),
    Case("a100", "llama-3-8b", 4, ("decode-64",), quick=False),
    Case("v5e", "llama-3-70b", 8, ("decode-64", "prefill-512x16"), layers=2),
    Case("v6e", "llama-3-8b", 4, ("decode-64", "prefill-512x16"), layers=2, quick=False),
)


def plan_of(spec: ModelSpec, case: Case) -> Plan:
    """One prefill and one decode instance, ``p`` and ``d``."""
    pp = 1 if case.layers is None else STAGES
    shape: dict[str, Any] = {"tp": case.devices, "pp": pp, "pages": BATCH * CONTEXT // PAGE}
    instances = (
        PrefillInstance(name="p", lm_tokens=512, **shape),
        DecodeInstance(name="d", max_num_seqs=BATCH * pp, **shape),
    )
    hosted = []
    for instance in instances:
        for stage in range(pp):
            first = len(hosted) * case.devices
            hosted.append(HostedStage(instance.name, tuple(range(first, first + case.devices)), stage))
    return Plan(
        model=case.model,
        dtype="bfloat16",
        page_size=PAGE,
        max_model_len=min(CONTEXT, spec.context),
        instances=instances,
        workers=(Worker("w", tuple(hosted)),),
    )


def failures(case: Case, program: Program) -> list[str]:
    """What does not hold of one program."""
    found = []
    wanted = {"all-reduce": 2 * program.layers} if case.devices > 1 else {}
    have: dict[str, int] = {}
    for one in program.collectives:
        if one.part == "layers":
            kind = one.kind if one.where == "always" else f"{one.kind} in a {one.where} ({one.shape})"
            have[kind] = have.get(kind, 0) + one.count
    if have != wanted:
        found.append(f"collectives in its layers: {have or 'none'}, not {wanted or 'none'}")
    if not program.pool_aliased:
        found.append("the pool is not aliased")
    decode = program.name.startswith("decode")
    # What sampling does at times (logits of a batch, sorted) is no activation of a layer.
    copied = [one for one in program.copies if one.pool or (decode and one.part in ("layers", "embed"))]
    if copied:
        found.append("copies " + ", ".join(f"{one.count} x {one.shape}" for one in copied))
    if program.spills:
        found.append("spills registers in " + ", ".join(kernel.name for kernel in program.spills))
    temporaries = program.memory.temporaries
    if decode and case.layers is not None and temporaries > MOST_TEMPORARIES + STEP_TEMPORARIES:
        found.append(f"temporaries of {temporaries / 2**20:.1f} MiB, at most {MOST_TEMPORARIES >> 20}")
    return found


def main() -> int:
    """Compile, check, and tell; the last line is the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small programs")
    parser.add_argument("--check", action="store_true", help="exit with 1 where something does not hold")
    args = parser.parse_args()
    console, started = Console(stderr=True, width=160), time.perf_counter()
    programs, failed, skipped = [], [], []
    for case in CASES:
        if args.quick and not case.quick:
            continue
        title = f"{case.model} on {case.devices} x {case.target}"
        try:
            compiled = case.report(args.quick)
        except MissingExtra as error:
            skipped.append(f"{title}: skipped: missing {str(error).partition(' needs ')[2]}")
            console.print(skipped[-1], highlight=False, markup=False)
            continue
        for program in compiled:
            name = f"{title}, {program.name}, {program.layers} layers"
            wrong = failures(case, program)
            failed += [f"{name}: {one}" for one in wrong]
            console.print(
                f"{name}: {'; '.join(wrong) or 'holds'} ({program.seconds:.0f} s)", highlight=False, markup=False
            )
            programs.append({"name": name, "failures": wrong, **figures(program)})
    seconds = time.perf_counter() - started
    result = {**describe(), "seconds": round(seconds, 1), "programs": programs, "failures": failed, "skipped": skipped}
    if not args.quick and not skipped:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(args.check and bool(failed))


def figures(program: Program) -> dict[str, Any]:
    """What is kept of a program."""
    return {
        "temporaries": program.memory.temporaries,
        "arguments": program.memory.arguments,
        "wire_bytes": program.wire_bytes,
        "registers": max((kernel.registers for kernel in program.kernels or ()), default=None),
        "seconds": round(program.seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
