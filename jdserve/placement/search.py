"""``search``: from a model, machines, a workload and an SLO to a plan, or to the reason why there is none.

DistServe's Algorithm 1 where KV may cross between nodes and Algorithm 2 where it may not; beside them, units with any
numbers of prefill and decode instances on one node, and colocated instances, so that "do not disaggregate" can win.
Every candidate is judged by the simulator, with the requests of the workload; the plan that comes out is simulated once
more as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from jdserve.core.request import SLO
from jdserve.core.spec import DType, ModelSpec, WeightFormat
from jdserve.cost.cluster import Cluster
from jdserve.cost.latency import LatencyModel
from jdserve.cost.models import model as known_model
from jdserve.cost.roofline import RooflineModel
from jdserve.placement.choosing import Search
from jdserve.placement.families import Progress
from jdserve.placement.job import Job, model_len, within
from jdserve.placement.result import SearchResult
from jdserve.placement.runner import Runner
from jdserve.sim.lengths import FromTrace
from jdserve.sim.traces import Trace, load_trace
from jdserve.sim.workload import Source


def search(
    model: str | ModelSpec,
    cluster: Cluster | str | Path,
    workload: Source | Trace | str | Path,
    slo: SLO,
    *,
    rate: float | None = None,
    devices: int | None = None,
    latency: LatencyModel | None = None,
    affinity: Literal["auto", "high", "low"] = "auto",
    wide: bool = True,
    checkpoint: str | None = None,
    dtype: DType | None = None,
    weights: WeightFormat | None = None,
    max_model_len: int | None = None,
    page_size: int = 16,
    max_num_seqs: int = 256,
    kv_tokens: Mapping[tuple[int, int], int] | None = None,
    requests: int = 600,
    steady: bool = True,
    confirm: int = 4,
    tolerance: float = 0.02,
    seed: int = 0,
    workers: int | None = 1,
    exhaustive: bool = False,
    progress: Progress | None = None,
) -> SearchResult:
    """Find the placement with the highest goodput per device.

    With a ``rate`` the answer is the plan with the fewest devices that carries it; with ``devices`` alone the one that
    carries most on so many; with neither, one unit of the highest goodput per device. The same arguments give the same
    answer, whatever ``workers``.

    Args:
        model: name of the catalogue, path of a checkpoint, or a shape.
        cluster: the machines, or the JSON file that describes them.
        workload: the requests; a trace (or its name or file) gives lengths, with Poisson arrivals.
        slo: TTFT, TPOT and the share of requests that must meet both.
        rate: requests per second that the plan must carry; 0 gives the smallest plan.
        devices: most devices of the plan; by default those of the cluster.
        latency: step times; by default the roofline of the cluster's hardware.
        affinity: ``high`` lets KV cross between nodes, ``low`` does not, ``auto`` looks at the links.
        wide: search beyond Algorithms 1 and 2: mixed numbers of instances, and colocated ones.
        checkpoint: model as the plan shall name it, where it differs from ``model``.
        dtype: of weights, activations and KV; by default bfloat16, on CPU float32.
        weights: how matrices are stored; None for in ``dtype``.
        max_model_len: longest request of the plan; by default that of the workload, rounded up.
        page_size: token positions per page.
        max_num_seqs: largest decode batch that is considered.
        kv_tokens: measured KV capacity by (tp, pp), instead of the memory model.
        requests: simulated per rate, at least.
        steady: simulate more at rates at which so many are over before an overload shows.
        confirm: the plan that is handed over is simulated with so many times the requests.
        tolerance: goodputs this close count as equal.
        seed: of lengths and arrivals of a trace.
        workers: processes; None takes one per core once the search is large. With more than one, a script must guard
            what it does by ``if __name__ == "__main__"``, since the processes load it too.
        exhaustive: measure every candidate instead of pruning; for reports and tests.
        progress: called with what is being searched, how many candidates are done, and of how many.

    Returns:
        The answer; a job that cannot be done is one (``feasible`` is False, with the reason and what comes nearest).

    Raises:
        InvalidPlan: the model or the cluster is not known, or refused.
        InvalidWorkload: the trace, a rate or another number breaks its bound.
    """
    spec = known_model(model) if isinstance(model, str) else model
    cluster = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
    name, source = _source(workload, seed)
    dtype = dtype or ("float32" if cluster.device.platform == "cpu" else "bfloat16")
    length = min(max_model_len or model_len(spec, source, requests), spec.context)
    source, left_out = within(source, length)
    warnings = (
        (f"{left_out:.2%} of the requests of {name} are longer than {length} tokens: left out",) if left_out else ()
    )
    job = Job(
        spec=spec,
        model=checkpoint or (model if isinstance(model, str) else spec.architecture),
        dtype=dtype,
        weights=weights,
        cluster=cluster,
        source=source,
        workload=name,
        slo=slo,
        latency=latency
        or RooflineModel(
            spec=spec, dtype=dtype, device=cluster.device, per_node=cluster.devices_per_node, weights=weights
        ),
        rate=rate,
        devices=cluster.devices if devices is None else min(devices, cluster.devices),
        max_model_len=length,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        requests=requests,
        steady=steady,
        confirm=confirm,
        tolerance=tolerance,
        kv_tokens=kv_tokens,
    )
    with Runner(job, workers) as runner:
        return Search(job, runner, devices, affinity, wide, exhaustive, progress, warnings).run()


def _source(workload: Source | Trace | str | Path, seed: int) -> tuple[str, Source]:
    if isinstance(workload, Source):
        lengths = workload.lengths
        return (lengths.trace.name if isinstance(lengths, FromTrace) else type(lengths).__name__.lower()), workload
    trace = workload if isinstance(workload, Trace) else load_trace(workload)
    return trace.name, Source(lengths=FromTrace(trace), seed=seed)
