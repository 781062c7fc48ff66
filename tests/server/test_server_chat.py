"""``/v1/chat/completions`` against the scripted engine: templates, messages, log-probabilities."""

from __future__ import annotations

import pytest
from fake_engine import Service, byte_level, events

USER = [{"role": "user", "content": "hello"}]


def _error(answer) -> dict:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_the_prompt_is_what_the_template_writes() -> None:
    service = Service()
    answer = service.chat([{"role": "system", "content": "fox"}, *USER], max_tokens=2).json()
    text = "[system]fox\n[user]hello\n[assistant]"
    assert service.engine.requests[0].prompt == (0, *service.ids(text))
    assert answer["usage"]["prompt_tokens"] == 1 + len(service.ids(text))
    service.chat([{"role": "developer", "content": "fox"}, *USER], max_tokens=2)
    assert service.engine.requests.pop().prompt == (0, *service.ids(text))
    service.chat(USER, add_generation_prompt=False)
    assert service.engine.requests[1].prompt == (0, *service.ids("[user]hello\n"))


def test_one_bos_where_the_template_writes_it_and_the_tokenizer_would_too() -> None:
    """API-15."""
    service = Service(tokenizer=byte_level(bos=True))
    assert service.chat(USER, max_tokens=1, ignore_eos=True).status_code == 200
    assert service.engine.requests[0].prompt.count(0) == 1


def test_no_template() -> None:
    """API-15."""
    service = Service(tokenizer=byte_level(template=None))
    error = _error(service.chat(USER))
    assert "--chat-template FILE" in error["message"]
    assert error["param"] == "messages"


def test_a_template_that_refuses() -> None:
    error = _error(Service().chat([{"role": "tool", "content": "x"}]))
    assert "tool first" in error["message"]
    assert error["param"] == "messages"


def test_text_parts() -> None:
    service = Service()
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert service.chat([{"role": "user", "content": parts}], max_tokens=1).status_code == 200
    assert service.engine.requests[0].prompt == (0, *service.ids("[user]he\nllo\n[assistant]"))


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"role": "robot", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
    ],
)
def test_bad_messages(messages) -> None:
    import json

    text = json.dumps({"model": "tiny", "messages": messages})
    headers = {"Content-Type": "application/json"}
    answer = Service().call("POST", "/v1/chat/completions", content=text.encode(), headers=headers)
    assert _error(answer)["param"] == "messages"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "auto"),
        ("tools", [{"type": "retrieval"}]),
        ("tools", [{"type": "function", "function": {"name": "a b"}}]),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "frobnicate"}}}),
        ("response_format", {"type": "yaml"}),
        ("top_logprobs", 2),
        ("top_logprobs", 0),
        ("prompt", "x"),
        ("max_completion_tokens", 1000),
        ("functions", []),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_parameters(field: str, value, stream: bool) -> None:
    assert _error(Service().chat(USER, stream=stream, **{field: value}))["param"] == field


def test_maximum() -> None:
    service = Service()
    assert service.chat(USER, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3
    assert service.chat(USER, max_tokens=2).json()["usage"]["completion_tokens"] == 2
    assert _error(service.chat(USER, max_tokens=2, max_completion_tokens=3))["param"] == "max_tokens"
    whole = service.chat(USER, response_format={"type": "text"}, tool_choice="none", ignore_eos=True).json()["usage"]
    assert whole["total_tokens"] == service.engine.max_model_len


def test_an_answer_may_be_sent_back() -> None:
    service = Service()
    answer = service.chat(USER, max_tokens=3).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert service.chat([*USER, message, *USER], max_tokens=1).status_code == 200


def test_stream() -> None:
    service = Service()
    whole = service.chat(USER, n=2, max_tokens=6).json()
    chunks = events(service.chat(USER, n=2, max_tokens=6, stream=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        text = "".join(choice["delta"]["content"] for choice in choices)
        assert text == whole["choices"][index]["message"]["content"]
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * 5
        assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["length"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [None, 0, 2])
def test_logprobs(top: int | None, stream: bool) -> None:
    service = Service()
    ids = service.ids("é hi")
    service.engine.script = lambda request, i: [*ids, 1][i]
    answer = service.chat(USER, logprobs=True, top_logprobs=top, stream=stream)
    parts = events(answer) if stream else [answer.json()]
    content = [entry for part in parts for entry in part["choices"][0]["logprobs"]["content"]]
    assert len(content) == len(ids) + 1, "the token that ends the text counts too"
    assert [entry["logprob"] for entry in content] == [-(token % 8 + 1) / 8 for token in [*ids, 1]]
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == "é hi"
    assert content[0]["token"] == r"bytes:\xc3"
    assert content[-1]["token"] == "</s>"
    for entry in content:
        assert len(entry["top_logprobs"]) == (top or 0)
        if top:
            assert entry["top_logprobs"][0] == {name: entry[name] for name in ("token", "logprob", "bytes")}


def test_no_logprobs_unless_asked() -> None:
    assert Service().chat(USER, max_tokens=1).json()["choices"][0]["logprobs"] is None
    assert Service().chat(USER, max_tokens=1, logprobs=False).json()["choices"][0]["logprobs"] is None
