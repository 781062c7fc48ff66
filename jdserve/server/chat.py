"""``POST /v1/chat/completions``: a conversation gets its next turn."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jdserve.core.errors import InvalidRequest
from jdserve.server.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
    chat_logprobs,
)
from jdserve.server.generation import Sample
from jdserve.server.protocol import ChatBody
from jdserve.server.serving import Front, make_samples, respond, room_for
from jdserve.server.text import TextDelta
from jdserve.server.tokenizer import Tokenizer

NO_TEMPLATE = (
    "this model has no chat template: start the server with --chat-template FILE, or send a prompt to /v1/completions"
)


async def chat(front: Front, body: ChatBody, http: HttpRequest) -> Response:
    """Answer one request.

    Raises:
        ApiError, InvalidRequest, Overloaded, RequestFailed: there is no answer.
    """
    front.admit(body.model)
    body.check()
    prompt = await _token_ids(front.tokenizer, body)
    # None of the two is the default; 0 is a number.
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.sampling(
        max_tokens=room_for(front, prompt, asked, None, param=param, prompt_param="messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=None,
    )
    id, samples = make_samples(front, body, "chatcmpl", [(prompt, params)], continues=False)
    return await respond(front, http, body, id, samples, ChatDialect(front.tokenizer, bool(body.logprobs)))


class ChatDialect:
    """Spells answers as turns of a conversation."""

    def __init__(self, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def choice(self, sample: Sample, text: TextDelta) -> ChatChoice:
        """A choice of a whole answer."""
        finish = "stop" if text.finish == "stop" else "length"
        return ChatChoice(sample.index, ChatMessage("assistant", text.text), self._scores(text), finish)

    def piece(self, sample: Sample, delta: TextDelta) -> ChatChunkChoice:
        """A choice of a chunk; the role comes with the first."""
        finish = "stop" if delta.finish == "stop" else "length" if delta.finish else None
        role = UNSET if sample.begun else "assistant"
        return ChatChunkChoice(sample.index, ChatDelta(delta.text, role), self._scores(delta), finish)

    def answer(self, id: str, created: int, model: str, choices: list[Any], usage: Usage) -> ChatCompletion:
        """A whole answer."""
        return ChatCompletion(id, "chat.completion", created, model, choices, usage)

    def chunk(
        self, id: str, created: int, model: str, choices: list[Any], usage: Usage | UnsetType | None
    ) -> ChatChunk:
        """A chunk of a stream."""
        return ChatChunk(id, "chat.completion.chunk", created, model, choices, usage)

    def _scores(self, delta: TextDelta) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, delta.tokens) if self._logprobs else None


async def _token_ids(tokenizer: Tokenizer, body: ChatBody) -> tuple[int, ...]:
    """The conversation as token ids. The template writes the special tokens, so the tokenizer must not add its own."""
    if tokenizer.template is None:
        raise InvalidRequest(NO_TEMPLATE, param="messages", code="no_chat_template")
    messages = [message.for_template() for message in body.messages]
    text = await asyncio.to_thread(tokenizer.template.render, messages, body.add_generation_prompt is not False)
    return (await tokenizer.encode([text], add_special_tokens=False))[0]
