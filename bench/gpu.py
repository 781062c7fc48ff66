"""One GPU, within eight minutes: its ceilings, the attention kernels, whole steps, and the planner's profile.

    python bench/gpu.py [--dry] [--out FOLDER]

- *Ceilings*: device copy and bf16 matrix product.
- *Paged decode attention*, every back end that the device has, Llama-3-8B heads (32 query, 8 KV, 128): batch 1 to 256,
  context 1k to 32k, page sizes 16 and 64, in bytes of KV per second and as a fraction of the copy ceiling, each checked
  against float64.
- *Prefill attention*: a chunk of 512 tokens with and without a prefix.
- *Steps* of Llama-3-8B with random weights: decode as a fraction of the copy ceiling, prefill of the matmul ceiling;
  their times are the rows of ``profile.json``, which `jdserve plan --latency` takes.

KV from prefill to decode on the one GPU is not measured here. It takes no network. What the device lacks, or has no
memory or time for, is skipped by name. ``--dry`` goes through all of it with tiny shapes on whatever jax finds. The
last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, get_args

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from jdserve.core.backends import Attention, attention_for
from jdserve.core.errors import InvalidPlan
from jdserve.core.pages import pages_for
from jdserve.core.plan import ColocatedInstance, HostedStage, Plan, Worker
from jdserve.core.profile import Profile, ProfileRow
from jdserve.core.spec import ModelSpec
from jdserve.cost.models import model
from jdserve.models.skeleton import skeleton
from jdserve.ops.attention import KVPool
from jdserve.ops.backends import attention_ops
from jdserve.runtime.buckets import StepShape, buckets_for
from jdserve.runtime.links import layout_of
from jdserve.runtime.programs import StagePrograms
from jdserve.runtime.steps import StepInputs
from jdserve.sharding.rules import ShardingRules, instance_mesh

BUDGET_S = 440.0
"""After it nothing new is begun."""

ERROR = 2e-2
"""Most that bf16 attention may differ from float64, as a share of the largest value."""


@dataclass
class Bench:
    """What runs, and what was found.

    Attributes:
        dry: tiny shapes.
        rows: one per measurement.
        skipped: what was not measured, and why.
    """

    dry: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def measure(self, name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Run one measurement; what goes wrong in it is told and ends nothing else."""
        if time.perf_counter() - self.started > BUDGET_S:
            self.skipped.append(f"{name}: no time left")
            return None
        try:
            row = {"name": name, **run()}
        except Exception as error:
            self.skipped.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
            return None
        self.rows.append(row)
        return row


def seconds(run: Callable[[], Any], repeats: int = 10) -> float:
    """Median time of ``run()``, of batches of launches, so that the host's part does not count."""
    jax.block_until_ready(run())
    times = []
    for _ in range(3):
        started = time.perf_counter()
        out = None
        for _ in range(repeats):
            out = run()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - started) / repeats)
    return median(times)


def ceilings(bench: Bench) -> tuple[float, float]:
    """Bytes per second of a copy (read and written), and FLOP/s of a matrix product."""
    n = 1 << (20 if bench.dry else 30)
    data = jnp.zeros(n, jnp.int8)
    copy = jax.jit(lambda x: x ^ jnp.int8(1))
    copied = 2 * n / seconds(lambda: copy(data))
    side = 256 if bench.dry else 8192
    square = jnp.ones((side, side), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    flops = 2 * side**3 / seconds(lambda: product(square))
    bench.rows.append({"name": "copy ceiling", "gb_per_s": copied / 1e9})
    bench.rows.append({"name": "matmul ceiling", "tflops": flops / 1e12})
    return copied, flops


def backends(platform: str) -> list[Attention]:
    """Names of the attention back ends that run here."""
    found: list[Attention] = []
    for name in get_args(Attention):
        try:
            chosen = attention_for(platform, name)
        except InvalidPlan:
            continue
        if chosen not in found and chosen != "pallas_interpret":
            found.append(chosen)
    return found


def attention(bench: Bench, copied: float) -> None:
    """Paged decode attention, then prefill attention."""
    platform = jax.default_backend()
    heads, kv_heads, dim = (4, 2, 16) if bench.dry else (32, 8, 128)
    batches, contexts, pages = (
        ((1, 2), (40,), (16,)) if bench.dry else ((1, 16, 64, 256), (1024, 8192, 32768), (16, 64))
    )
    for name in backends(platform):
        ops = attention_ops(platform, name)
        for page in pages:
            for batch in batches:
                for context in contexts:
                    kv = 2 * batch * context * kv_heads * dim * 2
                    title = f"decode attention {name}, batch {batch}, context {context}, page {page}"
                    if kv > 40e9:
                        bench.skipped.append(f"{title}: {kv / 1e9:.0f} GB of KV")
                        continue
                    bench.measure(title, lambda: decode(ops, batch, context, page, heads, kv_heads, dim, copied))  # noqa: B023
        for prefix in (0, 32 if bench.dry else 8192):
            title = f"prefill attention {name}, 512 tokens after {prefix}"
            bench.measure(title, lambda: prefill(ops, 32 if bench.dry else 512, prefix, heads, kv_heads, dim))  # noqa: B023


def pool_of(batch: int, context: int, page: int, kv_heads: int, dim: int) -> tuple[KVPool, jax.Array]:
    """A random pool of one layer, and block tables in no order."""
    width = pages_for(max(context, 1), page)
    shape = (1, batch * width + 1, kv_heads, page, dim)
    keys, values = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2))
    order = np.random.default_rng(0).permutation(batch * width) + 1
    return KVPool(keys, values), jnp.asarray(order.reshape(batch, width), jnp.int32)


