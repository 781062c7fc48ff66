"""The official client, as most people will meet the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from e2e.harness import Api

GREEDY = {"model": "tiny", "max_tokens": 12, "temperature": 0}
PROMPTS = ["The harbour was quiet", "Thunder", "Every Thursday the baker"]
MESSAGES = [{"role": "user", "content": "What is a harbour?"}]


@pytest.fixture
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "jdserve"


def test_completion_and_its_stream_agree(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPTS[0], **GREEDY)
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(
        client.completions.create(prompt=PROMPTS[0], stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chat_and_its_stream_agree(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)  # type: ignore[call-overload]
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))  # type: ignore[call-overload]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_samples_differ_and_a_seed_brings_them_back(client: openai.OpenAI) -> None:
    def sampled(seed: int) -> list[str]:
        answer = client.completions.create(
            model="tiny",
            prompt=PROMPTS[0],
            max_tokens=16,
            temperature=1,
            n=4,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 64
        return [choice.text for choice in answer.choices]

    first = sampled(11)
    assert len(set(first)) == 4
    assert sampled(11) == first
    assert sampled(12) != first


def test_logprobs(client: openai.OpenAI) -> None:
    legacy = client.completions.create(prompt=PROMPTS[1], logprobs=3, **GREEDY)
    scores, usage = legacy.choices[0].logprobs, legacy.usage
    assert scores is not None
    assert usage is not None
    assert scores.tokens is not None
    assert scores.token_logprobs is not None
    assert scores.top_logprobs is not None
    assert len(scores.tokens) == len(scores.token_logprobs) == usage.completion_tokens
    for score, top in zip(scores.token_logprobs, scores.top_logprobs, strict=True):
        assert score == max(top.values())  # greedy
    answer = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)  # type: ignore[call-overload]
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in content)


def test_a_list_of_prompts(client: openai.OpenAI) -> None:
    together = client.completions.create(prompt=PROMPTS, **GREEDY)
    alone = [client.completions.create(prompt=prompt, **GREEDY) for prompt in PROMPTS]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]


def test_async_client_streams_side_by_side(api: Api, client: openai.OpenAI) -> None:
    async def text_of(many: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await many.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def body() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=60) as many:
            chat = await many.chat.completions.create(messages=MESSAGES, **GREEDY)  # type: ignore[call-overload]
            assert chat.choices[0].message.content is not None
            return list(await asyncio.gather(*(text_of(many, prompt) for prompt in PROMPTS)))

    alone = [client.completions.create(prompt=prompt, **GREEDY).choices[0].text for prompt in PROMPTS]
    assert asyncio.run(body()) == alone


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_typed(client: openai.OpenAI, change: dict, param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**({"prompt": "hi", **GREEDY, "stream": stream} | change))
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(prompt="hi", **(GREEDY | {"model": "gpt-4"}))
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
