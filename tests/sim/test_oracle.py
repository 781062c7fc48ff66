"""Two judges from outside: queueing theory, and the same systems written down again for simpy."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from jdserve.core.plan import DecodeInstance, Plan, PrefillInstance
from jdserve.core.steptime import StepFeatures, StepTime
from jdserve.cost.stepcost import Linear
from jdserve.sim.lengths import Uniform
from jdserve.sim.links import Route
from jdserve.sim.simulate import simulate, step_costs
from jdserve.sim.workload import FS, Source, Workload
from sim.plans import plan_of

simpy = pytest.importorskip("simpy")


class Oracle:
    """Prefill instances with several stages, decode instances with one, one wire between them; room for everything."""

    def __init__(self, plan: Plan, costs: dict[str, Linear], workload: Workload, wire: Route) -> None:
        self.env = simpy.Environment()
        self.costs = costs
        self.work = workload
        self.route = wire
        self.wire = simpy.Resource(self.env, 1)
        self.first: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.prefills = [one for one in plan.instances if isinstance(one, PrefillInstance)]
        self.decodes = [one for one in plan.instances if isinstance(one, DecodeInstance)]
        self.load = {one.name: [0, 0] for one in plan.instances}  # tokens, requests
        self.queue: dict[str, list[int]] = {one.name: [] for one in plan.instances}
        self.flights = {one.name: 0 for one in plan.instances}
        self.stages = {one.name: [simpy.Resource(self.env, 1) for _ in range(one.pp)] for one in self.prefills}
        self.pulling = {one.name: 0 for one in self.decodes}
        self.landed: dict[str, list[int]] = {one.name: [] for one in self.decodes}
        self.batch: dict[str, dict[int, int]] = {one.name: {} for one in self.decodes}
        self.env.process(self.arrivals())

    def choose(self, instances: list[Any], weight: int) -> Any:
        chosen = min(instances, key=lambda one: tuple(self.load[one.name]))
        self.weigh(chosen.name, weight, 1)
        return chosen

    def weigh(self, name: str, tokens: int, requests: int) -> None:
        self.load[name][0] += tokens
        self.load[name][1] += requests

    def arrivals(self) -> Generator[Any, Any, None]:
        for index, at in enumerate(self.work.arrivals):
            yield self.env.timeout(at - self.env.now)
            chosen = self.choose(self.prefills, self.work.inputs[index])
            self.queue[chosen.name].append(index)
            self.start_prefill(chosen)

    def start_prefill(self, one: PrefillInstance) -> None:
        queue = self.queue[one.name]
        while queue and self.flights[one.name] < one.pp:
            batch = [queue.pop(0)]
            while queue and len(batch) < one.max_batch:
                if sum(self.work.inputs[i] for i in (*batch, queue[0])) > one.lm_tokens:
                    break
                batch.append(queue.pop(0))
            self.flights[one.name] += 1
            self.env.process(self.prefill(one, batch))

    def prefill(self, one: PrefillInstance, batch: list[int]) -> Generator[Any, Any, None]:
        features = StepFeatures.of((0, self.work.inputs[index]) for index in batch)
        for stage, took in zip(self.stages[one.name], self.costs[one.name].stages(features), strict=True):
            with stage.request() as turn:
                yield turn
                yield self.env.timeout(took)
        self.flights[one.name] -= 1
        self.start_prefill(one)
        for index in batch:
            self.first[index] = self.env.now
            self.weigh(one.name, -self.work.inputs[index], -1)
            if self.work.outputs[index] <= 1:
                self.ends[index] = self.env.now
                continue
            weight = self.work.inputs[index] + self.work.outputs[index] - 1
            decode = self.choose(self.decodes, weight)
            self.queue[decode.name].append(index)
            self.admit(decode)

    def admit(self, one: DecodeInstance) -> None:
        queue = self.queue[one.name]
        while queue and self.pulling[one.name] + len(self.landed[one.name]) + len(self.batch[one.name]) < (
            one.max_num_seqs
        ):
            self.pulling[one.name] += 1
            self.env.process(self.pull(one, queue.pop(0)))

    def pull(self, one: DecodeInstance, index: int) -> Generator[Any, Any, None]:
        with self.wire.request() as turn:
            yield turn
            yield self.env.timeout(self.route.per_token * self.work.inputs[index])
        yield self.env.timeout(self.route.latency)
        self.pulling[one.name] -= 1
        self.landed[one.name].append(index)
        if not self.flights[one.name]:
            self.start_decode(one)

    def start_decode(self, one: DecodeInstance) -> None:
        batch = self.batch[one.name]
        for index in self.landed[one.name]:
            batch[index] = 1
        self.landed[one.name].clear()
        if batch:
            self.flights[one.name] = 1
            self.env.process(self.decode(one))

    def decode(self, one: DecodeInstance) -> Generator[Any, Any, None]:
        batch = self.batch[one.name]
        features = StepFeatures.of(contexts=[self.work.inputs[index] + tokens for index, tokens in batch.items()])
        yield self.env.timeout(self.costs[one.name].stages(features)[0])
        self.flights[one.name] = 0
        for index in list(batch):
            batch[index] += 1
            if batch[index] == self.work.outputs[index]:
                del batch[index]
                self.ends[index] = self.env.now
                self.weigh(one.name, -(self.work.inputs[index] + self.work.outputs[index] - 1), -1)
        self.start_decode(one)
        self.admit(one)


class Wire:
    def __init__(self, route: Route) -> None:
        self._route = route

    def route(self, source: str, destination: str) -> Route:
        return self._route


def _system(rng: random.Random) -> tuple[Plan, Workload, Route]:
    prefills = [
        PrefillInstance(
            name=f"p{index}",
            pp=rng.choice((1, 1, 2, 3)),
            pages=10**6,
            lm_tokens=rng.randint(100, 2000),
            max_batch=rng.randint(1, 8),
            steptime=StepTime(rng.uniform(0.005, 0.02), rng.uniform(5e-5, 2e-4), rng.uniform(0, 1e-8)),
        )
        for index in range(rng.randint(1, 3))
    ]
    decodes = [
        DecodeInstance(
            name=f"d{index}",
            pages=10**6,
            max_num_seqs=rng.choice((3, 10, 100)),
            steptime=StepTime(
                rng.uniform(0.005, 0.02), per_decode_seq=rng.uniform(1e-5, 1e-4), per_context_token=rng.uniform(0, 1e-6)
            ),
        )
        for index in range(rng.randint(1, 3))
    ]
    count, rate = rng.randint(1, 80), rng.uniform(1, 30)
    at, arrivals = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        arrivals.append(at)
    workload = Workload.of(
        arrivals, [rng.randint(1, 1500) for _ in range(count)], [rng.choice((0, 1, 2, 9, 60)) for _ in range(count)]
    )
    route = Route(("wire",), rng.randint(0, 10**12), rng.randint(0, 10**11))
    return plan_of(*prefills, *decodes, max_model_len=2048, max_open_requests=10**6), workload, route


@pytest.mark.parametrize("seed", range(60))
def test_simpy_finds_the_same_times(seed: int) -> None:
    plan, workload, route = _system(random.Random(seed))
    oracle = Oracle(plan, step_costs(plan), workload, route)  # type: ignore[arg-type]
    oracle.env.run()
    result = simulate(plan, workload, network=Wire(route))
    assert list(result.first) == [oracle.first[index] for index in range(len(workload))]
    assert list(result.ends) == [oracle.ends[index] for index in range(len(workload))]


@pytest.mark.parametrize(("pp", "speedup"), [(1, 1.0), (2, 1.0), (1, 1.6)])
def test_one_prefill_instance_waits_as_queueing_theory_says(pp: int, speedup: float) -> None:
    """M/D/1 (DistServe, OSDI'24, equations 1 to 3) at load 0.6; bench/closed_forms.py has the long runs."""
    seconds = 0.15 / speedup
    rate = 0.6 * pp / seconds
    plan = plan_of(
        PrefillInstance(name="p", pp=pp, pages=64, lm_tokens=1, max_batch=1, steptime=StepTime(base=seconds)),
        DecodeInstance(name="d", pages=64, max_num_seqs=1, steptime=StepTime(base=1.0)),
        max_model_len=512,
        max_open_requests=10**6,
    )
    workload = Source(lengths=Uniform(512, 1), seed=5).at(rate, 20_000)
    ttft = simulate(plan, workload).ttft_s()
    slowest = seconds / pp
    expected = seconds + rate * slowest**2 / (2 * (1 - rate * slowest))
    batches = ttft.reshape(100, -1).mean(axis=1)
    error = batches.std(ddof=1) / np.sqrt(len(batches))
    assert abs(ttft.mean() - expected) < 3 * error
    assert abs(ttft.mean() / expected - 1) < 0.02
    assert workload.arrivals[0] < FS