def decode(
    ops: Any, batch: int, context: int, page: int, heads: int, kv_heads: int, dim: int, copied: float
) -> dict[str, Any]:
    """One shape of decode attention."""
    pool, tables = pool_of(batch, context, page, kv_heads, dim)
    q = jax.random.normal(jax.random.key(2), (batch, heads, dim), jnp.bfloat16)
    lengths = jnp.full(batch, context, jnp.int32)
    run = jax.jit(lambda q, pool, tables, lengths: ops.decode(q, pool, 0, tables, lengths, None))
    took = seconds(lambda: run(q, pool, tables, lengths))
    out = np.asarray(run(q, pool, tables, lengths)[0], np.float64)
    keys, values = (np.asarray(part[0, tables[0]].swapaxes(0, 1), np.float64) for part in pool)
    keys, values = (part.reshape(kv_heads, -1, dim)[:, :context] for part in (keys, values))
    scores = np.einsum("kgd,ktd->kgt", np.asarray(q[0], np.float64).reshape(kv_heads, -1, dim), keys) * dim**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("kgt,ktd->kgd", weights / weights.sum(-1, keepdims=True), values).reshape(heads, dim)
    error = float(np.abs(out - wanted).max() / np.abs(values).max())
    if error > ERROR:
        raise ValueError(f"error {error:.2e} is above {ERROR}")
    rate = 2 * batch * context * kv_heads * dim * 2 / took
    return {"us": took * 1e6, "gb_per_s": rate / 1e9, "of_copy": rate / copied, "error": error}


def prefill(ops: Any, tokens: int, prefix: int, heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    """A chunk of one prompt."""
    pool, tables = pool_of(1, prefix, 16, kv_heads, dim)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (tokens, n, dim), jnp.bfloat16)
        for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    given = q, k, v, pool, jnp.zeros(tokens, jnp.int32), tables, jnp.full(1, prefix, jnp.int32)
    run = jax.jit(
        lambda q, k, v, pool, segments, tables, prefix: ops.prefill(q, k, v, pool, 0, segments, tables, prefix, None)
    )
    took = seconds(lambda: run(*given))
    return {"us": took * 1e6, "tflops": 4 * heads * dim * tokens * (prefix + tokens / 2) / took / 1e12}


