"""``/v1/completions`` against the scripted engine: prompts, limits, choices, streams."""

from __future__ import annotations

import json

import pytest
from fake_engine import FakeEngine, Service, assembled, byte_level, events

from jdserve.core.errors import InvalidRequest, Overloaded
from jdserve.server.protocol import sample_seed

PROMPT = "hello world"


def _error(answer, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 4000
    return error


# -- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[5], []]])
def test_empty_prompts_are_refused(prompt) -> None:
    service = Service()
    assert _error(service.complete(prompt))["param"] == "prompt"
    assert service.engine.requests == []
    assert service.complete("a").status_code == 200


def test_an_empty_text_is_a_prompt_where_the_tokenizer_adds_bos() -> None:
    service = Service(tokenizer=byte_level(bos=True))
    answer = service.complete("", max_tokens=1, ignore_eos=True)
    assert answer.status_code == 200
    assert service.engine.requests[0].prompt == (0,)
    assert _error(service.complete([[]]))["param"] == "prompt"


BAD_IDS = [-1, 300, 2**31, 2**63, 10**200, 1.0, 1.5, True, None]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_token_ids_are_refused(bad, nested: bool, stream: bool) -> None:
    service = Service()
    ids = [5, bad, 6]
    answer = service.complete([ids, [7]] if nested else ids, max_tokens=2, stream=stream)
    error = _error(answer)
    assert error["param"] == "prompt"
    assert "prompt" in error["message"]
    assert service.engine.requests == []


def test_every_form_of_prompt() -> None:
    service = Service()
    ids = service.ids("abc")
    for prompt, count in (("abc", 1), (["abc"], 1), (ids, 1), ([ids], 1), (["abc", "abc"], 2), ([ids, ids], 2)):
        answer = service.complete(prompt, max_tokens=len(ids)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["abc"] * count


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("length", "max_tokens", "param"),
    [(65, 1, "prompt"), (64, 1, "prompt"), (64, None, "prompt"), (60, 5, "max_tokens"), (1, 10**9, "max_tokens")],
)
def test_what_does_not_fit_is_refused(length: int, max_tokens: int | None, param: str, stream: bool) -> None:
    service = Service()
    error = _error(service.complete([[5] * length], max_tokens=max_tokens, stream=stream))
    assert error["param"] == param
    assert error["code"] == "context_length_exceeded"
    asked = 1 if max_tokens is None else max_tokens
    assert f"has {length} tokens and max_tokens is {asked}, but both may be 64" in error["message"]
    assert service.engine.requests == []


def test_what_just_fits_is_served() -> None:
    answer = Service().complete([[5] * 60], max_tokens=4).json()
    assert answer["usage"]["total_tokens"] == 64


def test_default_max_tokens_is_16_and_ends_with_the_context() -> None:
    service = Service()
    assert service.complete([[5]]).json()["usage"]["completion_tokens"] == 16
    assert service.complete([[5] * 60]).json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n", 1.0),
        ("temperature", -1),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_k", -2),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", 10**4000),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("logprobs", True),
        ("best_of", 2),
        ("suffix", "x"),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", "\ud800"),
        ("stop_token_ids", [300]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"300": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"5": 101}),
        ("seed", 2**63),
        ("stream_options", {"include_usage": 1}),
        ("presence_penalty", 10**400),
        ("frobnicate", 1),
        ("tools", []),
    ],
)
def test_bad_parameters_are_refused_before_any_event(field: str, value, stream: bool) -> None:
    service = Service()
    text = json.dumps({"model": "tiny", "prompt": "hi", "stream": stream, field: value})
    answer = service.call(
        "POST", "/v1/completions", content=text.encode(), headers={"Content-Type": "application/json"}
    )
    assert _error(answer)["param"] == field
    assert service.engine.requests == []
    assert service.outcomes() == {"rejected": 1}


def test_null_is_as_good_as_absent_and_harmless_fields_are_taken() -> None:
    service = Service()
    nulls = ("best_of", "echo", "logprobs", "suffix", "n", "stop", "seed", "stream_options", "temperature", "min_p")
    harmless = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "best_of": 1}
    assert service.complete(PROMPT, **dict.fromkeys(nulls) | harmless).status_code == 200


def test_parameters_reach_the_engine() -> None:
    service = Service()
    more = {
        "temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.1, "logit_bias": {"7": 2}, "stop": ["x", "y"], "stop_token_ids": [9],
        "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 2, "cache_salt": "s", "max_tokens": 3,
    }  # fmt: skip
    assert service.complete(PROMPT, **more).status_code == 200
    (request,) = service.engine.requests
    params = request.params
    assert request.cache_salt == "s"
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 0, 0.9, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.1)
    assert (dict(params.logit_bias), params.stop, params.stop_token_ids) == ({7: 2.0}, ("x", "y"), (9,))
    assert (params.include_stop_str_in_output, params.ignore_eos) == (True, True)
    assert (params.min_tokens, params.max_tokens) == (2, 3)


