"""The bodies that clients get, in the shapes of the OpenAI API. Structs, because a stream encodes one per token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jdserve.runtime.outputs import TokenLogprobs
from jdserve.server.errors import ErrorResponse
from jdserve.server.text import TokenText
from jdserve.server.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot spell."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How many prompt tokens came out of the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request: each prompt counts once however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Arrays with one entry per token.

    ``text_offset`` counts characters of the choice's own text, an echoed prompt included; in a stream, of the text of
    all its chunks.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One sample of one prompt, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(msgspec.Struct, frozen=True):
    """Answer of ``/v1/completions``, and one chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """A likely token; ``bytes`` is what it spells, also where that is no whole character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """The token that was chosen, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry per generated token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


ChatFinish = Literal["stop", "length", "tool_calls"]


class AnswerFunction(msgspec.Struct, frozen=True):
    """What the model calls; ``arguments`` is JSON text."""

    name: str
    arguments: str


class AnswerCall(msgspec.Struct, frozen=True):
    """A call of a tool; in a stream with its place among the calls of the choice."""

    id: str
    type: Literal["function"]
    function: AnswerFunction
    index: int | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's turn; it has no content where it only calls tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One sample."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class ChatCompletion(msgspec.Struct, frozen=True):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to the assistant's turn; the role comes with the first."""

    content: str
    role: Literal["assistant"] | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """What a chunk adds to one sample."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatChunk(msgspec.Struct, frozen=True):
    """One chunk of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(msgspec.Struct, frozen=True):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    """Answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[Model]


class Tokens(msgspec.Struct, frozen=True):
    """Answer of ``/tokenize``: ids, how many, and how many a request may have."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(msgspec.Struct, frozen=True):
    """Answer of ``/detokenize``."""

    prompt: str


class Version(msgspec.Struct, frozen=True):
    """Answer of ``/version``."""

    version: str


class Health(msgspec.Struct, frozen=True):
    """Answer of ``/health``; the other fields tell of a start-up that has not ended."""

    status: Literal["ok", "starting", "failed", "draining"]
    stage: str | UnsetType = UNSET
    progress: float | UnsetType | None = UNSET
    error: str | UnsetType = UNSET


ANSWERS = (Completion, ChatCompletion, ChatChunk, Model, ModelList, Tokens, Detokenized, Version, Health, ErrorResponse)
"""Every shape that an answer or an event may have."""


def schema_components() -> dict[str, Any]:
    """JSON schemas of all answers, by name, as OpenAPI components."""
    return msgspec.json.schema_components(ANSWERS, ref_template="#/components/schemas/{name}")[1]


def completion_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenText]) -> CompletionLogprobs:
    """The arrays for ``tokens``; null where a token has no log-probability (the first of a prompt)."""
    arrays = CompletionLogprobs([], [], [], [])
    for token in tokens:
        arrays.tokens.append(token.text)
        arrays.text_offset.append(token.offset)
        arrays.token_logprobs.append(None if token.logprobs is None else _finite(token.logprobs.logprob))
        arrays.top_logprobs.append(None if token.logprobs is None else _by_text(tokenizer, token.logprobs))
    return arrays


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenText]) -> ChatLogprobs:
    """One entry per token of ``tokens`` that has log-probabilities."""

    def entry(chosen: TokenLogprobs) -> ChatTokenLogprob:
        top = [TopLogprob(*_named(tokenizer, token, logprob)) for token, logprob in chosen.top]
        return ChatTokenLogprob(*_named(tokenizer, chosen.token, chosen.logprob), top)

    return ChatLogprobs([entry(token.logprobs) for token in tokens if token.logprobs is not None])


def _by_text(tokenizer: Tokenizer, position: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens, and the one that stands there; of two tokens of one spelling the likelier counts."""
    top: dict[str, float] = {}
    for token, logprob in (*position.top, (position.token, position.logprob)):
        top.setdefault(tokenizer.token_text(token), _finite(logprob))
    return top


def _named(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[str, float, list[int]]:
    return tokenizer.token_text(token), _finite(logprob), list(tokenizer.token_bytes(token))


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
