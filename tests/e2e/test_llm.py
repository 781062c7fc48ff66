"""``LLM``: the same engine as a Python object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from e2e.harness import CONTEXT, ids, small_plan
from jdserve.core.errors import InvalidRequest, Overloaded, RequestFailed
from jdserve.core.request import SamplingParams
from jdserve.llm import LLM

GREEDY = SamplingParams(max_tokens=12, temperature=0)
LONG = SamplingParams(max_tokens=CONTEXT - 8, temperature=0, ignore_eos=True)
TEXTS = ["The harbour was quiet", "Thunder", "Every Thursday the baker"]


@pytest.fixture(scope="module")
def cached(cache_home: Path) -> Iterator[None]:
    """Not the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_home))
        yield


@pytest.fixture(scope="module")
def shared(cached: None, checkpoint: Path) -> Iterator[LLM]:
    with LLM(small_plan(str(checkpoint))) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    settle(shared)


def settle(llm: LLM) -> None:
    """Poll until every page of every instance is free or cached: the instances have threads of their own."""
    deadline = time.monotonic() + 20
    while any(i.pages_owned or i.running or i.waiting or i.parked for i in llm.stats().instances):
        assert time.monotonic() < deadline, llm.stats()
        time.sleep(0.005)
    for instance in llm.stats().instances:
        assert instance.pages_free + instance.pages_cached == instance.pages_total


async def streamed(llm: LLM, prompt: str, params: SamplingParams) -> str:
    return "".join([delta.text async for delta in llm.stream(prompt, params)])


def test_text_a_list_and_token_ids_agree(llm: LLM) -> None:
    together = llm.generate(TEXTS, GREEDY)
    assert [one.finish in ("length", "stop") for one in together] == [True] * 3
    assert all(0 < len(one.tokens) <= 12 for one in together)
    for text, whole in zip(TEXTS, together, strict=True):
        (alone,) = llm.generate(text, GREEDY)
        (by_ids,) = llm.generate(whole.prompt, GREEDY)
        assert alone.text == by_ids.text == whole.text == "".join(token.text for token in whole.tokens)
    assert llm.generate([list(one.prompt) for one in together], GREEDY)[2].text == together[2].text
    assert llm.generate([]) == []


def test_params_for_each_prompt(llm: LLM) -> None:
    each = [msgspec.structs.replace(GREEDY, max_tokens=count, ignore_eos=True, logprobs=2) for count in (1, 2, 5)]
    answers = llm.generate(TEXTS, each)
    assert [len(answer.tokens) for answer in answers] == [1, 2, 5]
    assert all(len(token.logprobs.top) == 2 for answer in answers for token in answer.tokens if token.logprobs)
    (scored,) = llm.generate(TEXTS[0], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert len(scored.prompt_logprobs) == len(scored.prompt) - 1
    assert [entry.token for entry in scored.prompt_logprobs] == list(scored.prompt[1:])
    assert llm.stats().recompilations == 0


def test_a_seed_brings_a_sample_back(llm: LLM) -> None:
    hot = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    first, second = llm.generate([TEXTS[0], TEXTS[0]], hot)
    assert first.text == second.text
    unseeded = msgspec.structs.replace(hot, seed=None)
    assert len({answer.text for answer in llm.generate([TEXTS[0]] * 4, unseeded)}) > 1


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    (whole,) = llm.generate(TEXTS[0], msgspec.structs.replace(GREEDY, ignore_eos=True))
    stop = whole.text[-2:]
    (cut,) = llm.generate(TEXTS[0], msgspec.structs.replace(GREEDY, ignore_eos=True, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish == "stop"


def test_a_stream_is_the_whole_text(llm: LLM) -> None:
    (whole,) = llm.generate(TEXTS[0], GREEDY)
    assert asyncio.run(streamed(llm, TEXTS[0], GREEDY)) == whole.text


def test_leaving_a_stream_cancels(llm: LLM) -> None:
    steps = llm.stats().instances[1].steps

    async def leave() -> None:
        streams = [llm.stream(text, LONG) for text in TEXTS * 8]
        firsts = [asyncio.create_task(anext(stream)) for stream in streams]
        await firsts[0]
        for first in firsts[1:]:
            first.cancel()
        await asyncio.gather(*firsts, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        await asyncio.to_thread(settle, llm)  # on this loop's time: its end would cut off what was not cancelled

    asyncio.run(leave())
    assert llm.stats().instances[1].steps - steps < 3 * LONG.max_tokens, "24 requests in batches of 4 take 6 times that"


def test_inside_a_running_loop(llm: LLM) -> None:
    """As in a notebook: blocking in a thread, blocking on the loop itself, and streaming."""
    (whole,) = llm.generate(TEXTS[0], GREEDY)

    async def body() -> None:
        in_thread, piecewise = await asyncio.gather(
            asyncio.to_thread(llm.generate, TEXTS, GREEDY), streamed(llm, TEXTS[0], GREEDY)
        )
        assert in_thread[0].text == piecewise == whole.text
        assert llm.generate(TEXTS[0], GREEDY)[0].text == whole.text

    asyncio.run(body())


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ("", GREEDY, "prompt"),
        ([1, 1100], GREEDY, "prompt"),
        ([-1], GREEDY, "prompt"),
        (ids(CONTEXT, 1), GREEDY, "max_tokens"),
        ("hi", SamplingParams(temperature=-1), "temperature"),
        ("hi", SamplingParams(stop=("",)), "stop"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    llm: LLM, prompt: str | list[int], params: SamplingParams, named: str
) -> None:
    steps = [instance.steps for instance in llm.stats().instances]
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["fine", prompt], [GREEDY, params])
    assert caught.value.param == named
    with pytest.raises(InvalidRequest):
        asyncio.run(streamed(llm, prompt, params))  # type: ignore[arg-type]
    settle(llm)
    assert [instance.steps for instance in llm.stats().instances] == steps


def test_params_must_match_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="1 params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_a_model_alone_and_what_is_open_when_it_is_closed(cached: None, checkpoint: Path, llm: LLM) -> None:
    """A model without a plan gets one colocated instance; closing fails its open requests, and any later one."""
    stages: list[str] = []
    alone = LLM(checkpoint, progress=lambda stage, _: stages.append(stage))
    assert stages[-1] == "ready"
    assert [instance.role for instance in alone.stats().instances] == ["colocated"]
    assert alone.generate(TEXTS[0], GREEDY)[0].text == llm.generate(TEXTS[0], GREEDY)[0].text

    async def left_behind() -> None:
        streams = [alone.stream(text, LONG) for text in TEXTS * 8]
        tasks = [asyncio.create_task(anext(stream)) for stream in streams]
        await tasks[0]
        await asyncio.to_thread(alone.close)
        with pytest.raises(RequestFailed, match="stopped"):
            async for _ in streams[0]:
                pass
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams[1:]:
            await stream.aclose()

    asyncio.run(left_behind())
    alone.close()
    with pytest.raises(Overloaded, match="closed"):
        alone.generate("hi")
    with pytest.raises(Overloaded, match="closed"):
        asyncio.run(streamed(alone, "hi", GREEDY))
