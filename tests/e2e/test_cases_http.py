"""Faults that other serving systems had, tried on the real engine over HTTP."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from e2e.harness import CONTEXT, Api, events, ids, joined, refusal, text_of, until
from jdserve.core.spec import ModelSpec
from jdserve.models.hf_checkpoint import read_tensors
from jdserve.models.skeleton import skeleton

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPTS = ["The harbour was quiet", "Thunder rolled above", "Every Thursday the baker invents another pastry"]


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["fine", ""], [[5], []]])
def test_api_01_an_empty_prompt_is_refused(api: Api, prompt: Any) -> None:
    refusal(api.complete(prompt, max_tokens=4), "prompt")
    assert api.complete("fine", max_tokens=4).status_code == 200


@pytest.mark.parametrize("wrong", [-1, 1100, 2**31, 2**63, 999999999, 1.5, True])
def test_api_02_a_wrong_token_id_is_refused(api: Api, wrong: Any) -> None:
    for prompt in ([wrong], [[wrong]], [5, wrong], [[5], [6, wrong]]):
        refusal(api.complete(prompt, max_tokens=2), "prompt")
    assert api.complete([5, 6], max_tokens=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("length", "max_tokens"), [(CONTEXT + 1, 1), (CONTEXT, 1), (CONTEXT - 4, 100), (4, 10**9), (4, CONTEXT - 3)]
)
def test_api_05_too_long_is_refused_and_holds_no_page(api: Api, length: int, max_tokens: int, stream: bool) -> None:
    with api.counting("kv_transfers_total", 0), api.counting("pages_free", 0), api.counting("pages_owned", 0):
        message = refusal(api.complete(ids(length, 5), max_tokens=max_tokens, stream=stream))
    for number in (length, max_tokens, CONTEXT):
        assert str(number) in message.replace(",", "").split()


def test_api_05_the_context_may_be_filled(api: Api) -> None:
    answer = api.complete(ids(4, 5), max_tokens=CONTEXT - 4, **GREEDY).json()
    assert answer["usage"]["total_tokens"] == CONTEXT


@pytest.mark.parametrize("wrong", [{"n": 0}, {"temperature": -1}, {"top_p": 0}, {"max_tokens": -1}])
def test_api_08_a_bad_stream_is_refused_before_it_begins(api: Api, wrong: dict[str, Any]) -> None:
    (param,) = wrong
    with api.counting("requests_total", 1, outcome="rejected"):
        refusal(api.complete("hi", stream=True, **wrong), param)


# -- the shape of answers --------------------------------------------------------------------------------------------


def test_api_07_usage_comes_only_when_asked_for(api: Api) -> None:
    def chunks(**options: Any) -> list[dict[str, Any]]:
        return events(api.complete("Thunder", max_tokens=5, stream=True, **GREEDY, **options))

    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks(**options))
    *body, last = chunks(stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in body] == [None] * len(body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    *body, last = chunks(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in body]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 5
    refusal(api.complete("Thunder", stream_options={"include_usage": True}), "stream_options")


def test_api_10_prompts_times_samples(api: Api) -> None:
    lengths = dict(zip(PROMPTS, (3, 20, 11), strict=True))

    def single(prompt: str) -> dict[str, Any]:
        return api.complete(prompt, max_tokens=12, temperature=0).json()

    alone = [single(prompt) for prompt in lengths]
    whole = api.complete(PROMPTS, n=2, max_tokens=12, temperature=0).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == [one["choices"][0]["text"] for one in alone for _ in range(2)]
    assert whole["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    stream = events(api.complete(PROMPTS, n=2, max_tokens=12, temperature=0, stream=True))
    assert [text for _, text in sorted(joined(stream).items())] == texts


def test_api_10_samples_with_seeds_do_not_depend_on_company(api: Api) -> None:
    hot = {"n": 2, "max_tokens": 12, "temperature": 1, "seed": 3}
    together = [choice["text"] for choice in api.complete(PROMPTS, **hot).json()["choices"]]
    alone = [choice["text"] for prompt in PROMPTS for choice in api.complete(prompt, **hot).json()["choices"]]
    assert together == alone


# -- log-probabilities -----------------------------------------------------------------------------------------------


def test_api_04_a_prompt_can_be_scored_alone(api: Api) -> None:
    with api.counting("kv_transfers_total", 0), api.counting("generation_tokens_total", 0):
        answer = api.complete("a b c", echo=True, max_tokens=0, logprobs=1).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a b c", "length")
    scores = choice["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert len(scores) == answer["usage"]["prompt_tokens"]
    assert all(score < 0 for score in scores[1:])
    assert answer["usage"]["completion_tokens"] == 0


def dense_attend(
    layer: int, q: jax.Array, k: jax.Array, v: jax.Array, kv: Any, window: int | None = None
) -> tuple[jax.Array, Any]:
    """Causal attention without pages: the plainest there is."""
    wide_k, wide_v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, wide_k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones((len(q), len(q)), bool))[None]
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), wide_v), kv


def plain_logprobs(checkpoint: Path, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [T, vocab] after each token, by one forward pass over the checkpoint's own files."""
    spec, tensors = ModelSpec.read(checkpoint), read_tensors(checkpoint)
    structure = skeleton(spec, range(spec.layers), kv_heads=spec.kv_heads, dtype="float32")

    @jax.jit
    def run(leaves: list[jax.Array], tokens: jax.Array) -> jax.Array:
        model = structure.merge(leaves)
        x, _ = model.layers(model.embed(tokens), jnp.arange(len(tokens)), dense_attend, ())
        return jax.nn.log_softmax(model.logits(x))

    leaves = [jnp.asarray(tensors.read(parameter.name)) for parameter in structure.parameters]
    return np.asarray(run(leaves, jnp.asarray(tokens)))


