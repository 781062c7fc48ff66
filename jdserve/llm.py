"""``LLM``: the engine of the server as a Python object, for scripts and notebooks.

The engine lives on an event loop in a thread of its own, so it works where a loop runs already (a notebook) and where
none does (a script). Prompts given together are served together, with continuous batching.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jdserve.core.errors import InvalidRequest, Overloaded, RequestFailed
from jdserve.core.plan import ColocatedInstance, HostedStage, Plan, Worker
from jdserve.core.request import MAX_SEED, FinishReason, Request, SamplingParams
from jdserve.core.spec import ModelSpec
from jdserve.models.checkpoint import LoadedModel
from jdserve.models.load import resolve
from jdserve.runtime.engine import Engine
from jdserve.runtime.launch import jax_executors, make_engine
from jdserve.runtime.outputs import EngineStats, TokenLogprobs
from jdserve.runtime.progress import Progress
from jdserve.server.text import TextDelta, TextStream, TokenText, join
from jdserve.server.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""

T = TypeVar("T")


class Completion(msgspec.Struct, frozen=True):
    """What was generated for one prompt.

    Attributes:
        prompt: token ids.
        text: generated, cut at a stop string.
        tokens: generated ids with their texts and, where asked for, log-probabilities.
        finish: why the text ended.
        prompt_logprobs: of every prompt token but the first, where asked for.
        cached_tokens: prompt tokens whose KV came out of the prefix cache.
    """

    prompt: tuple[int, ...]
    text: str
    tokens: tuple[TokenText, ...]
    finish: FinishReason
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0


def colocated_plan(model: str, spec: ModelSpec) -> Plan:
    """One colocated instance on the first device: the plan of a model that is given without one."""
    longest = min(2048, spec.context)
    instance = ColocatedInstance(
        name="c0", mode="prefill_first", token_budget=longest, max_num_seqs=16, pages=max(1024, -(-longest // 16))
    )
    worker = Worker(name="w0", stages=(HostedStage(instance="c0", devices=(0,)),))
    return Plan(model=model, max_model_len=longest, instances=(instance,), workers=(worker,))


class LLM:
    """A model, loaded and compiled, ready to generate. Use it in a ``with`` block, or :meth:`close` it.

    Args:
        plan_or_model: a :class:`Plan`, the path of a ``plan.json``, or a model: ``smollm2-135m-instruct`` (built in), a
            Hugging Face folder, a ``.gguf`` file, a folder of ``jdserve convert``, or an id of the Hugging Face hub. A
            model alone is served by one colocated instance.
        progress: told of the stages of the start and the share of each that is done.

    Raises:
        InvalidPlan: the plan is refused.
        CheckpointError: the model cannot be loaded.
    """

    def __init__(
        self,
        plan_or_model: Plan | str | Path = "smollm2-135m-instruct",
        *,
        progress: Callable[[str, float | None], None] | None = None,
    ) -> None:
        told = Progress(progress)
        if isinstance(plan_or_model, str | Path) and not str(plan_or_model).endswith(".json"):
            model = resolve(plan_or_model, told)
            plan = colocated_plan(str(plan_or_model), model.spec)
        else:
            plan = plan_or_model if isinstance(plan_or_model, Plan) else Plan.load(plan_or_model)
            model = resolve(plan.model, told, weights=plan.weights, plugin=plan.model_plugin)
        self.plan = plan
        self.plan.check(model.spec)
        self.tokenizer = Tokenizer.read(model.folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jdserve-llm", daemon=True)
        self._thread.start()
        try:
            executors = jax_executors(self.plan, model, told)
            self._engine: Engine = self._wait(self._make(model, executors, told))
        except BaseException:
            self._end_loop()
            raise

    async def _make(self, model: LoadedModel, executors: Any, progress: Progress) -> Engine:
        engine = make_engine(self.plan, model.spec, executors, progress, folder=model.folder)
        await engine.start()
        return engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Generate for every prompt, all at once; blocks until the last one has ended.

        Args:
            prompts: one or several, as text or token ids.
            params: for all of them, or one for each.

        Raises:
            InvalidRequest: a prompt or a parameter is out of its bounds; nothing has been generated.
            RequestFailed: a request failed while it ran.
            Overloaded: the LLM is closed.
        """
        several = _several(prompts)
        given = params or SamplingParams()
        each = [given] * len(several) if isinstance(given, SamplingParams) else list(given)
        if len(each) != len(several):
            raise InvalidRequest(f"{len(each)} params for {len(several)} prompts", param="params")
        return self._wait(self._all(several, each))

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[TextDelta]:
        """Generate for one prompt, piece by piece, on whatever event loop the caller runs.

        Leaving the iteration early (``aclose``) cancels the request.

        Raises:
            InvalidRequest, RequestFailed, Overloaded: as :meth:`generate`.
        """
        here = asyncio.get_running_loop()
        pieces: asyncio.Queue[TextDelta | BaseException] = asyncio.Queue()

        async def run() -> None:
            try:
                request, text = await self._request(prompt, params or SamplingParams())
                async with contextlib.aclosing(self._deltas(request, text)) as deltas:
                    async for delta in deltas:
                        here.call_soon_threadsafe(pieces.put_nowait, delta)
            except Exception as error:
                here.call_soon_threadsafe(pieces.put_nowait, error)

        task = self._submit(run())
        try:
            while True:
                piece = await pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
                if piece.finish is not None:
                    return
        finally:
            task.cancel()

    def stats(self) -> EngineStats:
        """State of the instances now."""
        return self._engine.stats()

    def close(self) -> None:
        """Stop the instances and free their memory; open requests fail."""
        if self._thread.is_alive():
            self._wait(self._engine.drain(0.0))
            self._wait(self._engine.close())
            self._end_loop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _all(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Completion]:
        made = [await self._request(prompt, given) for prompt, given in zip(prompts, params, strict=True)]
        for request, _ in made:
            self._engine.check(request)
        return list(await asyncio.gather(*(self._one(request, text) for request, text in made)))

    async def _one(self, request: Request, text: TextStream) -> Completion:
        async with contextlib.aclosing(self._deltas(request, text)) as deltas:
            whole = join([delta async for delta in deltas])
        assert whole.finish is not None
        return Completion(
            request.prompt, whole.text, whole.tokens, whole.finish, text.prompt_logprobs, text.cached_tokens
        )

    async def _deltas(self, request: Request, text: TextStream) -> AsyncGenerator[TextDelta, None]:
        async with contextlib.aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                if output.finish in {"abort", "error"}:
                    raise RequestFailed(output.error or "the request was aborted")
                delta = text.feed(output)
                yield delta
                if delta.finish is not None:
                    return

    async def _request(self, prompt: Prompt, params: SamplingParams) -> tuple[Request, TextStream]:
        if isinstance(prompt, str):
            (ids,) = await self.tokenizer.encode([prompt], add_special_tokens=True)
        else:
            ids = tuple(prompt)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbelow(MAX_SEED))
        return Request(uuid.uuid4().hex, ids, params), TextStream(self.tokenizer, params, context=ids)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._submit(work).result()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            work.close()
            raise Overloaded("this LLM is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(token, int) for token in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]
