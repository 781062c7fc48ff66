"""What both generating endpoints share: the checks before, and the two ways to answer, at once or as a stream."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jdserve.core.errors import InvalidRequest
from jdserve.core.request import Guide, Request, SamplingParams
from jdserve.server.answers import Usage
from jdserve.server.engine_api import TextEngine
from jdserve.server.errors import ApiError, from_exception, unavailable
from jdserve.server.generation import ClientGone, Sample, generate, usage
from jdserve.server.guidance import GuideChecks
from jdserve.server.metrics import Metrics
from jdserve.server.protocol import MAX_CHOICES, CommonBody, StreamOptions, sample_seed
from jdserve.server.text import TextDelta, TextStream, join
from jdserve.server.tokenizer import Tokenizer

CLIENT_CLOSED = 499
"""Status of an answer that nobody reads."""


class Front(msgspec.Struct, frozen=True):
    """What every handler needs.

    Attributes:
        engine: makes the tokens.
        tokenizer: of the model.
        served_name: the model's name for clients.
        metrics: of this app.
        guides: checks what texts must look like.
    """

    engine: TextEngine
    tokenizer: Tokenizer
    served_name: str
    metrics: Metrics
    guides: GuideChecks = msgspec.field(default_factory=GuideChecks)

    async def guide(self, body: CommonBody) -> Guide | None:
        """What the text of ``body`` must look like, compiled once to see that it can be.

        Raises:
            InvalidRequest: it cannot be.
            Overloaded: too many wait for the same.
        """
        asked = body.guide()
        if asked is None:
            return None
        await self.guides.check(*asked)
        return asked[0]

    def admit(self, model: str) -> None:
        """Check that work is taken, and that it is for the model at hand.

        Raises:
            ApiError: 503 or 404.
        """
        if self.engine.draining:
            raise unavailable("the server is draining and takes no new request")
        if not self.engine.started:
            raise unavailable("the server is not ready yet; /health tells how far it is")
        self.check_model(model)

    def check_model(self, model: str) -> None:
        """Check the name of the model.

        Raises:
            ApiError: 404.
        """
        if model != self.served_name:
            message = f"there is no model {model}; this server has {self.served_name}"
            raise ApiError(404, message, param="model", code="model_not_found")


class Dialect(Protocol):
    """How an endpoint spells its answers. ``created`` is in seconds of Unix time."""

    def choice(self, sample: Sample, text: TextDelta) -> Any:
        """A choice of a whole answer."""
        ...

    def piece(self, sample: Sample, delta: TextDelta) -> Any:
        """A choice of a chunk; ``sample.begun`` is False for its first."""
        ...

    def answer(self, id: str, created: int, model: str, choices: list[Any], usage: Usage) -> msgspec.Struct:
        """A whole answer."""
        ...

    def chunk(
        self, id: str, created: int, model: str, choices: list[Any], usage: Usage | UnsetType | None
    ) -> msgspec.Struct:
        """A chunk of a stream."""
        ...


def check_ids(ids: Sequence[int], vocab: int, param: str) -> None:
    """Check that ``ids`` are of a vocabulary of ``vocab`` tokens.

    Raises:
        InvalidRequest: one is not; names ``param``.
    """
    wrong = next((token for token in ids if not 0 <= token < vocab), None)
    if wrong is not None:
        raise InvalidRequest(f"{param} holds token id {wrong}, outside 0..{vocab - 1}", param=param)


def room_for(
    front: Front, prompt: Sequence[int], max_tokens: int | None, default: int | None, *, param: str, prompt_param: str
) -> int:
    """Tokens to generate after ``prompt``.

    Args:
        front: has the limit.
        prompt: token ids.
        max_tokens: what the client asked for, None where it did not.
        default: used then, as far as the context has room; None fills the context.
        param: what the client calls ``max_tokens``.
        prompt_param: what the client calls the prompt.

    Raises:
        InvalidRequest: the prompt is empty, holds an id outside the vocabulary, or does not fit together with
            ``max_tokens``.
    """
    if not prompt:
        raise InvalidRequest(f"{prompt_param} is empty: at least one token is needed", param=prompt_param)
    limit = front.engine.max_model_len
    check_ids(prompt, front.engine.spec.vocab, prompt_param)
    room = limit - len(prompt)
    if max_tokens is None:
        max_tokens = max(1, room if default is None else min(default, room))
    if max_tokens > room:
        message = (
            f"{prompt_param} has {len(prompt)} tokens and {param} is {max_tokens}, but both may be {limit} at most"
        )
        culprit = prompt_param if room < 1 else param
        raise InvalidRequest(message, param=culprit, code="context_length_exceeded")
    return max_tokens


def make_samples(
    front: Front,
    body: CommonBody,
    prefix: str,
    prompts: Sequence[tuple[tuple[int, ...], SamplingParams]],
    *,
    continues: bool,
    echo: Sequence[int] | None = None,
) -> tuple[str, list[Sample]]:
    """``body.n`` samples of each prompt, index = prompt * n + sample.

    Args:
        front: for its tokenizer and vocabulary.
        body: what the client sent.
        prefix: of the id.
        prompts: token ids and sampling parameters, the seed apart.
        continues: the text continues the prompt, rather than being a text of its own.
        echo: length of each prompt's text where it stands before the generated one.

    Returns:
        The id of the answer, and the samples.

    Raises:
        InvalidRequest: a sampling parameter is out of its bounds, or there are too many samples.
    """
    n = body.n or 1
    if n * len(prompts) > MAX_CHOICES:
        message = f"n times the number of prompts is {n * len(prompts)}, above the limit of {MAX_CHOICES}"
        raise InvalidRequest(message, param="n")
    id = f"{prefix}-{uuid.uuid4().hex}"
    samples: list[Sample] = []
    for which, (prompt, base) in enumerate(prompts):
        base.validate(front.engine.spec.vocab)
        for j in range(n):
            index = which * n + j
            params = msgspec.structs.replace(base, seed=sample_seed(body.seed, j))
            request = Request(
                f"{id}-{index}", prompt, params, cache_salt=body.cache_salt or "", priority=body.priority or 0
            )
            context = prompt if continues else ()
            text = TextStream(front.tokenizer, params, context=context, offset=echo[which] if echo else 0)
            samples.append(Sample(index, j == 0, request, text))
    return id, samples


async def respond(
    front: Front, http: HttpRequest, body: CommonBody, id: str, samples: list[Sample], dialect: Dialect
) -> Response:
    """Run ``samples`` and answer. A stream begins only when the engine has taken the request and given its first news.

    Raises:
        InvalidRequest, Overloaded, RequestFailed: before anything was sent.
    """
    deltas = generate(front.engine, front.metrics, samples, http, body.timeout)
    created = int(time.time())
    try:
        if body.stream:
            first = await anext(deltas)
            options = body.stream_options or StreamOptions()
            events = _events(front, id, created, samples, dialect, options, first, deltas)
            return EventStream(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        async with contextlib.aclosing(deltas):
            parts: dict[int, list[TextDelta]] = {sample.index: [] for sample in samples}
            async for sample, delta in deltas:
                parts[sample.index].append(delta)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED)
    choices = [dialect.choice(sample, join(parts[sample.index])) for sample in samples]
    answer = dialect.answer(id, created, front.served_name, choices, usage(samples))
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _events(
    front: Front,
    id: str,
    created: int,
    samples: list[Sample],
    dialect: Dialect,
    options: StreamOptions,
    first: tuple[Sample, TextDelta],
    deltas: AsyncGenerator[tuple[Sample, TextDelta], None],
) -> AsyncGenerator[bytes, None]:
    """The events of a stream: chunks, the usage where it is asked for, or an error; and then the end mark."""

    def chunk(sample: Sample, delta: TextDelta) -> bytes:
        piece = dialect.piece(sample, delta)
        sample.begun = True
        shown = UNSET
        if options.include_usage:
            shown = usage(samples) if options.continuous_usage_stats else None
        return _event(msgspec.json.encode(dialect.chunk(id, created, front.served_name, [piece], shown)))

    async with contextlib.aclosing(deltas):
        try:
            yield chunk(*first)
            async for sample, delta in deltas:
                yield chunk(sample, delta)
            if options.include_usage:
                last = dialect.chunk(id, created, front.served_name, [], usage(samples))
                yield _event(msgspec.json.encode(last))
        except ClientGone:
            return
        except Exception as error:  # the status is sent, so the stream itself must tell
            yield _event(from_exception(error).encode())
        yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class EventStream(StreamingResponse):
    """A streaming answer that closes its generator whatever becomes of the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102  (ASGI's)
        body = self.body_iterator
        assert isinstance(body, AsyncGenerator)
        async with contextlib.aclosing(body):
            await super().__call__(scope, receive, send)
