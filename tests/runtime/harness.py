"""Engines of a tiny model for tests: plans by shape, runs by request, executors that can be held or broken."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jdserve.core.plan import ColocatedInstance, DecodeInstance, HostedStage, Plan, PrefillInstance, Worker
from jdserve.core.request import Request, SamplingParams
from jdserve.models.checkpoint import LoadedModel
from jdserve.policy.commands import RunStep
from jdserve.runtime.engine import Engine
from jdserve.runtime.launch import jax_executors, make_engine
from jdserve.runtime.outputs import TokenLogprobs, TokenOutput
from jdserve.runtime.progress import Progress

LONGEST = 128

DEVICES = 4
"""That the tests have."""


def prefill(name: str = "p0", **changes: object) -> PrefillInstance:
    return PrefillInstance(**{"name": name, "pages": 40, "lm_tokens": 64, "max_batch": 4, **changes})  # type: ignore[arg-type]


def decode(name: str = "d0", **changes: object) -> DecodeInstance:
    return DecodeInstance(**{"name": name, "pages": 40, "max_num_seqs": 4, **changes})  # type: ignore[arg-type]


def colocated(mode: str = "prefill_first", **changes: object) -> ColocatedInstance:
    config = {"name": "c0", "mode": mode, "pages": 40, "token_budget": 64, "max_num_seqs": 4, **changes}
    return ColocatedInstance(**config)  # type: ignore[arg-type]


def plan_of(*instances: PrefillInstance | DecodeInstance | ColocatedInstance, longest: int = LONGEST) -> Plan:
    """A plan that gives each instance the next free devices, from the end where it decodes.

    So equal instances of different plans have the same devices, and programs that one test compiled serve another.
    """
    stages: list[HostedStage] = []
    low, high = 0, max(DEVICES, sum(instance.tp * instance.pp for instance in instances))
    for instance in instances:
        count = instance.tp * instance.pp
        if isinstance(instance, DecodeInstance):
            first = high = high - count
        else:
            first, low = low, low + count
        for stage in range(instance.pp):
            at = first + stage * instance.tp
            stages.append(HostedStage(instance.name, tuple(range(at, at + instance.tp)), stage))
    return Plan(model="tiny", max_model_len=longest, instances=instances, workers=(Worker("w0", tuple(stages)),))


@dataclass
class Answer:
    """Everything that an engine said about one request."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    news: int = 0

    def add(self, output: TokenOutput) -> None:
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish, self.error = output.finish, output.error
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.news += 1


async def answer(engine: Engine, request: Request) -> Answer:
    whole = Answer()
    async for output in engine.generate(request):
        whole.add(output)
    return whole


def request(id: str, prompt: Sequence[int], **params: object) -> Request:
    return Request(id, tuple(prompt), SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "seed": 7, **params}))  # type: ignore[arg-type]


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((31 * salt + 17 * index + index * index) % 1000 + 3 for index in range(length))


def engine_for(model: LoadedModel, plan: Plan, wrap: Callable | None = None, record: Path | None = None) -> Engine:
    make = jax_executors(plan, model, Progress())
    wrapped = (lambda instance: wrap(instance, make(instance))) if wrap else make
    return make_engine(plan, model.spec, wrapped, record=record, folder=model.folder)


def run(engine: Engine, body: Callable) -> object:
    """Start ``engine``, run the coroutine function ``body`` with it, check its pages, and close it."""

    async def whole() -> object:
        await engine.start()
        try:
            result = await body(engine)
            await settled(engine)
            return result
        finally:
            await engine.close()

    return asyncio.run(whole())


def serve(model: LoadedModel, plan: Plan, requests: Sequence[Request], **options: object) -> list[Answer]:
    """Serve all requests at once."""

    async def body(engine: Engine) -> list[Answer]:
        return list(await asyncio.gather(*(answer(engine, r) for r in requests)))

    return run(engine_for(model, plan, **options), body)  # type: ignore[return-value, arg-type]


def serve_alone(model: LoadedModel, requests: Sequence[Request]) -> list[Answer]:
    """The oracle of every topology: one colocated instance on one device, one request after another."""

    async def body(engine: Engine) -> list[Answer]:
        return [await answer(engine, one) for one in requests]

    return run(engine_for(model, plan_of(colocated(prefix_cache=False))), body)  # type: ignore[return-value]


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll ``condition``: state of other threads and processes has no event to wait for."""
    for _ in range(round(200 * timeout_s)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"did not happen within {timeout_s} s: {what}")


async def settled(engine: Engine) -> None:
    """Every request has ended, so no page has an owner and every page is in one place."""

    def idle() -> bool:
        return all(i.pages_owned == 0 and i.running == i.waiting == i.parked == 0 for i in engine.stats().instances)

    await until(idle, "idle, no page owned")
    for instance in engine.stats().instances:
        assert instance.pages_free + instance.pages_cached == instance.pages_total


class Held:
    """An executor whose launches (or pulls) wait for the test. ``reached`` says that one waits now."""

    def __init__(self, inner: object, *, launch: bool = False, pull: bool = False) -> None:
        self._inner = inner
        self._launch, self._pull = launch, pull
        self.reached = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def _wait(self) -> None:
        self.reached.release()
        assert self.go.acquire(timeout=20), "the test never let the executor go on"

    def launch(self, step: RunStep) -> object:
        if self._launch:
            self._wait()
        return self._inner.launch(step)  # type: ignore[attr-defined]

    def pull(self, pull: Callable) -> object:
        if self._pull and threading.current_thread().name.startswith("d"):  # not while warming up
            self._wait()
        return self._inner.pull(pull)  # type: ignore[attr-defined]


class Breaking:
    """An executor that raises when it is to launch step number ``at``."""

    def __init__(self, inner: object, at: int, *, lose_pool: bool = False) -> None:
        self._inner = inner
        self._at = at
        self._lose_pool = lose_pool
        self.intact = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def launch(self, step: RunStep) -> object:
        if step.step_id == self._at:
            self.intact = not self._lose_pool
            raise RuntimeError("injected fault")
        return self._inner.launch(step)  # type: ignore[attr-defined]