def steps(bench: Bench, copied: float, flops: float) -> Profile | None:
    """Whole steps with random weights: rows of a profile."""
    spec = model("llama-3-8b")
    longest, batches, contexts, prompts = 8192, (1, 16, 64), (1024, 8192), (128, 512)
    if bench.dry:
        spec = ModelSpec("LlamaForCausalLM", 2, 64, 128, 4, 2, 16, 256, 256)
        longest, batches, contexts, prompts = 128, (1, 2), (40,), (32,)
    slots, page = max(batches), 16
    pages = (slots * max(contexts) if bench.dry else 24 * 8192) // page + 64
    instance = ColocatedInstance(name="c", pages=pages, token_budget=max(512, slots), max_num_seqs=slots)
    worker = Worker("w", (HostedStage("c", (0,)),))
    plan = Plan(
        model="m", dtype="bfloat16", page_size=page, max_model_len=longest, instances=(instance,), workers=(worker,)
    )
    mesh = instance_mesh(jax.devices()[:1])
    buckets = buckets_for(plan, instance)
    stage = StagePrograms(plan, instance, spec, layout_of(plan, instance, spec), buckets, 0, mesh, ShardingRules())
    structure = skeleton(spec, stage.layers, kv_heads=spec.kv_heads, dtype="bfloat16")
    leaves = tuple(
        jax.random.normal(jax.random.key(i), one.shape, one.dtype) * jnp.asarray(0.02, one.dtype)
        for i, one in enumerate(structure.parameters)
    )
    leaves = tuple(jax.device_put(leaf, stage.whole) for leaf in leaves)
    pool, (fixed, live) = stage.state()
    unguided = stage.unguided()
    weights, found = sum(leaf.nbytes for leaf in leaves), []
    for shape in [StepShape(seqs=n) for n in batches] + [one for one in buckets.prompts if one.tokens in prompts]:
        name = f"decode step, batch {shape.seqs}" if shape.seqs else f"prefill step, {shape.tokens} tokens"
        try:
            program = stage.trace(shape, structure, leaves, pool, fixed, live).lower().compile()
        except Exception as error:
            bench.skipped.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
            continue
        for context in contexts if shape.seqs else (0,):
            if shape.seqs * pages_for(context, page) >= pages:
                bench.skipped.append(f"{name}, context {context}: more KV than the pool holds")
                continue
            live = filled(live, shape, context, page)
            inputs = inputs_of(shape, slots, live.tables.shape[1], unguided[shape.segments + shape.seqs])
            times = []
            for _ in range(3 if bench.dry else 12):
                started = time.perf_counter()
                pool, live, _ = jax.block_until_ready(program(leaves, pool, fixed, live, inputs, None))
                times.append(time.perf_counter() - started)
            took = median(times[1:])
            kv = shape.seqs * context * spec.kv_bytes_per_token("bfloat16")
            row = {"name": f"{name}, context {context}" if shape.seqs else name, "us": took * 1e6}
            row["of_copy"] = (weights + kv) / took / copied
            row["of_matmul"] = 2 * spec.parameters * (shape.seqs + shape.tokens) / took / flops
            bench.rows.append(row)
            role = "decode" if shape.seqs else "prefill"
            tokens = shape.seqs + shape.tokens
            found.append(ProfileRow(role, 1, 1, max(1, shape.seqs), tokens, shape.seqs * context, took))
    device = str(jax.devices()[0].device_kind)
    return Profile(device=device, model=spec, dtype="bfloat16", rows=tuple(found)) if found else None


def filled(live: Any, shape: StepShape, context: int, page: int) -> Any:
    """State in which the first ``shape.seqs`` slots have ``context`` tokens, each with pages of its own."""
    tables = np.zeros(live.tables.shape, np.int32)
    width = pages_for(context + 32, page) if context else 0
    for slot in range(shape.seqs):
        tables[slot, : min(width, tables.shape[1])] = (
            1
            + slot * pages_for(max(context, 1), page)
            + np.arange(min(width, tables.shape[1])) % pages_for(max(context, 1), page)
        )
    contexts = np.zeros(live.context.shape, np.int32)
    contexts[: shape.seqs] = max(context - 1, 0)
    where = live.context.sharding
    return live._replace(tables=jax.device_put(tables, where), context=jax.device_put(contexts, where))


def inputs_of(shape: StepShape, slots: int, width: int, allowed: jax.Array) -> StepInputs:
    """What the host would send: every decoding slot, or one prompt that fills the launch."""
    tokens = np.zeros((4, shape.tokens), np.int32)
    tokens[1] = np.arange(shape.tokens)
    tokens[3] = -1
    chunks = np.zeros((4, shape.segments), np.int32)
    chunks[0] = slots
    if shape.segments:
        chunks[:, 0] = 0, 0, shape.tokens - 1, 1
    decodes = np.zeros((4, shape.seqs), np.int32)
    decodes[0] = np.arange(shape.seqs)
    decodes[1], decodes[3] = width, -1
    return StepInputs(tokens, chunks, decodes, allowed)


def main() -> int:
    """Measure, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on any device")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for gpu.json and profile.json")
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu" and not args.dry:
        print(json.dumps({"skipped": f"missing a GPU: jax runs on {device.platform}"}))
        return 0
    bench = Bench(args.dry)
    copied, flops = ceilings(bench)
    attention(bench, copied)
    profile = steps(bench, copied, flops)
    args.out.mkdir(parents=True, exist_ok=True)
    result = {
        "device": str(device.device_kind),
        "jax": jax.__version__,
        "dry": args.dry,
        "seconds": round(time.perf_counter() - bench.started, 1),
        "rows": bench.rows,
        "skipped": bench.skipped,
    }
    (args.out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    if profile is not None:
        (args.out / "profile.json").write_bytes(msgspec.json.format(profile.to_json(), indent=1))
    table = Table(title=f"{device.device_kind}, jax {jax.__version__}")
    columns = ("name", "us", "gb_per_s", "tflops", "of_copy", "of_matmul", "error")
    for column in columns:
        table.add_column(column, justify="left" if column == "name" else "right")
    for row in bench.rows:
        table.add_row(row["name"], *(f"{row[key]:.3g}" if key in row else "" for key in columns[1:]))
    console = Console(stderr=True, width=160)
    console.print(table, *bench.skipped, sep="\n", highlight=False)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
