"""The application around the two endpoints: health, models, metrics, errors, clients that leave, real clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable

import httpx
import msgspec
import openai
import pytest
from fake_engine import FakeEngine, Progress, Service, byte_level, events, listening
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request as HttpRequest

from jdserve.core.errors import Busy, RequestFailed
from jdserve.core.request import Request, SamplingParams
from jdserve.core.version import VERSION
from jdserve.runtime.outputs import TokenOutput
from jdserve.server import answers
from jdserve.server.app import create_app
from jdserve.server.generation import Sample, generate
from jdserve.server.limits import Limits
from jdserve.server.metrics import Metrics
from jdserve.server.text import TextStream

USER = [{"role": "user", "content": "hello"}]
JSON = {"Content-Type": "application/json"}


def _error(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    return msgspec.to_builtins(msgspec.json.decode(answer.content, type=answers.ErrorResponse).error)


# -- health, models, metrics -----------------------------------------------------------------------------------------


def test_health() -> None:
    service = Service()
    engine = service.engine
    assert service.call("GET", "/health").json() == {"status": "ok"}
    engine.ready = False
    answer = service.call("GET", "/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "starting", "stage": "compile", "progress": 0.5})
    engine.progress = Progress("load", None, "no such file")
    answer = service.call("GET", "/health")
    assert answer.status_code == 503
    assert answer.json() == {"status": "failed", "stage": "load", "progress": None, "error": "no such file"}
    engine.draining = True
    answer = service.call("GET", "/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "draining"})


@pytest.mark.parametrize("state", [{"started": False}, {"draining": True}])
def test_no_work_is_taken_before_ready_and_while_draining(state: dict) -> None:
    service = Service()
    for name, value in state.items():
        setattr(service.engine, name, value)
    for answer in (service.complete("a"), service.complete("a", stream=True), service.chat(USER)):
        _error(answer, 503)
        assert int(answer.headers["retry-after"]) > 0
    assert service.engine.requests == []
    assert service.call("GET", "/v1/models").status_code == 200


def test_models() -> None:
    service = Service()
    (model,) = service.call("GET", "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 64)
    assert service.call("GET", "/v1/models/tiny").json() == model
    assert _error(service.call("GET", "/v1/models/org/other"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_unknown_model(path: str) -> None:
    body = {"model": "gpt", "prompt": "a"} if "chat" not in path else {"model": "gpt", "messages": USER}
    error = _error(Service().call("POST", path, json=body), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_metrics() -> None:
    service = Service()
    service.complete(["a", "b"], n=2, max_tokens=4)
    service.complete("a", max_tokens=1)
    assert service.outcomes() == {"ok": 2}
    assert service.metric("jdserve:prompt_tokens_total") == 3
    assert service.metric("jdserve:generation_tokens_total") == 17
    assert service.metric("jdserve:time_to_first_token_seconds_count") == 5
    assert service.metric("jdserve:time_per_output_token_seconds_count") == 4
    assert service.metric("jdserve:e2e_request_latency_seconds_count") == 5
    assert service.metric('jdserve:pages_free{instance="d0",role="decode"}') == 64
    assert service.metric('jdserve:preemptions_total{instance="p0",role="prefill"}') == 0
    assert service.metric('jdserve:pipeline_bubble_seconds_total{instance="p0",role="prefill"}') == 1.5
    assert service.metric('jdserve:step_seconds_total{instance="p0",role="prefill"}') == 2.5
    assert service.metric('jdserve:steps_total{instance="p0",role="prefill"}') == 7
    assert service.metric('jdserve:instance_up{instance="p0",role="prefill"}') == 1
    assert service.metric('jdserve:instance_up{instance="d0",role="decode"}') == 0
    assert service.metric("jdserve:restarts_total") == 4
    assert service.metric("jdserve:retries_total") == 5
    assert service.metric("jdserve:kv_transfer_bytes_total") == 4096
    assert service.metric("jdserve:recompilations_total") == 0
    assert service.metric("jdserve:ready") == 1
    assert Service().outcomes() == {}, "apps share no counter"


# -- errors ----------------------------------------------------------------------------------------------------------


def test_probes_and_small_routes() -> None:
    service = Service()
    assert service.call("GET", "/version").json() == {"version": VERSION}
    ids = service.ids("삼겹살")
    body = {"model": "tiny", "tokens": ids}
    assert service.call("POST", "/detokenize", json=body).json() == {"prompt": "삼겹살"}
    for wrong in ([-1], [300], [10**30], [1.5], "x"):
        answer = service.call("POST", "/detokenize", json=body | {"tokens": wrong})
        assert _error(answer, 400)["param"] == "tokens"
    error = _error(service.call("POST", "/v1/embeddings", json={"model": "tiny", "input": "x"}), 404)
    assert error["code"] == "unsupported_endpoint"
    assert "/v1/embeddings" in error["message"]
    for state in ({}, {"ready": False}, {"started": False, "draining": True}):
        for name, value in state.items():
            setattr(service.engine, name, value)
        assert service.call("GET", "/ping").status_code == 200, "the process lives"
        assert service.call("GET", "/ready").status_code == (503 if state else 200)


# -- limits ----------------------------------------------------------------------------------------------------------


def test_a_request_has_bounds() -> None:
    service = Service()
    engine, tokenizer = service.engine, service.tokenizer
    service.app = create_app(engine, tokenizer, "tiny", limits=Limits(body_bytes=1000, headers=20))
    assert service.complete("x" * 10, max_tokens=1).status_code == 200
    _error(service.complete("x" * 1000), 413)
    told = service.call("POST", "/v1/completions", content=b"{}", headers=JSON | {"Content-Length": "9" * 30})
    _error(told, 413)

    async def chunks() -> AsyncGenerator[bytes, None]:
        for _ in range(100):
            yield b" " * 100

    _error(service.call("POST", "/v1/completions", content=chunks(), headers=JSON), 413)
    many = {f"x-{index}": "1" for index in range(30)}
    assert _error(service.call("GET", "/health", headers=many), 400)["code"] == "too_many_headers"
    assert service.complete("x", max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ["a"] * 100_000}, "prompt"),
        ({"prompt": [[5]] * 3000}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 128}, "n"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"timeout": 0}, "timeout"),
        ({"priority": 2**40}, "priority"),
    ],
)
def test_counts_have_bounds(change: dict, param: str) -> None:
    service = Service()
    answer = service.call("POST", "/v1/completions", json={"model": "tiny", "prompt": "a"} | change)
    assert _error(answer, 400)["param"] == param
    assert len(answer.content) < 4000
    assert service.engine.requests == []


def test_a_full_service_says_when_to_come_back() -> None:
    service = Service()
    service.engine.refuse = Busy("a prompt would wait about 9 s", 3.2)
    for answer in (service.complete("a"), service.complete("a", stream=True), service.chat(USER)):
        assert _error(answer, 429)["code"] == "server_busy"
        assert answer.headers["retry-after"] == "4"
    assert service.outcomes() == {"rejected": 3}


@pytest.mark.parametrize("begun", [0, 2])
def test_a_timeout_ends_the_request(begun: int) -> None:
    service = Service()
    service.engine.hold_at = begun
    answer = service.complete("hello", stream=True, timeout=0.05, priority=-3)
    if begun:
        *chunks, last = events(answer)
        assert len(chunks) == begun
        error = last["error"]
    else:
        error = _error(answer, 504)
    assert error["code"] == "deadline_exceeded"
    assert service.engine.running == set()
    assert len(service.engine.cancelled) == 1
    assert service.outcomes() == {"failed": 1}
    assert service.engine.requests[0].priority == -3
    service.engine.hold_at = None
    assert service.complete("hello", timeout=60).status_code == 200


def test_unknown_paths_and_methods() -> None:
    service = Service()
    _error(service.call("GET", "/nowhere"), 404)
    answer = service.call("GET", "/v1/completions")
    _error(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert service.outcomes() == {}


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"", JSON),
        (b"{", JSON),
        (b"null", JSON),
        (b"[]", JSON),
        (b'"x"', JSON),
        (b"\xff", JSON),
        (b"[" * 100_000, JSON),
        (b'{"model": "tiny", "prompt": "a"}', {"Content-Type": "text/plain"}),
        (b'{"model": "tiny", "prompt": "a"}', {}),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', JSON),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', JSON),
        (b'{"model": "tiny", "prompt": "a", "n": ' + b"9" * 5000 + b"}", JSON),
        (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', JSON),
        (b'{"model": "\\ud800", "prompt": "a"}', JSON),
        (b'{"model": "tiny", "prompt": "a", "' + b"x" * 100_000 + b'": 1}', JSON),
        (b'{"prompt": "a"}', JSON),
    ],
)
def test_broken_bodies(content: bytes, headers: dict) -> None:
    service = Service()
    answer = service.call("POST", "/v1/completions", content=content, headers=headers)
    assert _error(answer, 400)["message"]
    assert len(answer.content) < 10_000
    assert service.outcomes() == {"rejected": 1}


def test_the_missing_field_is_named() -> None:
    error = _error(Service().call("POST", "/v1/completions", json={"model": "tiny"}), 400)
    assert (error["param"], error["message"]) == ("prompt", "prompt is required")


def test_a_bug_is_answered_in_the_same_shape() -> None:
    service = Service()

    def broken(*_: object) -> object:
        raise ZeroDivisionError("private")

    service.tokenizer.encode = broken  # type: ignore[method-assign,assignment]
    error = _error(service.complete("a"), 500)
    assert "private" not in error["message"]
    assert service.outcomes() == {"failed": 1}


FIELDS = ["model", "prompt", "messages", "n", "stop", "stream", "stream_options", "logit_bias", "max_tokens", "echo"]
FIELDS += ["tools", "tool_choice", "response_format", "structured_outputs", "guided_json", "guided_regex", "priority"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("tiny")
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3))
FUZZED = Service()


@given(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), st.dictionaries(st.sampled_from(FIELDS), VALUES))
@settings(max_examples=150, deadline=None)
def test_junk_is_answered_as_documented(path: str, junk: dict) -> None:
    """API-17."""
    base = {"model": "tiny"} | ({"messages": USER} if "chat" in path else {"prompt": "a"})
    answer = FUZZED.call("POST", path, content=json.dumps(base | junk).encode(), headers=JSON)
    if answer.status_code == 200:
        if not junk.get("stream"):
            msgspec.json.decode(answer.content, type=answers.ChatCompletion if "chat" in path else answers.Completion)
    else:
        _error(answer, 404 if answer.status_code == 404 else 400)
    assert FUZZED.engine.running == set()


def test_openapi() -> None:
    service = Service()
    description = service.call("GET", "/openapi.json").json()
    schemas = description["components"]["schemas"]
    references: set[str] = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                references.add(value["$ref"].removeprefix("#/components/schemas/"))
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(description)
    assert references <= set(schemas)
    assert {"Completion", "ChatChunk", "ErrorResponse", "CompletionBody", "ChatBody"} <= references | set(schemas)
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert set(description["paths"][path]["post"]["responses"]) == {
            "200", "400", "404", "413", "429", "500", "503", "504"
        }  # fmt: skip


# -- clients that leave ----------------------------------------------------------------------------------------------


def _with_socket(service: Service, test: Callable[[str, httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with listening(service) as url, httpx.AsyncClient(base_url=url) as client:
            await asyncio.wait_for(test(url, client), 60)

    asyncio.run(run())


BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 40, "stream": True}


@pytest.mark.parametrize("body", [BODY, BODY | {"n": 3}, BODY | {"prompt": ["a", "b"]}])
def test_a_client_that_leaves_a_stream_cancels(body: dict) -> None:
    service = Service()
    engine = service.engine
    engine.hold_at = 2

    async def test(_: str, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            for _ in range(2):
                assert (await anext(lines)).startswith("data: ")
                assert await anext(lines) == ""
            await engine.holding.wait()
        count = body.get("n", 1) * (2 if isinstance(body["prompt"], list) else 1)
        while len(engine.cancelled) < count:
            engine.on_cancel.clear()
            await engine.on_cancel.wait()
        assert engine.running == set()
        page = (await client.get("/metrics")).text
        assert 'jdserve:requests_total{outcome="aborted"} 1.0' in page
        assert 'jdserve:requests_running{instance="d0",role="decode"} 0.0' in page

    _with_socket(service, test)
    assert engine.produced <= 2 * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_cancels(stream: bool) -> None:
    service = Service()
    engine = service.engine
    engine.hold_at = 0

    async def test(_: str, client: httpx.AsyncClient) -> None:
        asked = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": stream}))
        await engine.holding.wait()
        asked.cancel()
        await engine.on_cancel.wait()
        assert engine.running == set()
        assert 'outcome="aborted"} 1.0' in (await client.get("/metrics")).text

    _with_socket(service, test)


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_runs_in_the_engine_when_a_generation_has_ended(failing: bool) -> None:
    """Also where the engine needs a while to cancel."""

    class Slow(FakeEngine):
        async def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
            try:
                async for output in super().generate(request):
                    yield output
            finally:
                for _ in range(20):
                    await asyncio.sleep(0)
                closed.append(request.id)

    closed: list[str] = []
    engine, tokenizer = Slow(), byte_level()
    engine.hold_at = None if failing else 2
    engine.script = lambda request, i: 5 if request.id == "1" or i < 2 else 1 / 0  # type: ignore[return-value]
    samples = []
    for index in range(2):
        request = Request(str(index), (5,), SamplingParams(max_tokens=60))
        samples.append(Sample(index, index == 0, request, TextStream(tokenizer, request.params)))

    async def never() -> dict:
        await asyncio.Event().wait()
        return {}

    async def run() -> None:
        http = HttpRequest({"type": "http"}, never)
        deltas = generate(engine, Metrics(engine), samples, http)
        if failing:
            with pytest.raises(RequestFailed, match="internal error: ZeroDivisionError"):
                async for _ in deltas:
                    pass
        else:
            await anext(deltas)
            await deltas.aclose()
        assert sorted(closed) == ["0", "1"]

    asyncio.run(run())


def test_a_shutdown_drains_and_closes() -> None:
    service = Service()

    async def test(_: str, client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).status_code == 200
        assert service.engine.calls == []

    _with_socket(service, test)
    assert service.engine.calls == ["drain 7", "close"]


# -- OpenAI's own client ---------------------------------------------------------------------------------------------


def test_the_async_client_reads_our_answers() -> None:
    service = Service()
    expected = service.complete("hello", max_tokens=6).json()["choices"][0]["text"]

    async def test(url: str, _: httpx.AsyncClient) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.completions.create(model="tiny", prompt="hello", max_tokens=6, logprobs=2)
            assert whole.choices[0].text == expected
            assert whole.choices[0].logprobs is not None
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 6
            stream = await client.completions.create(model="tiny", prompt="hello", max_tokens=6, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == expected
            chat = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], logprobs=True, top_logprobs=1
            )
            scores = chat.choices[0].logprobs
            assert scores is not None
            assert scores.content is not None
            assert chat.usage is not None
            assert len(scores.content) == chat.usage.completion_tokens
            assert scores.content[0].top_logprobs[0].token == scores.content[0].token
            with pytest.raises(openai.NotFoundError) as refused:
                await client.completions.create(model="gpt", prompt="hello")
            assert refused.value.code == "model_not_found"

    _with_socket(service, test)


def test_the_sync_client_reads_our_answers() -> None:
    service = Service()

    def use(url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
            messages: list = [{"role": "user", "content": "hello"}]
            whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6)
            stream = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=6, stream=True, stream_options={"include_usage": True}
            )
            *chunks, last = list(stream)
            assert last.usage == whole.usage
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == whole.choices[0].message.content
            assert chunks[-1].choices[0].finish_reason == "length"
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(model="tiny", prompt="", stream=True)
            assert refused.value.param == "prompt"

    async def test(url: str, _: httpx.AsyncClient) -> None:
        await asyncio.to_thread(use, url)

    _with_socket(service, test)


def test_a_failure_in_a_stream_is_an_error_of_the_client() -> None:
    service = Service()
    service.engine.fail_after = 3
    assert len(events(service.complete("hello", stream=True))) == 4

    async def test(url: str, _: httpx.AsyncClient) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(model="tiny", prompt="hello", stream=True)
            with pytest.raises(openai.APIError, match="internal error"):
                async for _chunk in stream:
                    pass

    _with_socket(service, test)


def test_a_fake_engine_satisfies_the_protocol() -> None:
    from jdserve.server.engine_api import TextEngine

    engine: TextEngine = FakeEngine()
    assert engine.stats().instances[0].role == "prefill"
