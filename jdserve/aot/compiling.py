"""The process that compiles: ``python -m jdserve.aot.compiling`` reads a job and writes answers.

It is a process of its own because jax takes its platform and XLA its flags from the environment when they start, and
because a compiler that crashes must not take a notebook with it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax.experimental import topologies
from jax.sharding import Mesh

from jdserve.aot import hlo, ptxas
from jdserve.aot.job import Answer, Job, program_names, step_name
from jdserve.aot.report import Memory, Program
from jdserve.aot.targets import Target, target_of
from jdserve.compat import Device, offer_cpu_devices
from jdserve.core.errors import JdserveError
from jdserve.core.plan import Instance, Role, role_of
from jdserve.core.spec import DTYPE_BYTES, ModelSpec
from jdserve.models.skeleton import skeleton
from jdserve.ops.attention import KVPool
from jdserve.runtime.buckets import buckets_for
from jdserve.runtime.links import layout_of
from jdserve.runtime.programs import StagePrograms
from jdserve.sharding.presets import PhaseRules, phase_rules
from jdserve.sharding.rules import TENSOR_AXIS, ShardingRules, instance_mesh


class StageCompiler:
    """Compiles the programs of one stage from shapes alone.

    Args:
        job: that asks for them.
        spec: of the model, cut to as many layers as are wanted.
        instance: whose stage.
        index: of the stage.
        devices: of its mesh.
        rules: of the instance's phase.
    """

    def __init__(
        self, job: Job, spec: ModelSpec, instance: Instance, index: int, devices: list[Device], rules: ShardingRules
    ) -> None:
        plan = job.plan
        self._job, self._instance, self._index = job, instance, index
        self._compiler = target_of(job.target).compiler
        self._buckets = buckets_for(plan, instance)
        self._mesh: Mesh = instance_mesh(devices)
        layout = layout_of(plan, instance, spec)
        stage = StagePrograms(plan, instance, spec, layout, self._buckets, index, self._mesh, rules)
        self._stage = stage
        self._head_dim, heads = spec.head_dim, layout.stored_kv_heads
        self._model = skeleton(
            spec, stage.layers, kv_heads=heads, dtype=plan.dtype, weights=plan.weights, plugin=plan.model_plugin
        )
        self._leaves: Any = tuple(
            jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=stage.place(one.axes, one.shape))
            for one in self._model.parameters
        )
        pool, state = jax.eval_shape(stage.state)
        self._pool: KVPool = _placed(pool, stage.pool_sharding)
        self._fixed, self._live = _placed(state, stage.whole)
        shard = stage.pool_sharding.shard_shape(pool.keys.shape)
        self._layer_bytes = DTYPE_BYTES[plan.dtype] * shard[1] * shard[2] * shard[3] * shard[4]

    def programs(self) -> Iterator[Program]:
        """Compile what the job names, one after another."""
        traces = self._traces()
        for name in program_names(self._job.plan, self._instance):
            if name in self._job.names:
                yield self._compile(name, traces[name])

    def _traces(self) -> dict[str, Callable[[], Any]]:
        stage, given = self._stage, (self._model, self._leaves, self._pool, self._fixed, self._live)
        traces: dict[str, Callable[[], Any]] = {
            step_name(shape): lambda shape=shape: stage.trace(shape, *given) for shape in self._buckets.steps
        }
        for count in self._buckets.transfers:
            pages = jax.ShapeDtypeStruct((count,), jnp.int32, sharding=stage.whole)
            shape = (len(stage.layers), count, *self._pool.keys.shape[2:4], self._head_dim)
            moved = jax.tree.map(lambda one, shape=shape: jax.ShapeDtypeStruct(shape, one.dtype), self._pool)
            moved = _placed(moved, stage.pool_sharding)
            traces[f"gather-{count}"] = lambda pages=pages: stage.gather.trace(self._pool, pages)
            traces[f"insert-{count}"] = lambda pages=pages, moved=moved: stage.insert.trace(self._pool, moved, pages)
        return traces

    def _compile(self, name: str, trace: Callable[[], Any]) -> Program:
        started = time.perf_counter()
        compiled = trace().lower(lowering_platforms=(self._compiler,)).compile()
        seconds = time.perf_counter() - started
        text, job = compiled.as_text(), self._job
        if job.hlo is not None:
            layers = len(self._stage.layers)
            (Path(job.hlo) / f"{self._instance.name}.{self._index}.{name}.{layers}-layers.hlo.txt").write_text(text)
        analysis, cost = compiled.memory_analysis(), compiled.cost_analysis()
        cost = (cost[0] if isinstance(cost, list) else cost) or {}
        computations = hlo.parse(text)
        return Program(
            instance=self._instance.name,
            stage=self._index,
            name=name,
            layers=len(self._stage.layers),
            memory=Memory(
                arguments=analysis.argument_size_in_bytes,
                outputs=analysis.output_size_in_bytes,
                aliased=analysis.alias_size_in_bytes,
                temporaries=analysis.temp_size_in_bytes,
                code=analysis.generated_code_size_in_bytes,
            ),
            # Keys and values are the first outputs, but of a gather, whose outputs are copies.
            pool_aliased=name.startswith("gather") or {0, 1} <= hlo.aliased_outputs(text),
            collectives=hlo.collectives(computations, TENSOR_AXIS, self._mesh.size),
            copies=hlo.copies(computations, self._instance.pages + 1, self._layer_bytes),
            kernels=self._kernels(),
            flops=cost.get("flops"),
            bytes_accessed=cost.get("bytes accessed"),
            seconds=seconds,
        )

    def _kernels(self) -> Any:
        """What ptxas told since the last program."""
        job = self._job
        if job.toolkit is None or job.dumps is None:
            return None
        told = _taken(Path(job.toolkit) / "logs", "*")
        launches = _taken(Path(job.dumps), "*thunk_sequence.txt")
        _taken(Path(job.dumps), "*")
        return ptxas.kernels(told, launches)


def _placed(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def _taken(folder: Path, pattern: str) -> str:
    """The text of files, which are removed."""
    texts = []
    for file in sorted(folder.glob(pattern)):
        texts.append(file.read_text(errors="replace"))
        file.unlink()
    return "\n".join(texts)


def devices_of(target: Target, count: int) -> list[Device]:
    """``count`` devices of a kind that need not be here."""
    if target.compiler == "cpu":
        offer_cpu_devices(count)
        return list(jax.devices("cpu")[:count])
    return list(topologies.get_topology_desc(platform=target.compiler, **target.topology(count)).devices[:count])


def answers(job: Job) -> Iterator[Answer]:
    """Everything that ``job`` asks for."""
    rules = phase_rules(job.rules if isinstance(job.rules, str) else msgspec.convert(job.rules, PhaseRules))
    roles: list[Role] = sorted({role_of(job.plan.instance(name)) for name, _ in job.stages}, reverse=True)
    split: dict[str, dict[str, str]] = {
        role: {k: v for k, v in dataclasses.asdict(rules.of(role)).items() if v} for role in roles
    }
    yield Answer(jax=jax.__version__, rules=split)
    devices = devices_of(target_of(job.target), max(job.plan.instance(name).tp for name, _ in job.stages))
    for name, index in job.stages:
        instance = job.plan.instance(name)
        for layers in job.layers:
            spec = job.spec if layers is None else msgspec.structs.replace(job.spec, layers=layers * instance.pp)
            mine = devices[: instance.tp]
            compiler = StageCompiler(job, spec, instance, index, mine, rules.of(role_of(instance)))
            for program in compiler.programs():
                yield Answer(program=program)


def main() -> None:
    """Read a job from standard input, write answers to standard output."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # compilers print what they like
    try:
        for answer in answers(msgspec.json.decode(sys.stdin.buffer.read(), type=Job)):
            out.write(msgspec.json.encode(answer) + b"\n")
            out.flush()
    except (JdserveError, ValueError) as error:
        out.write(msgspec.json.encode(Answer(error=str(error))) + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
