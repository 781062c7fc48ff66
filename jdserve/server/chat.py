"""``POST /v1/chat/completions``: a conversation gets its next turn."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jdserve.core.errors import InvalidRequest
from jdserve.server.answers import (
    AnswerCall,
    AnswerFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinish,
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
from jdserve.server.tools import ToolCall, ToolChoice, ToolParser

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
        guide=await front.guide(body),
    )
    id, samples = make_samples(front, body, "chatcmpl", [(prompt, params)], continues=False)
    return await respond(front, http, body, id, samples, ChatDialect(front.tokenizer, body))


class ChatDialect:
    """Spells answers as turns of a conversation."""

    def __init__(self, tokenizer: Tokenizer, body: ChatBody) -> None:
        self._tokenizer = tokenizer
        self._logprobs = bool(body.logprobs)
        self._tools = [tool.function.name for tool in body.offered]
        self._named = isinstance(body.tool_choice, ToolChoice)
        self._parsers: dict[int, ToolParser] = {}  # by choice

    def choice(self, sample: Sample, text: TextDelta) -> ChatChoice:
        """A choice of a whole answer."""
        content, calls, finish = self._read(sample, text)
        called = [AnswerCall(call.id, "function", AnswerFunction(call.name, call.arguments)) for call in calls]
        message = ChatMessage("assistant", content or (None if calls else ""), tool_calls=called or UNSET)
        return ChatChoice(sample.index, message, self._scores(text), finish or "length")

    def piece(self, sample: Sample, delta: TextDelta) -> ChatChunkChoice:
        """A choice of a chunk; the role comes with the first."""
        role = UNSET if sample.begun else "assistant"
        before = self._parsers[sample.index].calls if sample.index in self._parsers else 0
        content, calls, finish = self._read(sample, delta)
        called = [
            AnswerCall(call.id, "function", AnswerFunction(call.name, call.arguments), before + place)
            for place, call in enumerate(calls)
        ]
        return ChatChunkChoice(sample.index, ChatDelta(content, role, called or UNSET), self._scores(delta), finish)

    def _read(self, sample: Sample, delta: TextDelta) -> tuple[str, list[ToolCall], ChatFinish | None]:
        """Content, calls and reason of ``delta``."""
        finish = "stop" if delta.finish == "stop" else "length" if delta.finish else None
        if not self._tools:
            return delta.text, [], finish
        parser = self._parsers.setdefault(sample.index, ToolParser(self._tools))
        content, calls = parser.feed(delta.text, end=finish is not None)
        # A function that was named is no decision of the model: the answer to that ends as any other, as OpenAI's does.
        return content, calls, "tool_calls" if finish == "stop" and parser.calls and not self._named else finish

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
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered]
    if tools and not tokenizer.template.takes_tools:
        raise InvalidRequest("the chat template of this model has no place for tools", param="tools")
    ends = body.add_generation_prompt is not False
    text = await asyncio.to_thread(tokenizer.template.render, messages, ends, tools)
    return (await tokenizer.encode([text], add_special_tokens=False))[0]
