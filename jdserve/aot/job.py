"""What the process that compiles is asked, and what it answers: JSON, one line per answer."""

from __future__ import annotations

from typing import Any

import msgspec

from jdserve.aot.report import Program
from jdserve.core.plan import Instance, Plan, role_of
from jdserve.core.spec import ModelSpec
from jdserve.runtime.buckets import StepShape, buckets_for


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Programs to compile.

    Attributes:
        plan: whose programs.
        spec: of its model.
        target: name of the target.
        rules: name of a preset, or PhaseRules as plain data.
        names: of programs.
        stages: (instance, stage) of programs.
        layers: per stage; None for those of the model.
        hlo: folder for HLO.
        toolkit: folder of a CUDA toolkit whose ptxas keeps logs.
        dumps: folder that XLA dumps into.
    """

    plan: Plan
    spec: ModelSpec
    target: str
    rules: Any
    names: tuple[str, ...]
    stages: tuple[tuple[str, int], ...]
    layers: tuple[int | None, ...]
    hlo: str | None = None
    toolkit: str | None = None
    dumps: str | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One line: the beginning, a program, or the error that ends it."""

    jax: str | None = None
    rules: dict[str, dict[str, str]] | None = None
    program: Program | None = None
    error: str | None = None


def step_name(shape: StepShape) -> str:
    """Name of a step program."""
    if not shape.tokens:
        return f"decode-{shape.seqs}"
    prompt = f"{shape.tokens}x{shape.segments}"
    return f"mixed-{prompt}+{shape.seqs}" if shape.seqs else f"prefill-{prompt}"


def program_names(plan: Plan, instance: Instance) -> tuple[str, ...]:
    """Every program of an instance that belongs to a step or a hand-off."""
    buckets = buckets_for(plan, instance)
    way = "gather" if role_of(instance) == "prefill" else "insert"
    return (*map(step_name, buckets.steps), *(f"{way}-{pages}" for pages in buckets.transfers))