@pytest.mark.parametrize("length", [2, 33, 100])
def test_api_13_scores_equal_a_plain_forward_pass(api: Api, checkpoint: Path, length: int) -> None:
    prompt = ids(length, length)
    params = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    (choice,) = api.complete([prompt], **params).json()["choices"]
    arrays = choice["logprobs"]
    assert {len(values) for values in arrays.values()} == {length + 1}
    assert "".join(arrays["tokens"]) == choice["text"]
    assert arrays["token_logprobs"][0] is None
    assert arrays["top_logprobs"][0] is None
    wanted = plain_logprobs(checkpoint, prompt)
    chosen = [*prompt[1:], int(wanted[-1].argmax())]
    np.testing.assert_allclose(arrays["token_logprobs"][1:], wanted[np.arange(length), chosen], atol=1e-3)
    best = [max(top.values()) for top in arrays["top_logprobs"][1:]]
    np.testing.assert_allclose(best, wanted.max(-1), atol=1e-3)


def test_api_14_each_endpoint_has_its_shape(api: Api) -> None:
    chat = api.chat("Thunder", max_tokens=6, logprobs=True, **GREEDY).json()
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == chat["usage"]["completion_tokens"] == 6
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["top_logprobs"] == []
    legacy = api.complete("Thunder", max_tokens=6, logprobs=2, **GREEDY).json()["choices"][0]["logprobs"]
    assert set(legacy) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert legacy["text_offset"][0] == 0
    assert all(a <= b for a, b in pairwise(legacy["text_offset"]))
    refusal(api.chat("Thunder", top_logprobs=2), "top_logprobs")


# -- text ------------------------------------------------------------------------------------------------------------


