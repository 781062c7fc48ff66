"""The same seed gives the same bytes, whatever the version of Python."""

from __future__ import annotations

import hashlib
import random

from jdserve.core.plan import ColocatedInstance, DecodeInstance, PrefillInstance
from jdserve.core.request import SLO
from jdserve.core.steptime import StepTime
from jdserve.sim.goodput import goodput
from jdserve.sim.lengths import FromTrace, LogNormal
from jdserve.sim.simulate import simulate
from jdserve.sim.traces import load_trace
from jdserve.sim.workload import Source
from sim.plans import DECODE, PREFILL, Wires, plan_of

MIXED = StepTime(0.018, 1.02e-4, 7.12e-9, 1e-9, 3.85e-5, 6.27e-7)
DIGEST = "6861c1bd2ed1eaa527e5b67bc176125fcb2e877d7ca896181733fd467e0dd805"


def test_equal_bytes_on_every_python() -> None:
    """Run on 3.11 to 3.13, this compares them with the digest, and so with each other."""
    trace = load_trace("sharegpt")
    disaggregated = plan_of(
        PrefillInstance(name="p0", pp=2, pages=4134, lm_tokens=2048, steptime=PREFILL),
        PrefillInstance(name="p1", tp=2, pages=4134, lm_tokens=1024, steptime=PREFILL),
        DecodeInstance(name="d0", pages=1200, max_num_seqs=128, steptime=DECODE),
        DecodeInstance(name="d1", pp=2, pages=4134, max_num_seqs=128, steptime=DECODE),
        max_model_len=4096,
    )
    colocated = plan_of(
        ColocatedInstance(name="c0", mode="chunked", pages=1500, token_budget=512, max_num_seqs=128, steptime=MIXED),
        ColocatedInstance(name="c1", pages=1500, token_budget=2048, max_num_seqs=128, steptime=MIXED),
        max_model_len=4096,
    )
    poisson = Source(lengths=FromTrace(trace), seed=1)
    bursts = Source(lengths=LogNormal.fit(trace), process="gamma", cv=2.5, seed=2)
    replayed = Source(lengths=FromTrace(trace), process="trace", trace=load_trace("azure2023_code"), seed=3)
    digest = hashlib.sha256()
    for plan in (disaggregated, colocated):
        for source, rate in ((poisson, 8.0), (bursts, 4.0), (replayed, 6.0)):
            result = simulate(plan, source.at(rate, 150), network=Wires(random.Random(0)))
            digest.update(result.to_json())
    found = goodput(disaggregated, bursts, SLO(0.3, 0.06), requests=100, tolerance=0.05)
    digest.update(repr((found.rate, found.probes, found.attainment)).encode())
    assert digest.hexdigest() == DIGEST
