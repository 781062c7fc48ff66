"""What ``/v1/completions`` gives back of the tokens: log-probabilities, and text that ends where it should."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine, Service, assembled, byte_fallback, byte_level, events

from jdserve.runtime.outputs import TokenLogprobs
from jdserve.server.answers import completion_logprobs
from jdserve.server.text import TokenText

PROMPT = "hello world"

# -- log-probabilities -----------------------------------------------------------------------------------------------


def _score(token: int) -> float:
    return -(token % 8 + 1) / 8


def test_score_only() -> None:
    service = Service()
    ids = service.ids("a b c")
    answer = service.complete("a b c", echo=True, max_tokens=0, logprobs=1).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a b c", "length")
    assert choice["logprobs"]["token_logprobs"] == [None] + [_score(token) for token in ids[1:]]
    assert answer["usage"]["completion_tokens"] == 0


def test_no_tokens_at_all() -> None:
    (choice,) = Service().complete("a b c", max_tokens=0).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("", "length", None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["hello fox", "삼겹살 🌶️"])
@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"])
def test_loglikelihood_call(tokenizer, text: str, stream: bool) -> None:
    service = Service(FakeEngine(vocab=300), tokenizer)
    ids = service.ids(text)
    answer = service.complete([ids], echo=True, max_tokens=1, logprobs=1, temperature=0, stream=stream)
    arrays: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    whole = ""
    for part in events(answer) if stream else [answer.json()]:
        whole += part["choices"][0]["text"]
        for name, values in part["choices"][0]["logprobs"].items():
            arrays[name] += values
    assert whole.startswith(text)
    assert "".join(arrays["tokens"]) == whole
    assert {len(values) for values in arrays.values()} == {len(ids) + 1}
    assert arrays["token_logprobs"] == [None] + [_score(token) for token in [*ids[1:], ids[0]]]
    assert arrays["top_logprobs"][0] is None
    for score, top in zip(arrays["token_logprobs"][1:], arrays["top_logprobs"][1:], strict=True):
        assert score == max(top.values())
    offsets = arrays["text_offset"]
    assert offsets == [len("".join(arrays["tokens"][:i])) for i in range(len(offsets))]


def test_an_echo_comes_once_per_choice() -> None:
    service = Service()
    chunks = events(service.complete(["abc", "cba"], echo=True, n=2, max_tokens=3, logprobs=0, stream=True))
    texts = [text for _, (text, _) in sorted(assembled(chunks).items())]
    assert texts == ["abcabc", "abcabc", "cbacba", "cbacba"]
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert sorted("".join(tokens)) == sorted("".join(texts))


def test_of_two_tokens_of_one_spelling_the_likelier_counts() -> None:
    position = TokenLogprobs(305, -5.0, 3, ((304, -1.0), (0, -2.0)))
    arrays = completion_logprobs(byte_level(), [TokenText(305, "", 0, position)])
    assert arrays.top_logprobs == [{"": -1.0, "<s>": -2.0}]
    assert arrays.token_logprobs == [-5.0]


@pytest.mark.parametrize("stream", [False, True])
def test_every_token_has_its_logprobs(stream: bool) -> None:
    service = Service()
    answer = service.complete(PROMPT, max_tokens=5, logprobs=3, stream=stream)
    parts = events(answer) if stream else [answer.json()]
    tokens = [token for part in parts for token in part["choices"][0]["logprobs"]["tokens"]]
    tops = [top for part in parts for top in part["choices"][0]["logprobs"]["top_logprobs"]]
    offsets = [at for part in parts for at in part["choices"][0]["logprobs"]["text_offset"]]
    assert len(tokens) == len(tops) == 5
    assert "".join(tokens) == "".join(part["choices"][0]["text"] for part in parts)
    assert all(len(top) == 3 for top in tops)
    assert offsets[0] == 0
    assert offsets == sorted(offsets)


def test_minus_infinity_is_spelt_as_a_number() -> None:
    service = Service()
    original = service.engine._outputs

    async def outputs(request):
        async for output in original(request):
            scores = output.logprobs[0]
            worst = type(scores)(scores.token, float("-inf"), 9, ((scores.token, float("-inf")),))
            yield type(output)(output.request_id, output.tokens, (worst,), None, output.finish)

    service.engine._outputs = outputs  # type: ignore[method-assign]
    answer = service.complete(PROMPT, max_tokens=1, logprobs=1)
    assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


# -- stops -----------------------------------------------------------------------------------------------------------

LONG = "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize("per_output", [1, 3])
@pytest.mark.parametrize("path", ["complete", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens(stream: bool, path: str, per_output: int) -> None:
    service = Service(FakeEngine(max_model_len=400))
    service.engine.per_output = per_output
    ids = service.ids(LONG)
    service.engine.script = lambda request, i: ids[i % len(ids)]
    border = len(service.text(ids[:3]))
    stop = LONG[border - 2 : border + 2]
    prompt = LONG if path == "complete" else [{"role": "user", "content": LONG}]
    answer = getattr(service, path)(prompt, stop=[stop, "never"], max_tokens=200, stream=stream)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(answer)]
        text = "".join(c["text"] if path == "complete" else c["delta"]["content"] for c in choices)
        finish = choices[-1]["finish_reason"]
    else:
        (choice,) = answer.json()["choices"]
        text = choice["text"] if path == "complete" else choice["message"]["content"]
        finish = choice["finish_reason"]
    assert text == LONG[: LONG.index(stop)]
    assert finish == "stop"
    assert service.engine.produced <= 4 + per_output
    assert service.engine.running == set()
    assert len(service.engine.cancelled) == 1
    assert service.outcomes() == {"ok": 1}


@pytest.mark.parametrize("include", [False, True])
def test_included_stops(include: bool) -> None:
    service = Service()
    ids = [*service.ids("abc"), 1]
    service.engine.script = lambda request, i: ids[i]
    flag = {"include_stop_str_in_output": include}

    def ask(**more) -> tuple[str, int, str]:
        answer = service.complete("x", **flag, **more).json()
        choice = answer["choices"][0]
        return choice["text"], answer["usage"]["completion_tokens"], choice["finish_reason"]

    assert ask(stop="b") == ("ab" if include else "a", 2, "stop")
    assert ask(stop_token_ids=[ids[1]]) == ("ab" if include else "a", 2, "stop")
    assert ask(stop="zz", stop_token_ids=[ids[2]]) == ("abc" if include else "ab", 3, "stop")
    assert ask(stop="</s>") == ("abc", 4, "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "first", "text", "finish"),
    [({"max_tokens": 1}, "a", "a", "length"), ({}, "</s>", "", "stop"), ({"stop": "a"}, "a", "", "stop")],
)
def test_one_token(stream: bool, more: dict, first: str, text: str, finish: str) -> None:
    service = Service()
    token = service.tokenizer.backend.token_to_id(first)
    service.engine.script = lambda request, i: token
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = service.complete("x", **more, **options)
    parts = events(answer) if stream else [answer.json()]
    assert assembled(parts) == {0: (text, finish)}
    assert parts[-1]["usage"]["completion_tokens"] == 1
    assert service.engine.produced == 1


def test_characters_are_never_cut_in_a_stream() -> None:
    service = Service()
    text = "삼겹살 🌶️ ก็"
    ids = service.ids(text)
    chunks = events(service.complete([ids], stream=True, max_tokens=len(ids)))
    assert assembled(chunks) == {0: (text, "length")}
    assert not any("\ufffd" in chunk["choices"][0]["text"] for chunk in chunks)
    # two thirds of the last character: the held bytes come out at the end
    short = events(service.complete([ids], stream=True, max_tokens=2))
    assert assembled(short)[0][0] == service.text(ids[:2]) == "\ufffd"


def test_a_continuation_keeps_its_space() -> None:
    service = Service(tokenizer=byte_fallback())
    ids = service.ids("ab a")
    answer = service.complete([ids], max_tokens=len(ids), ignore_eos=True).json()
    assert answer["choices"][0]["text"] == " ab a"
