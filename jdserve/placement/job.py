"""What is asked of the planner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from jdserve.core.errors import InvalidWorkload
from jdserve.core.request import SLO
from jdserve.core.spec import DType, ModelSpec, WeightFormat
from jdserve.cost.cluster import Cluster
from jdserve.cost.latency import LatencyModel
from jdserve.sim.lengths import FromTrace, LogNormal, SharedPrefix, Uniform
from jdserve.sim.traces import Trace
from jdserve.sim.workload import Source, Workload

Floats = npt.NDArray[np.float64]

ROUND_UP = 1024
"""The longest request of a plan is rounded up to a multiple of this many tokens, where the model allows it."""


Scope = Literal["both", "prefill", "decode"]
"""What counts of a run: requests as a whole, or one phase by itself."""

WAITS, LIVES = 20, 3
"""A run lasts at least so many TTFTs, and so many times as long as the SLO lets a mean request live."""

GROWTH = 10
"""A run has at most this many times the requests that the job asks for."""

BOUNDED = 4
"""Bounds look at so many times the requests that the job asks for, where runs are longer."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, machines, a workload and what its requests must meet.

    Attributes:
        spec: shape of the model.
        model: as the plan names it: a path, or a name that the server knows.
        dtype: of weights, activations and KV.
        weights: how matrices are stored; None for in ``dtype``.
        cluster: the machines.
        source: the requests.
        workload: name of the source, for people.
        slo: TTFT, TPOT, and the share of requests that must meet both.
        latency: how long steps take.
        rate: requests per second that the plan must carry; None for the best per device.
        devices: most devices that the plan may have.
        max_model_len: tokens of the longest request.
        page_size: token positions per page.
        max_num_seqs: largest decode batch that is considered.
        max_batch: most prompts in one prefill step.
        requests: simulated per rate, at least.
        steady: simulate more where that is too short for queues to show; see :meth:`count`.
        confirm: the plan that is handed over is simulated with so many times the requests.
        tolerance: two rates this close count as one.
        kv_tokens: measured KV capacity by (tp, pp), instead of what the memory model says.
        link_share: share of the nominal bandwidth that a transfer of KV gets.
    """

    spec: ModelSpec
    model: str
    dtype: DType
    cluster: Cluster
    source: Source
    workload: str
    slo: SLO
    latency: LatencyModel
    rate: float | None
    devices: int
    max_model_len: int
    page_size: int = 16
    max_num_seqs: int = 256
    max_batch: int = 64
    requests: int = 600
    steady: bool = True
    confirm: int = 4
    tolerance: float = 0.02
    kv_tokens: Mapping[tuple[int, int], int] | None = field(default=None, hash=False)
    link_share: float = 0.8
    weights: WeightFormat | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate >= 0):
            raise InvalidWorkload(f"rate: must be a finite number of at least 0, got {self.rate}")
        if self.devices < 1:
            raise InvalidWorkload(f"devices: must be at least 1, got {self.devices}")
        if not 0 < self.tolerance < 1:
            raise InvalidWorkload(f"tolerance: must be between 0 and 1, got {self.tolerance}")
        for name in ("page_size", "max_num_seqs", "max_batch", "requests", "confirm", "max_model_len"):
            if getattr(self, name) < 1:
                raise InvalidWorkload(f"{name}: must be at least 1, got {getattr(self, name)}")

    @cached_property
    def sample(self) -> Sample:
        """The requests of the longest run that bounds look at, the first ones of which are those of every run."""
        return Sample(self.source.at(1.0, self.requests * (BOUNDED if self.steady else 1)), self.requests)

    def count(self, rate: float, scope: Scope = "both") -> int:
        """Requests of a run at ``rate``.

        An overloaded plan must have the time to show that it is: a run lasts a few of the longest waits for a first
        token that the SLO allows, and a few of the times that a mean request may be there; of one phase alone, in it.
        """
        if not self.steady:
            return self.requests
        wait = 0.0 if scope == "decode" else self.slo.ttft_s
        life = wait + (0.0 if scope == "prefill" else self.slo.tpot_s * self.sample.mean_output)
        return max(self.requests, math.ceil(min(rate * max(WAITS * wait, LIVES * life), GROWTH * self.requests)))


class Sample:
    """Figures of the first requests, at rate 1.

    Attributes:
        least: how many of them every run has.
        arrivals_s: in seconds; those at rate r are r times earlier. Shape [requests].
        inputs, outputs: tokens. Shape [requests].
        fresh: prompt tokens that even a cache of all earlier prompts would not save. Shape [requests].
    """

    def __init__(self, work: Workload, least: int) -> None:
        self.least = least
        self.arrivals_s: Floats = np.array(work.arrivals, dtype=float) / 1e15
        self.inputs: Floats = np.array(work.inputs, dtype=float)
        self.outputs: Floats = np.array(work.outputs, dtype=float)
        self.fresh: Floats = self.inputs if not work.blocks else _fresh(work)
        self.shared = bool(work.blocks) and bool((self.fresh < self.inputs).any())

    @property
    def mean_input(self) -> float:
        """Mean prompt tokens."""
        return float(self.inputs.mean())

    @property
    def mean_output(self) -> float:
        """Mean output tokens."""
        return float(self.outputs.mean())

    @property
    def mean_context(self) -> float:
        """Mean context of a decode step."""
        steps = np.maximum(self.outputs - 1, 0)
        total = float(steps.sum())
        return float(((self.inputs + self.outputs / 2) * steps).sum() / total) if total else self.mean_input


def _fresh(work: Workload) -> Floats:
    seen: set[int] = set()
    left: list[float] = []
    for length, blocks in zip(work.inputs, work.blocks, strict=True):
        hit = 0
        while hit < len(blocks) and blocks[hit] in seen:
            hit += 1
        seen.update(blocks)
        left.append(max(length - hit * work.block_tokens, 1))
    return np.array(left, dtype=float)


def longest(source: Source, requests: int) -> int:
    """Tokens of the longest request that ``source`` is known to give."""
    trace = _trace(source.lengths)
    if trace is not None:
        extra = source.lengths.blocks * source.lengths.block_tokens if isinstance(source.lengths, SharedPrefix) else 0
        return extra + max(i + o for i, o in zip(trace.inputs, trace.outputs, strict=True))
    drawn = source.at(1.0, requests)
    return max(i + o for i, o in zip(drawn.inputs, drawn.outputs, strict=True))


def within(source: Source, tokens: int) -> tuple[Source, float]:
    """``source`` without the requests of more than ``tokens`` tokens, and the share that was left out.

    Only traces are cut; other lengths are what the caller made them.

    Raises:
        InvalidWorkload: nothing is left.
    """
    trace = _trace(source.lengths)
    if trace is None or isinstance(source.lengths, SharedPrefix):
        return source, 0.0
    keep = [n for n in range(len(trace)) if trace.inputs[n] + trace.outputs[n] <= tokens]
    if len(keep) == len(trace):
        return source, 0.0
    if not keep:
        raise InvalidWorkload(f"{trace.name}: every request is longer than the {tokens} tokens that the model allows")
    cut = msgspec.structs.replace(
        trace,
        inputs=tuple(trace.inputs[n] for n in keep),
        outputs=tuple(trace.outputs[n] for n in keep),
        arrivals_s=None if trace.arrivals_s is None else tuple(trace.arrivals_s[n] for n in keep),
        blocks=tuple(trace.blocks[n] for n in keep) if trace.blocks else (),
    )
    assert isinstance(source.lengths, FromTrace)
    lengths = msgspec.structs.replace(source.lengths, trace=cut)
    return msgspec.structs.replace(source, lengths=lengths), 1 - len(keep) / len(trace)


def _trace(lengths: Uniform | FromTrace | LogNormal | SharedPrefix) -> Trace | None:
    inner = lengths.lengths if isinstance(lengths, SharedPrefix) else lengths
    return inner.trace if isinstance(inner, FromTrace) else None


def model_len(spec: ModelSpec, source: Source, requests: int) -> int:
    """The longest request of a plan: the longest that the workload has, rounded up, within what the model allows."""
    return min(-(-longest(source, requests) // ROUND_UP) * ROUND_UP, spec.context)
