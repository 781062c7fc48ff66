"""The samples of one HTTP request run side by side, until they end, one fails, or the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request as HttpRequest

from jdserve.core.errors import DeadlineExceeded, InvalidRequest, JdserveError, Overloaded, RequestFailed
from jdserve.core.request import Request
from jdserve.server.answers import PromptTokensDetails, Usage
from jdserve.server.engine_api import TextEngine
from jdserve.server.metrics import Metrics
from jdserve.server.text import TextDelta, TextStream
from jdserve.server.watch import Watch

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Sample:
    """One sample of one prompt.

    Attributes:
        index: of its choice in the answer.
        first_of_prompt: it speaks for its prompt in the usage.
        request: what the engine gets.
        text: what the engine's outputs make.
        produced: tokens up to the delta that was taken last.
        begun: whether anything of it has been sent; kept by whoever sends.
    """

    def __init__(self, index: int, first_of_prompt: bool, request: Request, text: TextStream) -> None:
        self.index = index
        self.first_of_prompt = first_of_prompt
        self.request = request
        self.text = text
        self.produced = 0
        self.begun = False


def usage(samples: Sequence[Sample]) -> Usage:
    """Usage so far, of the samples of one HTTP request."""
    firsts = [sample for sample in samples if sample.first_of_prompt]
    prompt = sum(len(sample.request.prompt) for sample in firsts)
    completion = sum(sample.produced for sample in samples)
    # The other samples of a prompt find what the first one computed, which is no earlier request's work.
    cached = sum(sample.text.cached_tokens for sample in firsts)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


_News = tuple[Sample, TextDelta] | Exception


async def generate(
    engine: TextEngine, metrics: Metrics, samples: Sequence[Sample], http: HttpRequest, timeout_s: float | None = None
) -> AsyncGenerator[tuple[Sample, TextDelta], None]:
    """Run ``samples`` and give their deltas as they come.

    When the generator ends, for whatever reason, no sample runs any more in the engine; and the request is counted as
    ok, aborted or failed. One that the engine refuses before its first token is left to whoever answers it.

    Args:
        engine: to run them.
        metrics: that count them.
        samples: of one HTTP request.
        http: its connection.
        timeout_s: longest time that they may take together.

    Raises:
        InvalidRequest, Overloaded: the engine refuses a sample.
        RequestFailed: a sample failed.
        DeadlineExceeded: they took too long.
        ClientGone: the client closed its connection.
    """
    news: asyncio.Queue[_News] = asyncio.Queue()
    watches = [metrics.watch(s.request, http.scope, first_of_prompt=s.first_of_prompt) for s in samples]
    tasks = [asyncio.create_task(_run(engine, s, watch, news)) for s, watch in zip(samples, watches, strict=True)]
    tasks.append(asyncio.create_task(_watch_client(http, news)))
    if timeout_s is not None:
        tasks.append(asyncio.create_task(_watch_clock(timeout_s, news)))
    live, begun, outcome = len(samples), False, "aborted"
    try:
        while live:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            sample, delta = item
            sample.produced = delta.produced
            live -= delta.finish is not None
            begun = True
            if not live:
                outcome = "ok"
            yield item
    except ClientGone:
        raise
    except Exception as error:
        outcome = "failed" if begun or not isinstance(error, InvalidRequest | Overloaded) else None
        raise
    finally:
        for task in tasks:
            task.cancel()
        if outcome is not None:
            metrics.count(outcome)
        metrics.end(watches, outcome)
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(engine: TextEngine, sample: Sample, watch: Watch, news: asyncio.Queue[_News]) -> None:
    try:
        async with contextlib.aclosing(engine.generate(sample.request)) as outputs:
            async for output in outputs:
                if output.finish in {"abort", "error"}:
                    kind = InvalidRequest if output.refused else RequestFailed
                    raise kind(output.error or "the service aborted the request")
                watch.heard(output)
                delta = sample.text.feed(output)
                watch.saw(delta)
                news.put_nowait((sample, delta))
                if delta.finish is not None:
                    return
        raise RequestFailed("the engine ended without saying why")
    except JdserveError as error:
        news.put_nowait(error)
    except Exception as error:  # whatever it is, the client must hear of it
        logger.exception("request %s failed", sample.request.id)
        news.put_nowait(RequestFailed(f"internal error: {type(error).__name__}"))


async def _watch_clock(timeout_s: float, news: asyncio.Queue[_News]) -> None:
    await asyncio.sleep(timeout_s)
    news.put_nowait(DeadlineExceeded(f"the request was not answered within its timeout of {timeout_s:g} s"))


async def _watch_client(http: HttpRequest, news: asyncio.Queue[_News]) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    news.put_nowait(ClientGone())
