"""``POST /v1/completions``: a prompt is continued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jdserve.core.errors import InvalidRequest
from jdserve.server.answers import Completion, CompletionChoice, CompletionLogprobs, Usage, completion_logprobs
from jdserve.server.generation import Sample
from jdserve.server.protocol import CompletionBody
from jdserve.server.serving import Front, make_samples, respond, room_for
from jdserve.server.text import TextDelta, TokenText, prompt_texts
from jdserve.server.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""As in OpenAI's API."""


async def complete(front: Front, body: CompletionBody, http: HttpRequest) -> Response:
    """Answer one request.

    Raises:
        ApiError, InvalidRequest, Overloaded, RequestFailed: there is no answer.
    """
    front.admit(body.model)
    body.check()
    prompts = await _token_ids(front.tokenizer, body.prompt)
    scored = body.logprobs if body.echo else None
    guide = await front.guide(body)
    jobs = [
        (
            prompt,
            body.sampling(
                max_tokens=room_for(
                    front, prompt, body.max_tokens, DEFAULT_MAX_TOKENS, param="max_tokens", prompt_param="prompt"
                ),
                logprobs=body.logprobs,
                prompt_logprobs=scored,
                guide=guide,
            ),
        )
        for prompt in prompts
    ]
    echo = [len(_text(prompt_texts(front.tokenizer, prompt, ()))) for prompt in prompts] if body.echo else None
    id, samples = make_samples(front, body, "cmpl", jobs, continues=True, echo=echo)
    return await respond(front, http, body, id, samples, CompletionDialect(front.tokenizer, body))


class CompletionDialect:
    """Spells answers as text completions."""

    def __init__(self, tokenizer: Tokenizer, body: CompletionBody) -> None:
        self._tokenizer = tokenizer
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs is not None

    def choice(self, sample: Sample, text: TextDelta) -> CompletionChoice:
        """A choice of a whole answer."""
        return self.piece(sample, text)

    def piece(self, sample: Sample, delta: TextDelta) -> CompletionChoice:
        """A choice of a chunk; an echoed prompt comes with the first."""
        echoed: list[TokenText] = []
        if self._echo and not sample.begun:
            echoed = prompt_texts(self._tokenizer, sample.request.prompt, sample.text.prompt_logprobs)
        logprobs: CompletionLogprobs | None = None
        if self._logprobs:
            logprobs = completion_logprobs(self._tokenizer, [*echoed, *delta.tokens])
        finish = "stop" if delta.finish == "stop" else "length" if delta.finish else None
        return CompletionChoice(sample.index, _text(echoed) + delta.text, logprobs, finish)

    def answer(self, id: str, created: int, model: str, choices: list[Any], usage: Usage) -> Completion:
        """A whole answer."""
        return self.chunk(id, created, model, choices, usage)

    def chunk(
        self, id: str, created: int, model: str, choices: list[Any], usage: Usage | UnsetType | None
    ) -> Completion:
        """A chunk of a stream."""
        return Completion(id, "text_completion", created, model, choices, usage)


async def _token_ids(
    tokenizer: Tokenizer, prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """The prompts of a body, each as token ids.

    Raises:
        InvalidRequest: there is none.
    """
    if not prompt and not isinstance(prompt, str):
        raise InvalidRequest("prompt is an empty list: at least one prompt is needed", param="prompt")
    if isinstance(prompt, str):
        return await tokenizer.encode([prompt], add_special_tokens=True)
    texts = [one for one in prompt if isinstance(one, str)]
    if texts:
        return await tokenizer.encode(texts, add_special_tokens=True)
    flat = tuple(one for one in prompt if isinstance(one, int))
    return [flat] if flat else [tuple(one) for one in prompt if not isinstance(one, str | int)]


def _text(tokens: Sequence[TokenText]) -> str:
    return "".join(token.text for token in tokens)
