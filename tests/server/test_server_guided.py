"""What clients say a text must look like, and tools, against the scripted engine."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from fake_engine import Service, byte_level, events

from jdserve.core.request import MAX_GUIDE, Guide

USER = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }};{% endfor %}{{ m.content }}{% endfor %}"
)


def tool(name: str, **parameters: object) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


TOOLS = [tool("weather", type="object", properties={"city": {"type": "string"}}), tool("time")]


def _error(answer) -> dict:
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 4000
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("params", "guide"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guide("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Guide("json_schema", json.dumps(SCHEMA)),
        ),
        ({"guided_json": SCHEMA}, Guide("json_schema", json.dumps(SCHEMA))),
        ({"guided_json": json.dumps(SCHEMA)}, Guide("json_schema", json.dumps(SCHEMA))),
        ({"guided_regex": "[ab]+"}, Guide("regex", "[ab]+")),
        ({"guided_choice": ["yes", "no"]}, Guide("choice", '["yes", "no"]')),
        ({"guided_grammar": 'start: "a"'}, Guide("grammar", 'start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, Guide("json_schema", json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "a"}}, Guide("regex", "a")),
        ({"structured_outputs": {"json_object": True}}, Guide("json_object")),
    ],
)
@pytest.mark.parametrize("path", ["complete", "chat"])
def test_a_guide_reaches_the_engine(params: dict, guide: Guide | None, path: str) -> None:
    service = Service()
    assert getattr(service, path)(USER if path == "chat" else "hello", **params).status_code == 200
    assert service.engine.requests[0].params.guide == guide


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"guided_regex": "((("}, "guided_regex"),
        ({"guided_regex": "a" * (MAX_GUIDE + 1)}, "guided_regex"),
        ({"guided_grammar": "nonsense"}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": ["x"] * 1001}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"$ref": "https://example.com/schema"}}, "guided_json"),
        ({"guided_json": {"type": "frobnicate"}}, "guided_json"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_guide_that_cannot_be_is_refused_before_anything_runs(params: dict, param: str, stream: bool) -> None:
    service = Service()
    assert _error(service.complete("hello", stream=stream, **params))["param"] == param
    assert service.engine.requests == []


def _says(service: Service, text: str) -> None:
    ids = service.ids(text)
    service.engine.script = lambda request, i: [*ids, 1][i]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TEXTS = [
    ("it is late", "it is late", [], "stop"),
    (CALL, None, [("weather", {"city": "Köln"})], "tool_calls"),
    (
        f'let me see\n{CALL}\n<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>',
        "let me see\n",
        [("weather", {"city": "Köln"}), ("time", {})],
        "tool_calls",
    ),
    ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>',) * 2 + ([], "stop"),
    ("<tool_call>{broken</tool_call>",) * 2 + ([], "stop"),
    ("<tool_call>[1]</tool_call>",) * 2 + ([], "stop"),
    ("a <tool <b> <tool_call", "a <tool <b> <tool_call", [], "stop"),
    ('<tool_call>\n{"name": "wea',) * 2 + ([], "stop"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "content", "calls", "finish"), TEXTS)
def test_calls_are_read_out_of_the_text(text: str, content: str | None, calls: list, finish: str, stream: bool) -> None:
    service = Service(tokenizer=byte_level(template=TEMPLATE))
    service.engine.max_model_len = 1000
    _says(service, text)
    answer = service.chat(USER, tools=TOOLS, stream=stream)
    if not stream:
        message = answer.json()["choices"][0]["message"]
        assert message["content"] == content
        found, reason = message.get("tool_calls", []), answer.json()["choices"][0]["finish_reason"]
        assert bool(found) == ("tool_calls" in message)
    else:
        choices = [chunk["choices"][0] for chunk in events(answer)]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == (content or "")
        found = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        assert [call["index"] for call in found] == list(range(len(calls)))
        reason = choices[-1]["finish_reason"]
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found] == calls
    assert len({call["id"] for call in found}) == len(calls)
    assert reason == finish


def test_a_conversation_with_tools_is_what_the_template_writes() -> None:
    service = Service(tokenizer=byte_level(template=TEMPLATE))
    _says(service, CALL)
    service.engine.max_model_len = 1000
    message = service.chat(USER, tools=TOOLS).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "wet"}
    assert service.chat([*USER, message, result], tools=TOOLS).status_code == 200
    text = "<weather><time>[user]hello[assistant]Köln;[tool]wet"
    assert service.engine.requests[-1].prompt == tuple(service.ids(text))
    assert service.chat(USER, tools=TOOLS, tool_choice="none").json()["choices"][0]["message"]["content"] == CALL
    assert service.engine.requests[-1].prompt == tuple(service.ids("[user]hello"))
    assert _error(Service().chat(USER, tools=TOOLS))["param"] == "tools", "the template has no place for them"


NAMED = {"type": "function", "function": {"name": "time"}}
NESTED = tool("deep", **{"$defs": {"x": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/x"}}})


@pytest.mark.parametrize(
    ("params", "names", "several"),
    [
        ({"tool_choice": "required"}, ["weather", "time"], True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "time"], False),
        ({"tool_choice": NAMED}, ["time"], False),
        ({"tool_choice": "required", "tools": [NESTED]}, ["deep"], True),
    ],
)
def test_a_required_call_is_guided(params: dict, names: list[str], several: bool) -> None:
    service = Service(tokenizer=byte_level(template=TEMPLATE))
    service.engine.max_model_len = 1000
    _says(service, f'<tool_call>\n{{"name": "{names[-1]}", "arguments": {{}}}}\n</tool_call>')
    answer = service.chat(USER, **{"tools": TOOLS} | params)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == [names[-1]]
    assert choice["finish_reason"] == ("stop" if params["tool_choice"] is NAMED else "tool_calls")
    guide = service.engine.requests[0].params.guide
    assert guide is not None
    assert [name for name in ("weather", "time", "deep") if f'"const": "{name}"' in guide.text] == names
    assert (")*" in guide.text) == several
    assert "#/$defs" not in guide.text


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool("t", type="frobnicate")], "tool_choice": "required"}, "tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_bad_tools_are_refused(params: dict, param: str) -> None:
    service = Service(tokenizer=byte_level(template=TEMPLATE))
    assert _error(service.chat(USER, **{"tools": TOOLS} | params))["param"] == param


def test_the_client_reads_calls_and_sends_guides() -> None:
    service = Service(tokenizer=byte_level(template=TEMPLATE))
    service.engine.max_model_len = 1000
    _says(service, f"hm\n{CALL}")

    async def use() -> None:
        web = httpx.AsyncClient(transport=httpx.ASGITransport(service.app))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=web) as client:
            asked: dict = {"model": "tiny", "messages": USER, "tools": TOOLS, "n": 2}
            whole = await client.chat.completions.create(**asked)
            for choice in whole.choices:
                (call,) = choice.message.tool_calls or ()
                assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Köln"})
            stream = await client.chat.completions.create(**asked, stream=True)
            calls = [
                (choice.index, call.index, call.function.name)
                async for chunk in stream
                for choice in chunk.choices
                for call in choice.delta.tool_calls or ()
                if call.function is not None
            ]
            assert sorted(calls) == [(0, 0, "weather"), (1, 0, "weather")]
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(model="tiny", prompt="a", extra_body={"guided_regex": "((("})
            assert refused.value.param == "guided_regex"

    asyncio.run(use())
