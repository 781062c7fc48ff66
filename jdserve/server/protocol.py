"""The bodies that clients send, as strict pydantic models, and their way to sampling parameters.

Names are those of the OpenAI API; the last group of :class:`CommonBody` is vLLM's, ``timeout`` (seconds) our own.
``null`` is as good as absent. An unknown parameter is refused: one that does nothing would hide a mistake.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, Any, Literal

from pydantic import Field

from jdserve.core.errors import InvalidRequest
from jdserve.core.request import MAX_SEED, Guide, SamplingParams
from jdserve.server.guidance import GuidedBody
from jdserve.server.tools import MAX_TOOLS, CalledTool, Tool, ToolChoice, guide_of
from jdserve.server.words import Body, Int, Text

MAX_N = 128
"""Most samples of one prompt (the bound of OpenAI's API)."""

MAX_CHOICES = 2048
"""Most samples of one HTTP request."""

MAX_TIMEOUT_S = 24 * 3600
"""Longest ``timeout`` of a request, in seconds."""

MAX_PRIORITY = 1 << 31

MAX_STOPS = 16
"""Most stop strings of a request; OpenAI takes 4."""

MAX_STOP = 1024
"""Most characters of a stop string."""


StopText = Annotated[Text, Field(max_length=MAX_STOP)]

TokenId = int
"""Unbounded here: the model's vocabulary bounds it, with a message that names the id."""


TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


class TokenizeBody(Body):
    """A text whose token ids are asked for."""

    model: Text
    prompt: Text
    add_special_tokens: bool = True


class StreamOptions(Body):
    """Whether the last chunk of a stream carries the usage, and whether every chunk does."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class DetokenizeBody(Body):
    """Token ids whose text is asked for."""

    model: Text
    tokens: TokenIds


class CommonBody(GuidedBody, Body):
    """What completions and chat completions have in common."""

    model: Text
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: Int | None = None
    metadata: dict[str, str] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    presence_penalty: float | None = None
    seed: Int | None = None
    service_tier: str | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None

    cache_salt: Text | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: float | None = None
    min_tokens: Int | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Int] | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    top_k: Int | None = None

    def check_stream_options(self) -> None:
        """Check what the types alone cannot.

        Raises:
            InvalidRequest: options of a stream without one, or usage in every chunk but not in the last.
        """
        if self.stream_options is None:
            return
        if not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        if self.stream_options.continuous_usage_stats and not self.stream_options.include_usage:
            raise InvalidRequest("continuous_usage_stats needs include_usage to be true", param="stream_options")

    def sampling(
        self, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None, guide: Guide | None
    ) -> SamplingParams:
        """Sampling parameters without a seed, not yet validated.

        Raises:
            InvalidRequest: a key of ``logit_bias`` is no token id.
        """
        given = {
            "temperature": self.temperature,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # vLLM's clients say -1 for "all"
            "top_p": self.top_p,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": self.ignore_eos,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "min_tokens": self.min_tokens,
        }
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias={_token_id(key): value for key, value in (self.logit_bias or {}).items()},
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            guide=guide,
            **{name: value for name, value in given.items() if value is not None},
        )


class CompletionBody(CommonBody):
    """Body of ``POST /v1/completions``. Without ``max_tokens`` at most 16 tokens are generated."""

    prompt: (
        Text
        | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_CHOICES)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_CHOICES)]
    )
    best_of: Int | None = None
    echo: bool | None = None
    logprobs: Int | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Check what the types alone cannot.

        Raises:
            InvalidRequest: a parameter asks for what is not offered, or two do not go together.
        """
        self.check_stream_options()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest(f"best_of must equal n ({self.n or 1}), got {self.best_of}", param="best_of")
        if self.suffix is not None:
            raise InvalidRequest("suffix is not supported", param="suffix")


class TextPart(Body):
    """A piece of a message's content. Only text is taken."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """One message of a conversation. An answer's message may be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    refusal: None = None
    tool_call_id: Text | None = None
    tool_calls: list[CalledTool] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template reads it; the parts of its content one per line."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        calls = [call.for_template() for call in self.tool_calls] if self.tool_calls else None
        optional = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls}
        role = "system" if self.role == "developer" else self.role  # OpenAI's new name, which templates do not know
        return {"role": role, "content": text} | {k: v for k, v in optional.items() if v is not None}


class ChatBody(CommonBody):
    """Body of ``POST /v1/chat/completions``. Without a maximum, the answer may fill the context."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    max_completion_tokens: Int | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    top_logprobs: Int | None = None

    def check(self) -> None:
        """Check what the types alone cannot.

        Raises:
            InvalidRequest: a parameter asks for what is not offered, or two do not go together.
        """
        self.check_stream_options()
        for index, message in enumerate(self.messages):
            if message.content is None and not message.tool_calls:
                raise InvalidRequest(f"messages[{index}].content is required", param="messages")
            if message.tool_calls and message.role != "assistant":
                raise InvalidRequest(f"messages[{index}].tool_calls belong to the assistant", param="messages")
        self._check_tools()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one", param="max_tokens")

    def _check_tools(self) -> None:
        choice = self.tool_choice
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools holds two functions of one name", param="tools")
        if not names and choice not in (None, "none"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            raise InvalidRequest(f"tools holds no function {choice.function.name}", param="tool_choice")

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def guide(self) -> tuple[Guide, str] | None:
        """As :class:`GuidedBody` says; a call that is required is a guide too."""
        asked = super().guide()
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return asked
        if asked is not None:
            raise InvalidRequest(f"tool_choice and {asked[1]} both guide the text; give one", param=asked[1])
        named = choice.function.name if isinstance(choice, ToolChoice) else None
        wanted = [tool for tool in self.offered if named in (None, tool.function.name)]
        several = named is None and self.parallel_tool_calls is not False
        return guide_of(wanted, several=several), "tools"


def sample_seed(seed: int | None, sample: int) -> int:
    """Seed of the ``sample``-th sample of a prompt: ``seed`` itself for the first, a fixed function of both after it.

    Without a seed it is drawn.
    """
    if seed is None:
        return secrets.randbits(63)
    if sample == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample}".encode()).digest()[:8]) & MAX_SEED


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 19):
        raise InvalidRequest(f"logit_bias has the key {key!r}, which is no token id", param="logit_bias")
    return int(key)