def test_tok_01_characters_spread_over_tokens_come_whole(api: Api, checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    halves = [tokenizer.token_to_id(half) for half in "Ã©"]  # how byte-level BPE spells 0xC3 and 0xA9
    params = {
        "max_tokens": 90,
        "temperature": 1,
        "seed": 4,
        "ignore_eos": True,
        "logprobs": True,
        "logit_bias": {str(half): 100 for half in halves},
    }
    whole = api.chat("Thunder", **params).json()["choices"][0]
    spelled = b"".join(bytes(entry["bytes"]) for entry in whole["logprobs"]["content"])
    assert set(spelled) == {0xC3, 0xA9}
    assert text_of(whole) == spelled.decode(errors="replace")
    chunks = events(api.chat("Thunder", stream=True, **params))
    assert joined(chunks)[0] == text_of(whole)
    assert any("é" in text_of(chunk["choices"][0]) for chunk in chunks)


def test_tok_01_an_echo_is_what_was_sent(api: Api) -> None:
    text = "삼겹살 🌶️ ก็ naïve"
    assert len(api.http.post("/tokenize", json={"model": "tiny", "prompt": text}).json()["tokens"]) > len(text)
    stream = events(api.complete(text, echo=True, max_tokens=2, stream=True, **GREEDY))
    assert joined(stream)[0].startswith(text)


def crossing(tokens: list[str]) -> tuple[int, str]:
    """A token and a string that ends in it, begins in the token before it, and is nowhere earlier in the text."""
    text = "".join(tokens)
    for index in range(2, len(tokens) - 3):
        before, here = tokens[index - 1], tokens[index]
        stop = before[-1:] + here[:1]
        end = len("".join(tokens[:index])) + 1
        if before and here and "\ufffd" not in stop and text.index(stop) + 2 == end:
            return index, stop
    raise AssertionError(f"no string crosses a border in {tokens}")


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
def test_stop_01_a_stop_string_over_two_tokens(api: Api, endpoint: str) -> None:
    ask = getattr(api, endpoint)
    score = {"logprobs": 0} if endpoint == "complete" else {"logprobs": True}
    free = ask(PROMPTS[0], max_tokens=60, **score, **GREEDY).json()["choices"][0]
    scores = free["logprobs"]
    tokens = scores["tokens"] if endpoint == "complete" else [entry["token"] for entry in scores["content"]]
    index, stop = crossing(tokens)
    wanted = text_of(free)[: text_of(free).index(stop)]
    chunks = events(
        ask(PROMPTS[0], max_tokens=60, stop=[stop], stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert joined(chunks) == {0: wanted}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == index + 1
    whole = ask(PROMPTS[0], max_tokens=60, stop=stop, **GREEDY).json()
    assert text_of(whole["choices"][0]) == wanted
    assert whole["usage"]["completion_tokens"] == index + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_03_the_stop_may_be_part_of_the_text(api: Api, include: bool, stream: bool) -> None:
    def ask(**params: Any) -> tuple[str, str, int]:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = api.complete(PROMPTS[0], max_tokens=60, include_stop_str_in_output=include, **params, **options)
        if stream:
            chunks = events(answer)
            usage = chunks[-1]["usage"]
            return joined(chunks)[0], chunks[-2]["choices"][0]["finish_reason"], usage["completion_tokens"]
        whole = answer.json()
        choice = whole["choices"][0]
        return choice["text"], choice["finish_reason"], whole["usage"]["completion_tokens"]

    free = api.complete(PROMPTS[0], max_tokens=60, logprobs=1, **GREEDY).json()["choices"][0]
    index, stop = crossing(free["logprobs"]["tokens"])
    cut = free["text"].index(stop)
    text = free["text"][: cut + len(stop) * include]
    assert ask(stop=[stop, "not there"], **GREEDY) == (text, "stop", index + 1)
    assert ask(stop=stop, stop_token_ids=[5], **GREEDY) == (text, "stop", index + 1)
    forced = {"temperature": 0, "logit_bias": {"500": 100}}
    text, finish, count = ask(stop_token_ids=[500], **forced)
    assert (bool(text), finish, count) == (include, "stop", 1)
    eos = {"temperature": 0, "logit_bias": {"2": 100}, "stop": ["<|im_end|>"]}
    text, finish, count = ask(**eos)
    assert (finish, count) == ("stop", 1)
    assert text in ("", "<|im_end|>" if include else "")


# -- guided texts ----------------------------------------------------------------------------------------------------


def test_a_guide_holds_through_two_instances(api: Api) -> None:
    """Sampled in one process, then in another; also where the neighbours are free, and in a stream."""
    params: dict[str, Any] = {"max_tokens": 40, "temperature": 1.4, "seed": 5}
    with api.counting("kv_transfers_total", 4):
        answer = api.complete("Thunder", guided_regex="(fox|owl){2,4}[0-9]{3}", n=4, **params).json()
        api.settle()
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(re.fullmatch("(fox|owl){2,4}[0-9]{3}", text) for text in texts), texts
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    stream = events(api.chat("Thunder", response_format=named, stream=True, **params | {"max_tokens": 100}))
    if stream[-1]["choices"][0]["finish_reason"] == "stop":
        assert json.loads(joined(stream)[0]) in ({"a": 1}, {"a": 2})
    assert joined(stream)[0].lstrip().startswith("{")
    refusal(api.complete("Thunder", guided_regex="(((", **params), "guided_regex")
    hostile = api.complete("Thunder", guided_regex="(a?){5000}a{5000}", **params)
    assert hostile.status_code == 400
    assert api.complete("Thunder", **params).status_code == 200


# -- leaving ---------------------------------------------------------------------------------------------------------


def raw_request(api: Api, body: dict[str, Any]) -> socket.socket:
    """A connection of our own with a request on it, so that it can be cut off at any point."""
    where = urlsplit(api.url)
    connection = socket.create_connection((where.hostname, where.port), timeout=60)  # type: ignore[arg-type]
    data = json.dumps({"model": "tiny", **GREEDY, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


def test_can_01_a_closed_socket_ends_the_work(api: Api) -> None:
    many = {"prompt": [5, 6, 7], "n": 64, "max_tokens": CONTEXT - 3, "stream": True}
    pulled = api.metric("kv_transfers_total")
    with api.counting("requests_total", 1, outcome="aborted"), api.counting("requests_total", 0, outcome="ok"):
        with raw_request(api, many) as connection:
            seen = b""
            while seen.count(b"data: ") < 2:
                seen += connection.recv(4096)
        api.settle()
    assert api.metric("kv_transfers_total") - pulled < 32, "most of the samples never came to decode"
    assert api.complete("fine", max_tokens=4).status_code == 200


def test_pd_01_leaving_while_prompts_wait_ends_them(api: Api) -> None:
    many = {"prompt": [ids(100, salt) for salt in range(500)], "max_tokens": 20}
    pulled = api.metric("kv_transfers_total")
    with api.counting("requests_total", 1, outcome="aborted"):
        with raw_request(api, many):
            until(lambda: api.metric("requests_waiting", instance="p0") > 10, "prompts wait")
        api.settle()
    assert api.metric("kv_transfers_total") - pulled < 250


# -- two phases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("params", "finish"),
    [({"max_tokens": 1, "ignore_eos": True}, "length"), ({"max_tokens": 20, "logit_bias": {"2": 100}}, "stop")],
)
def test_pd_07_one_token_moves_no_kv(api: Api, params: dict[str, Any], finish: str, stream: bool) -> None:
    with api.counting("kv_transfers_total", 0), api.counting("generation_tokens_total", 1):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = api.complete(ids(20, 77), temperature=0, **params, **options)
        api.settle()
    if stream:
        *_, last, final = events(answer)
        assert last["choices"][0]["finish_reason"] == finish
        assert final["usage"]["completion_tokens"] == 1
    else:
        assert answer.json()["choices"][0]["finish_reason"] == finish
        assert answer.json()["usage"]["completion_tokens"] == 1


def test_pd_07_a_stop_string_in_the_first_token(api: Api) -> None:
    (free,) = api.complete(ids(20, 78), max_tokens=1, **GREEDY).json()["choices"]
    answer = api.complete(ids(20, 78), max_tokens=50, stop=free["text"], **GREEDY).json()
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_pd_10_moved_kv_is_no_cache_hit(api: Api, stream: bool) -> None:
    prompt = ids(50, 900 + stream)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    with api.counting("kv_transfers_total", 1), api.counting("prompt_tokens_total", 50):
        answer = api.complete(prompt, max_tokens=6, logprobs=1, **GREEDY, **options)
        api.settle()
    parts = events(answer) if stream else [answer.json()]
    assert parts[-1]["usage"] == {
        "prompt_tokens": 50,
        "completion_tokens": 6,
        "total_tokens": 56,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    tokens = [token for part in parts for choice in part["choices"] for token in choice["logprobs"]["tokens"]]
    assert len(tokens) == 6


def test_pd_14_prefill_happens_on_the_prefill_instance(api: Api) -> None:
    def prefilled(instance: str) -> float:
        return api.metric("prefilled_tokens_total", instance=instance)

    before, computed = prefilled("p0"), 0
    with api.counting("kv_transfers_total", 10):
        for salt in range(10):
            usage = api.complete(ids(20, 900 + salt), max_tokens=3).json()["usage"]
            computed += usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        api.settle()
    assert prefilled("p0") - before == computed > 0
    assert prefilled("d0") == 0


def test_pd_16_samples_and_prompts_through_two_instances(api: Api) -> None:
    answer = api.complete([ids(12, 950), ids(17, 951)], max_tokens=4, n=3, temperature=0).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert len(set(texts[:3])) == len(set(texts[3:])) == 1
    alone = [api.complete(ids(*one), max_tokens=4, temperature=0).json() for one in ((12, 950), (17, 951))]
    assert texts[::3] == [one["choices"][0]["text"] for one in alone]


@pytest.mark.parametrize("length", [16, 32, 48])
def test_pd_13_a_prompt_that_fills_its_pages(api: Api, length: int) -> None:
    """The decode side needs one page more than was parked; nothing stays owned, whatever was cached."""
    for _ in range(2):
        with api.counting("kv_transfers_total", 1):
            assert api.complete(ids(length, 970 + length), max_tokens=3).status_code == 200
            api.settle()
        assert api.metric("pages_owned") == 0


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_kv_03_the_same_prompt_again(api: Api, length: int, cached: int) -> None:
    prompt = ids(length, 400 + length)
    first, second = (api.complete(prompt, max_tokens=8, logprobs=1, **GREEDY).json() for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    one, two = first["choices"][0], second["choices"][0]
    assert one["text"] == two["text"]
    np.testing.assert_allclose(one["logprobs"]["token_logprobs"], two["logprobs"]["token_logprobs"], atol=1e-4)


# -- compiled once ---------------------------------------------------------------------------------------------------

SWEPT: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1, "top_k": 7},
    {"temperature": 1, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 0.5, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.3},
    {"temperature": 0, "logit_bias": {"7": 5, "8": -100}, "min_tokens": 3, "stop_token_ids": [9]},
    {"temperature": 0, "logprobs": 5},
    {"temperature": 1, "logprobs": 0, "echo": True},
    {"temperature": 1, "guided_choice": ["seven foxes", "an owl"]},
    {"n": 3, "stream": True},
]


def test_jax_01_nothing_is_compiled_after_the_start(api: Api) -> None:
    """All options at all sizes, one at a time and side by side."""
    lengths = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 120)
    jobs = [(ids(length, 600 + length), params) for length in lengths for params in SWEPT]

    def ask(job: tuple[list[int], dict[str, Any]]) -> httpx.Response:
        return api.complete(job[0], max_tokens=min(7, CONTEXT - len(job[0])), **job[1])

    answers = [ask(job) for job in jobs[:: len(SWEPT) + 1]]
    for width in (2, 3, 5, 16):
        with ThreadPoolExecutor(width) as pool:
            answers += pool.map(ask, jobs)
    assert {answer.status_code for answer in answers} == {200}
    assert api.metric("recompilations_total") == 0
