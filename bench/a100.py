"""The real A100 runs, and the plans that stand for the engines that made them.

The policy of the reference engine is a matter of plan fields: prompts in order of arrival, at most 8,192 tokens and
128 prompts a step, KV parked in the prefill pool until it is copied; copies made one after another between two decode
steps; one decode batch, whatever the number of stages. vLLM of that time is a colocated instance that prefills first.
All limits are those of the published start scripts, all capacities those that the engine found, all step times those
that its authors measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from conclusion import BenchFailed

from jdserve.core.plan import ColocatedInstance, DecodeInstance, HostedStage, Instance, Plan, PrefillInstance, Worker
from jdserve.core.request import SLO
from jdserve.cost.a100 import REFERENCE, A100Profile, Overhead, a100_kv_tokens
from jdserve.cost.stepcost import StepCost, femtoseconds
from jdserve.sim.links import Route
from jdserve.sim.simulate import simulate
from jdserve.sim.workload import Workload

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
"""Where the measurements are looked for: they are not part of the package."""

RUNS = "distserve_a100_ground_truth.parquet"

MODEL = "opt-13b"
PAGE = 16
NO_LIMIT = 1 << 40

COPY_S = 0.25e-3
"""Seconds of one KV copy besides its tokens: with :data:`COPY_TOKEN_S`, the median and the 90th percentile of Fig 10
(right) of the paper for the lengths of ShareGPT."""

COPY_TOKEN_S = 4.5e-6
"""Seconds per token of a KV copy of OPT-13B to one device; a pipeline stage copies its own layers only."""

Floats = npt.NDArray[np.float64]

Family = Literal["aligned", "pp2", "vllm", "unaligned"]

FAMILIES: dict[Family, str] = {
    "aligned": "13B, prefill TP2, decode TP1",
    "pp2": "13B, prefill TP2, decode PP2",
    "vllm": "13B, vLLM TP1",
    "unaligned": "earlier runs without a placement in their names",
}

FOUR_DEVICES = ("distserve-400-4", "distserve-800-8")
"""Unaligned runs whose rates are multiples of four devices: decode PP2. All others had three."""


@dataclass(frozen=True)
class Times:
    """What clients saw.

    Attributes:
        ttft_ms, tpot_ms: of each request.
    """

    ttft_ms: Floats
    tpot_ms: Floats

    def met(self, slo: SLO) -> float:
        """Percent of requests that met both."""
        both = (self.ttft_ms <= slo.ttft_s * 1e3) & (self.tpot_ms <= slo.tpot_s * 1e3)
        return float(100 * both.mean())


@dataclass(frozen=True)
class Run:
    """One real run.

    Attributes:
        name: of the run; the last two numbers are requests and requests per second.
        family: what served it.
        pp: stages of the decode instance.
        workload: the requests, at the times at which they came.
        real: what was measured.
        reference: what the reference simulator says, None where it was not run.
    """

    name: str
    family: Family
    pp: int
    workload: Workload
    real: Times
    reference: Times | None


def load(data: Path) -> list[Run]:
    """The runs, by name.

    Raises:
        BenchFailed: the file is not there, or pyarrow is missing.
    """
    file = data / RUNS
    if not file.is_file():
        raise BenchFailed(f"--data: there is no {RUNS} in {data}")
    try:
        from pyarrow import parquet
    except ImportError:
        raise BenchFailed("pyarrow is missing: pip install 'jdserve[bench]'") from None
    table: dict[str, Any] = parquet.read_table(file).to_pydict()
    columns = {name: np.array(values) for name, values in table.items()}
    return [_run(str(name), columns, columns["run"] == name) for name in dict.fromkeys(table["run"])]


def _run(name: str, columns: dict[str, npt.NDArray[Any]], rows: npt.NDArray[np.bool_]) -> Run:
    def column(key: str) -> npt.NDArray[Any]:
        return columns[key][rows]

    starts: dict[str, Family] = {"distserve-c21d11": "aligned", "distserve-c21d12": "pp2", "vllm": "vllm"}
    families: list[Family] = [family for start, family in starts.items() if name.startswith(start)]
    family: Family = families[0] if families else "unaligned"
    reference = Times(column("ref_ttft_ms").astype(float), column("ref_tpot_ms").astype(float))
    return Run(
        name=name,
        family=family,
        pp=2 if family == "pp2" or name in FOUR_DEVICES else 1,
        workload=Workload.of(
            column("arrival_s").tolist(), column("prompt_len").tolist(), column("output_len").tolist()
        ),
        real=Times(column("ttft_ms"), column("tpot_ms")),
        reference=None if np.isnan(reference.ttft_ms).any() else reference,
    )


class Latency(msgspec.Struct, frozen=True):
    """What a fit may change.

    Attributes:
        prefill, decode: what the engine adds to the measured step times of each phase; vLLM has the second one only.
        kv_tokens: pool of a vLLM instance, None for what the reference engine found on the same device.
    """

    prefill: Overhead = REFERENCE
    decode: Overhead = REFERENCE
    kv_tokens: int | None = None

    def slower(self, factor: float) -> Latency:
        """The same with the measured times of both phases ``factor`` times as long."""
        return msgspec.structs.replace(
            self,
            decode=msgspec.structs.replace(
                self.decode, prefill=self.decode.prefill * factor, decode=self.decode.decode * factor
            ),
        )


class Copies:
    """KV goes over one link, a copy at a time.

    Args:
        token_s: seconds per token.
    """

    def __init__(self, token_s: float) -> None:
        # the constant is spread over a typical prompt, so that it occupies the link too
        self._route = Route(("copy",), 0, femtoseconds(token_s + COPY_S / 750))

    def route(self, source: str, destination: str) -> Route:
        """See :class:`jdserve.sim.links.Network`."""
        return self._route


def plan_of(*instances: Instance, model: str = MODEL) -> Plan:
    """A plan whose instances share one worker, each with devices of its own."""
    stages: list[HostedStage] = []
    device = 0
    for instance in instances:
        for stage in range(instance.pp):
            stages.append(HostedStage(instance.name, tuple(range(device, device + instance.tp)), stage))
            device += instance.tp
    return Plan(
        model=model,
        page_size=PAGE,
        max_model_len=2048,
        max_open_requests=NO_LIMIT,
        instances=instances,
        workers=(Worker("w", tuple(stages)),),
    )


def reference_prefill(model: str, tp: int, pp: int, name: str = "prefill") -> PrefillInstance:
    """A prefill instance as the reference engine schedules it."""
    return PrefillInstance(
        name=name,
        tp=tp,
        pp=pp,
        pages=a100_kv_tokens(model)[tp, pp] // PAGE,
        lm_tokens=8192,
        max_batch=128,
        prefix_cache=False,
        lease_s=1e9,
    )


def reference_decode(model: str, tp: int, pp: int, name: str = "decode") -> DecodeInstance:
    """A decode instance as the reference engine schedules it."""
    return DecodeInstance(
        name=name,
        tp=tp,
        pp=pp,
        pages=a100_kv_tokens(model)[tp, pp] // PAGE,
        max_num_seqs=1024,
        pull="between_steps",
        in_flight=1,
    )


def vllm_instance(model: str, tp: int, kv_tokens: int | None = None, name: str = "vllm") -> ColocatedInstance:
    """A vLLM instance of that time."""
    return ColocatedInstance(
        name=name,
        tp=tp,
        pages=(kv_tokens or a100_kv_tokens(model)[tp, 1]) // PAGE,
        token_budget=65536,
        max_num_seqs=1024,
        prefix_cache=False,
    )


def replay(run: Run, latency: Latency) -> Times:
    """Our simulator on the requests of a run."""
    costs: dict[str, StepCost]
    if run.family == "vllm":
        plan = plan_of(vllm_instance(MODEL, 1, latency.kv_tokens))
        costs = {"vllm": A100Profile(MODEL, "vllm", overhead=latency.decode).cost("colocated", 1, 1)}
    else:
        plan = plan_of(reference_prefill(MODEL, 2, 1), reference_decode(MODEL, 1, run.pp))
        costs = {
            "prefill": A100Profile(MODEL, overhead=latency.prefill).cost("prefill", 2, 1),
            "decode": A100Profile(MODEL, overhead=latency.decode).cost("decode", 1, run.pp),
        }
    result = simulate(plan, run.workload, costs=costs, network=Copies(COPY_TOKEN_S / run.pp))
    return Times(result.ttft_s() * 1e3, result.tpot_s() * 1e3)


def percentiles(values: Floats, which: Sequence[float] = (50, 90, 99)) -> list[float]:
    """Percentiles, in milliseconds to a tenth."""
    return [round(float(value), 1) for value in np.percentile(values, which)]
