"""Pipeline stages: the same tokens as one device, several steps in flight, faults that stay with their step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jdserve.core.plan import Plan
from jdserve.core.request import Request
from jdserve.models.checkpoint import LoadedModel
from jdserve.models.load import Place, load_params
from jdserve.policy.commands import Chunk, RunStep
from jdserve.policy.record import replay
from jdserve.runtime.drivers import Bubbles, SpanningBubbles, StageThread
from jdserve.runtime.engine import Engine
from jdserve.runtime.executor import JaxExecutor
from jdserve.runtime.launch import jax_executors, make_engine
from jdserve.runtime.progress import Progress
from runtime.harness import (
    Answer,
    answer,
    colocated,
    decode,
    engine_for,
    plan_of,
    prefill,
    prompt,
    request,
    run,
    serve_alone,
    settled,
)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"prompt_logprobs": 2, "logprobs": 1},
    {"temperature": 0.9, "seed": 11, "top_k": 40},
    {"temperature": 0.7, "seed": 15, "presence_penalty": 0.8, "frequency_penalty": 0.6, "logprobs": 0},
    {"temperature": 0.6, "seed": -3, "repetition_penalty": 1.2, "prompt_logprobs": 0},
    {"logit_bias": {5: 60.0, 9: 60.0}, "frequency_penalty": 1.5},
    {"temperature": 1.0, "seed": 14, "min_p": 0.05},
]
"""Several of them at once, so that each stage has work while the others run."""


def workload() -> list[Request]:
    """50 prompts: each kind of options, and greedy ones."""
    lengths = (1, 16, 33, 17, 5, 30, 15, 40)
    return [
        request(f"r{n}", prompt(lengths[n % 8] + n // 8, n), max_tokens=12, **(OPTIONS[n % 8] if n < 32 else {}))
        for n in range(50)
    ]


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> list[Answer]:
    """The oracle: one device, requests one by one."""
    return serve_alone(model, workload())


def same(ours: list[Answer], oracle: list[Answer]) -> None:
    for one, other in zip(ours, oracle, strict=True):
        assert one.tokens == other.tokens
        assert one.finish == other.finish
        entries = (*one.logprobs, *(one.prompt_logprobs or ()))
        wanted = (*other.logprobs, *(other.prompt_logprobs or ()))
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        assert [(e.token, e.rank) for e in entries] == [(e.token, e.rank) for e in wanted]
        assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in wanted], abs=1e-4)
        assert [[t for t, _ in e.top] for e in entries] == [[t for t, _ in e.top] for e in wanted]


def crowded(model: LoadedModel, plan: Plan, record: Any = None) -> Engine:
    """An engine for a plan with more devices than the tests have: numbers wrap around."""
    have = jax.devices()

    def make(instance: Any) -> JaxExecutor:
        def load(layers: range, heads: int, place: Place) -> Any:
            return load_params(model, layers, kv_heads=heads, dtype=plan.dtype, place=place)

        devices = [
            [have[number % len(have)] for _, number in plan.devices(instance.name, stage)]
            for stage in range(instance.pp)
        ]
        return JaxExecutor(plan, instance, model.spec, devices, load)

    return make_engine(plan, model.spec, make, record=record)


FURTHER = ("chunked PP2", "PP2-PP2")
"""Left out unless they are asked for."""

TOPOLOGIES: dict[str, Plan] = {
    "colocated PP2": plan_of(colocated(pp=2)),
    "chunked PP2": plan_of(colocated("chunked", pp=2, token_budget=32)),
    "PP2-PP1": plan_of(prefill(pp=2), decode()),
    "PP1-PP2": plan_of(prefill(), decode(pp=2)),
    "PP2xTP2-PP1": plan_of(prefill(pp=2, tp=2), decode()),
    "PP2-PP2": plan_of(prefill(pp=2, max_batch=2), decode(pp=2)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in FURTHER else []) for name in TOPOLOGIES]
)
def test_every_topology_gives_the_tokens_of_one_device(
    name: str, model: LoadedModel, alone: list[Answer], tmp_path
) -> None:
    plan = TOPOLOGIES[name]

    async def body(engine: Engine) -> tuple[list[Answer], Any]:
        answers = list(await asyncio.gather(*(answer(engine, one) for one in workload())))
        return answers, engine.stats()

    answers, stats = run(crowded(model, plan, tmp_path), body)  # type: ignore[misc]
    same(answers, alone)
    assert stats.recompilations == 0
    for instance, counts in zip(plan.instances, stats.instances, strict=True):
        assert (counts.bubble_s > 0) == (instance.pp > 1)
        assert counts.bubble_s <= (instance.pp - 1) * counts.busy_s
    for log in tmp_path.glob("*.jsonl"):
        assert replay(log.read_text().splitlines()).identical


class Gated:
    """An executor whose last stage begins nothing before two steps are launched, neither of which can have ended."""

    def __init__(self, inner: JaxExecutor) -> None:
        self._inner = inner
        self._launched = 0
        self.together = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def warm_up(self, progress: Callable[[float], None]) -> None:
        self._inner.warm_up(progress)
        stage: Any = self._inner._stages.stages[1]
        run = stage.run

        def gated(*args: Any) -> Any:
            assert self.together.wait(20), "the steps are not in flight together"
            return run(*args)

        stage.run = gated

    def launch(self, step: RunStep) -> Any:
        pending = self._inner.launch(step)
        self._launched += 1
        if self._launched == 2:
            self.together.set()
        return pending


def test_micro_batches_are_in_flight_together(model: LoadedModel, alone: list[Answer]) -> None:
    """Without a second step in flight the last stage would wait for ever for the first one."""
    plan = TOPOLOGIES["PP2-PP2"]
    gated: list[Gated] = []

    def wrap(instance: Any, executor: Any) -> Gated:
        gated.append(Gated(executor))
        return gated[-1]

    async def body(engine: Engine) -> list[Answer]:
        return list(await asyncio.gather(*(answer(engine, one) for one in workload())))

    same(run(engine_for(model, plan, wrap), body), alone)  # type: ignore[arg-type]
    assert all(one.together.is_set() for one in gated)


@pytest.mark.parametrize("kind", ["decode", pytest.param("colocated", marks=pytest.mark.long)])
def test_preempted_requests_end_with_the_same_tokens(kind: str, model: LoadedModel) -> None:
    """6 pages of 16, three requests that grow to 3 pages each."""
    small = {"pages": 6, "watermark": 0.0, "pp": 2}
    plans = {
        "decode": plan_of(prefill(), decode(**small), longest=64),
        "colocated": plan_of(colocated(prefix_cache=False, **small), longest=64),
    }
    wanted = [
        request(name, prompt(20, index), max_tokens=26, **OPTIONS[4 if name == "b" else 1])
        for index, name in enumerate("abc")
    ]

    async def body(engine: Engine) -> tuple[list[Answer], int]:
        answers = list(await asyncio.gather(*(answer(engine, one) for one in wanted)))
        return answers, sum(instance.preemptions for instance in engine.stats().instances)

    ours, preemptions = run(engine_for(model, plans[kind]), body)  # type: ignore[misc]
    assert preemptions >= 1
    same(ours, serve_alone(model, wanted))


@pytest.mark.parametrize("at", [0, 5])
def test_an_error_on_the_second_stage_fails_the_step_only(at: int, model: LoadedModel, alone: list[Answer]) -> None:
    def wrap(instance: Any, executor: Any) -> Any:
        stage, calls = executor._stages.stages[1], []
        real, warm_up = stage.run, executor.warm_up

        def broken(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == at + 1:
                raise RuntimeError("injected fault")
            return real(*args)

        def armed(progress: Callable[[float], None]) -> None:
            warm_up(progress)
            stage.run = broken

        executor.warm_up = armed
        return executor

    async def body(engine: Engine) -> None:
        broken = await answer(engine, request("a", prompt(20), max_tokens=12))
        assert (broken.finish, broken.error) == ("error", "RuntimeError: injected fault")
        assert len(broken.tokens) == at
        await settled(engine)
        same(list(await asyncio.gather(*(answer(engine, one) for one in workload()))), alone)
        assert engine.ready

    run(engine_for(model, TOPOLOGIES["colocated PP2"], wrap), body)


def executor_of(model: LoadedModel) -> JaxExecutor:
    plan = plan_of(colocated(pp=2, max_num_seqs=1), longest=32)
    executor = jax_executors(plan, model, Progress())(plan.instances[0])
    assert isinstance(executor, JaxExecutor)
    executor.warm_up(lambda share: None)
    return executor


def test_a_stage_that_is_gone_is_an_error_and_no_hang(model: LoadedModel) -> None:
    executor = executor_of(model)
    executor.admit(request("a", prompt(3), max_tokens=2), (1,))
    assert executor.intact
    executor._stages.drivers[1].close()
    with pytest.raises(RuntimeError):
        executor.launch(RunStep(0, (Chunk("a", 0, 3, (1,), last=True),)))
    assert not executor.intact
    executor.close()


def test_a_failed_admission_costs_the_instance(model: LoadedModel) -> None:
    """Nobody waits for an admission, so its error must not be lost."""
    executor = executor_of(model)
    stage: Any = executor._stages.stages[1]

    def broken(row: object) -> None:
        raise RuntimeError("injected fault")

    stage.admit = broken
    executor.admit(request("a", prompt(3), max_tokens=2), (1,))
    assert not executor.intact
    with pytest.raises(RuntimeError, match="a pipeline stage is lost: injected fault"):
        executor.launch(RunStep(0, (Chunk("a", 0, 3, (1,), last=True),)))
    executor.close()


def test_closing_a_stage_thread_ends_what_waits() -> None:
    thread = StageThread("stage", Bubbles(2))
    go = threading.Event()
    first = thread.submit(lambda: go.wait(20))
    second = thread.submit(lambda: 1)
    closer = threading.Thread(target=thread.close)
    closer.start()
    while not second.cancelled():
        closer.join(0.001)
    go.set()
    assert first.result() is True
    closer.join()
    with pytest.raises(RuntimeError):
        thread.submit(lambda: 1)


def test_bubbles_are_the_idle_time_of_stages_beside_one_that_runs() -> None:
    now = 0.0
    bubbles = Bubbles(3, lambda: now)
    now = 5.0
    first, second = bubbles.running(), bubbles.running()
    first.__enter__()
    now = 7.0  # two stages idle
    second.__enter__()
    now = 10.0  # one stage idles
    first.__exit__(None, None, None)
    now = 11.0  # two stages idle
    second.__exit__(None, None, None)
    now = 20.0  # all of them: no bubble, there is nothing to do
    with bubbles.running():
        assert bubbles.seconds == 2 * 2 + 3 * 1 + 1 * 2


def test_bubbles_of_stages_in_other_processes_are_what_they_did_not_run_while_a_launch_was_under_way() -> None:
    now = 0.0
    bubbles = SpanningBubbles(2, {0: 1, 1: 1, 2: 1}, lambda: now)  # the second stage is on two processes
    bubbles.launches.change(1)
    now = 4.0
    bubbles.hear(0, 3.0)  # 1 s idle
    bubbles.hear(1, 2.0)  # 2 s idle
    bubbles.hear(2, 2.0)
    assert bubbles.seconds == pytest.approx((1 + 2 + 2) * 2 / 3)
    bubbles.launches.change(-1)
    now = 9.0  # nothing to do
    for process, busy in enumerate((3.5, 2.0, 2.0)):  # the news of a step that ran until the end of the launch
        bubbles.hear(process, busy)
    assert bubbles.seconds == pytest.approx((1 + 2 + 2) * 2 / 3), "it only grows"