def test_seeds() -> None:
    service = Service()
    service.complete(["a", "b"], n=3, seed=41, max_tokens=1)
    by_index = {int(request.id.rsplit("-", 1)[1]): request.params.seed for request in service.engine.requests}
    seeds = [by_index[index] for index in range(6)]
    assert seeds[0] == 41
    assert seeds[3:] == seeds[:3] == [sample_seed(41, j) for j in range(3)]
    assert len(set(seeds)) == 3
    service.engine.requests.clear()
    service.complete("a", n=3, max_tokens=1)
    assert len({request.params.seed for request in service.engine.requests}) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(InvalidRequest("no such thing", param="top_k"), 400), (Overloaded("no room"), 503)]
)
def test_a_refusal_of_the_engine_comes_before_any_event(error: Exception, status: int, stream: bool) -> None:
    service = Service()
    service.engine.refuse = error
    answer = service.complete(PROMPT, stream=stream)
    assert _error(answer, status)["message"] == str(error)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert service.outcomes() == {"rejected": 1}


# -- choices and streams ---------------------------------------------------------------------------------------------


def _different_lengths(engine: FakeEngine) -> None:
    """A prompt of k tokens gets k-1 of them back and then the end."""
    engine.script = lambda request, i: 1 if i == len(request.prompt) - 1 else request.prompt[i]


PROMPTS = ["hello world, the dog", "fox", "brown jumps"]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts(stream: bool) -> None:
    service = Service()
    _different_lengths(service.engine)
    more = {"n": 2, "temperature": 0, "max_tokens": 20}
    singles = [service.complete(prompt, **more).json() for prompt in PROMPTS]
    expected = [choice["text"] for single in singles for choice in single["choices"]]
    assert expected == [service.text(service.ids(prompt)[:-1]) for prompt in PROMPTS for _ in range(2)]
    if stream:
        *chunks, last = events(service.complete(PROMPTS, stream=True, stream_options={"include_usage": True}, **more))
        choices = assembled(chunks)
        texts = [choices[index][0] for index in range(6)]
        assert {finish for _, finish in choices.values()} == {"stop"}
        ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert ends != sorted(ends), "the test wants choices that end out of order"
        usage = last["usage"]
    else:
        answer = service.complete(PROMPTS, **more).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        texts = [choice["text"] for choice in answer["choices"]]
        usage = answer["usage"]
    assert texts == expected
    lengths = [len(service.ids(prompt)) for prompt in PROMPTS]
    assert usage["prompt_tokens"] == sum(lengths)
    assert usage["completion_tokens"] == 2 * sum(lengths)
    assert usage["total_tokens"] == 3 * sum(lengths)


def test_shape_of_an_answer() -> None:
    answer = Service().complete(PROMPT, max_tokens=2).json()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert set(answer["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"] is None


def test_cached_tokens() -> None:
    service = Service()
    cold = service.complete(PROMPT, max_tokens=3).json()["usage"]
    assert cold["prompt_tokens_details"] == {"cached_tokens": 0}
    assert cold["completion_tokens"] == 3
    service.engine.cached_tokens = 2
    assert service.complete(PROMPT, n=2).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize(
    ("options", "asked", "running"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
@pytest.mark.parametrize("path", ["complete", "chat"])
def test_usage_in_a_stream(options, asked: bool, running: bool, path: str) -> None:
    service = Service()
    prompt = PROMPT if path == "complete" else [{"role": "user", "content": PROMPT}]
    chunks = events(getattr(service, path)(prompt, stream=True, stream_options=options, max_tokens=4))
    assert len({chunk["id"] for chunk in chunks}) == 1
    if not asked:
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
        return
    *chunks, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert all(chunk["choices"] for chunk in chunks)
    if running:
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4]
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    else:
        assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize(
    ("stream", "options"), [(False, {}), (None, {"include_usage": True}), (True, {"continuous_usage_stats": True})]
)
def test_stream_options_that_make_no_sense(stream, options) -> None:
    assert _error(Service().complete(PROMPT, stream=stream, stream_options=options))["param"] == "stream_options"


@pytest.mark.parametrize("failure", [RuntimeError("boom at /secret/path"), "error", "abort"])
def test_a_failure_in_the_middle_of_a_stream(failure) -> None:
    service = Service()
    service.engine.fail_after, service.engine.failure = 3, failure
    *chunks, last = events(service.complete(PROMPT, stream=True))
    assert len(chunks) == 3
    assert set(last) == {"error"}
    assert last["error"]["type"] == "server_error"
    assert "secret" not in last["error"]["message"]
    assert all(not choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])
    assert service.engine.running == set()
    assert service.outcomes() == {"failed": 1}


@pytest.mark.parametrize("after", [0, 2])
def test_what_only_shows_while_it_runs_may_be_the_requests_own_fault(after: int) -> None:
    service = Service()
    service.engine.fail_after, service.engine.failure, service.engine.refused = after, "error", True
    assert _error(service.complete(PROMPT))["type"] == "invalid_request_error"
    streamed = service.complete(PROMPT, stream=True)
    error = events(streamed)[-1]["error"] if after else _error(streamed)
    assert error["type"] == "invalid_request_error"


def test_a_failure_without_a_stream_cancels_the_other_samples() -> None:
    service = Service()
    service.engine.fail_after, service.engine.failure = 3, "error"
    service.engine.script = lambda request, i: 5
    answer = service.complete(PROMPT, n=3)
    assert _error(answer, 500)["message"] == "decode died"
    assert service.engine.running == set()
    assert service.outcomes() == {"failed": 1}
