"""``dryrun``: what the programs of a plan cost on a target, told without weights and without the target."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jdserve.aot.extending import extended
from jdserve.aot.job import Answer, Job, program_names
from jdserve.aot.ptxas import toolkit
from jdserve.aot.report import Program, Report, fits_of
from jdserve.aot.targets import Target, check_extra, cuda_root, target_of
from jdserve.core.errors import InvalidPlan, JdserveError
from jdserve.core.plan import Plan
from jdserve.core.spec import ModelSpec
from jdserve.cost.memory import USABLE
from jdserve.cost.models import model as known_model

if TYPE_CHECKING:
    from jdserve.sharding.presets import PhaseRules
    from jdserve.sharding.rules import ShardingRules


class CompilerFailed(JdserveError):
    """The process that compiles ended without an answer; the message has its last words."""


def dryrun(
    plan: Plan | str | Path,
    target: str,
    *,
    spec: ModelSpec | None = None,
    rules: str | ShardingRules | PhaseRules = "tensor",
    buckets: Seq[str] = (),
    extrapolate: bool = False,
    stages: Seq[tuple[str, int]] | None = None,
    hlo: str | Path | None = None,
    progress: Callable[[Program], None] = lambda program: None,
) -> Report:
    """Compile the step and hand-off programs of a plan for ``target``, ahead of time, from shapes alone.

    Args:
        plan: or the path of one.
        target: a name of :data:`~jdserve.aot.targets.TARGETS`.
        spec: of the model; by default that of the plan's model, a known name or the folder of a checkpoint.
        rules: how the model lies on the devices, as :func:`~jdserve.sharding.presets.phase_rules` takes it.
        buckets: names of programs, with ``*`` and ``?`` as in file names; none for all.
        extrapolate: compile stages of one and of two layers in place of whole ones, and extend what they cost.
        stages: (instance, stage) to compile; None for each that differs from those before it.
        hlo: folder that gets the optimized HLO of each program.
        progress: told of each program that was compiled.

    Raises:
        InvalidPlan: the plan, the model, the target, the rules or a bucket is refused.
        MissingExtra: the compiler of the target is not installed; says how to install it.
        CompilerFailed: the compiler gave up.
    """
    kind = target_of(target)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    spec = spec or known_model(plan.model)
    plan.check(spec)
    if extrapolate and spec.window is not None:
        raise InvalidPlan("$.extrapolate", f"the layers of {plan.model} differ: some have a window")
    check_extra(kind)
    names = _named(plan, buckets)
    if hlo is not None:
        Path(hlo).mkdir(parents=True, exist_ok=True)
    job = Job(
        plan=plan,
        spec=spec,
        target=target,
        rules=rules if isinstance(rules, str) else _plain(rules),
        names=names,
        stages=tuple(_distinct(plan, spec) if stages is None else stages),
        layers=(1, 2) if extrapolate else (None,),
        hlo=None if hlo is None else str(Path(hlo).resolve()),
    )
    first, programs = Answer(), []
    for answer in _compiled(job, kind):
        if answer.program is None:
            first = answer
            continue
        programs.append(answer.program)
        progress(answer.program)
    if extrapolate:
        programs = extended(programs, {one.name: spec.layers // one.pp for one in plan.instances})
    return Report(
        target=target,
        device=kind.device.title,
        jax=first.jax or "",
        rules=first.rules or {},
        programs=tuple(programs),
        fits=fits_of(programs, int(kind.device.memory_bytes * USABLE)),
    )


def _plain(rules: ShardingRules | PhaseRules) -> Any:
    from jdserve.sharding.presets import phase_rules

    assert is_dataclass(rules)
    return asdict(phase_rules(rules))


def _named(plan: Plan, buckets: Seq[str]) -> tuple[str, ...]:
    known = tuple(dict.fromkeys(name for one in plan.instances for name in program_names(plan, one)))
    for bucket in buckets:
        if not any(fnmatch(name, bucket) for name in known):
            raise InvalidPlan("$.bucket", f"{bucket!r} names no program of the plan; its programs: {', '.join(known)}")
    return tuple(name for name in known if not buckets or any(fnmatch(name, bucket) for bucket in buckets))


def _distinct(plan: Plan, spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Stages whose programs no stage before them has."""
    seen: set[Any] = set()
    for instance in plan.instances:
        for stage in range(instance.pp):
            place = stage if spec.window is not None else (stage == 0, stage == instance.pp - 1)
            key = msgspec.structs.replace(instance, name="any"), place
            if key not in seen:
                seen.add(key)
                yield instance.name, stage


def _compiled(job: Job, target: Target) -> Iterator[Answer]:
    """Answers of a process that compiles ``job``, as they come."""
    with tempfile.TemporaryDirectory(prefix="jdserve-dryrun-") as scratch, tempfile.TemporaryFile() as said:
        job, environment = _prepared(job, target, Path(scratch))
        process = subprocess.Popen(
            [sys.executable, "-m", "jdserve.aot.compiling"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.close()
            for line in process.stdout:
                answer = msgspec.json.decode(line, type=Answer)
                if answer.error is not None:
                    raise InvalidPlan("$", answer.error)
                yield answer
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        if code:
            said.seek(0)
            last = said.read().decode(errors="replace").strip().splitlines()[-8:]
            raise CompilerFailed(f"the compiler for {target.name} ended with {code}:\n" + "\n".join(last))


def _prepared(job: Job, target: Target, scratch: Path) -> tuple[Job, dict[str, str]]:
    """The job and the environment of its process: no accelerator of this machine is to be touched."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if target.compiler == "tpu":
        # Otherwise libtpu asks the network what machine this is, and is for one process at a time.
        environment |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    root = cuda_root()
    if target.compiler == "cuda" and root is not None:
        tools, dumps = scratch / "cuda", scratch / "dumps"
        toolkit(tools, root)
        flags = f"{environment.get('XLA_FLAGS', '')} --xla_dump_to={dumps}"
        path = f"{tools / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
        environment |= {"CUDA_ROOT": str(tools), "PATH": path, "XLA_FLAGS": flags.strip()}
        job = msgspec.structs.replace(job, toolkit=str(tools), dumps=str(dumps))
    return job, environment
