"""Texts that must look like something: the same through two instances as through one; a hostile guide fails alone."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from tokenizers import Tokenizer

from jdserve.core.errors import InvalidRequest
from jdserve.core.request import Guide, Request, SamplingParams
from jdserve.models.checkpoint import LoadedModel
from jdserve.runtime import guides
from jdserve.server.tools import Tool, guide_of
from runtime.harness import answer, colocated, decode, engine_for, plan_of, prefill, prompt, request, run, serve

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "owl"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
GUIDES = {
    "schema": Guide("json_schema", json.dumps(SCHEMA)),
    "regex": Guide("regex", r"[0-9]{3}-(fox|삼겹살)!{1,20}"),
    "choice": Guide("choice", json.dumps(["yes", 'a "quoted" no'])),
    "grammar": Guide("grammar", 'start: "<" word ("," word)* ">"\nword: /[a-c]{2}/'),
}


def guided() -> list[Request]:
    """Each guide greedily and at a high temperature, and a neighbour that is free."""
    requests = [request("free", prompt(9), max_tokens=30)]
    for index, (name, guide) in enumerate(GUIDES.items()):
        for heat in (0.0, 1.5):
            params = SamplingParams(max_tokens=60, temperature=heat, seed=index, guide=guide, logprobs=0)
            requests.append(Request(f"{name} {heat}", prompt(20 + index, index), params))
    return requests


def looks_right(text: str, name: str) -> bool:
    if name == "schema":
        value = json.loads(text)
        return value in ({"kind": "fox"}, {"kind": "owl"})
    if name == "choice":
        return text in json.loads(GUIDES["choice"].text)
    pattern = GUIDES["regex"].text if name == "regex" else "<[abc]{2}(,[abc]{2})*>"
    return re.fullmatch(pattern, text) is not None


@pytest.mark.slow
def test_a_hand_off_and_a_preemption_change_no_guided_text(model: LoadedModel) -> None:
    """Each feeds the tokens so far to a fresh matcher."""
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    alone = serve(model, plan_of(colocated(max_num_seqs=2, prefix_cache=False), longest=112), guided())
    ended = 0
    for one, wanted in zip(alone[1:], guided()[1:], strict=True):
        if one.finish == "stop":
            ended += 1
            text = tokenizer.decode(one.tokens)
            assert looks_right(text, wanted.id.split()[0]), text
    assert ended >= 5
    preemptions: list[int] = []

    async def body(engine):
        answers = await asyncio.gather(*(answer(engine, one) for one in guided()))
        preemptions.append(sum(one.preemptions for one in engine.stats().instances))
        return answers

    ours = run(engine_for(model, plan_of(prefill(pages=9), decode(pages=9, watermark=0.0), longest=112)), body)
    assert [(one.tokens, one.finish) for one in ours] == [(one.tokens, one.finish) for one in alone]  # type: ignore[attr-defined]
    assert preemptions[0]


HOSTILE = {
    "does not compile": (Guide("regex", "((("), "regex"),
    "never ends": (Guide("regex", "(a?){5000}a{5000}"), "too many"),
}


def test_a_hostile_guide_fails_alone(model: LoadedModel) -> None:
    async def body(engine):
        def hostile(name: str, guide: Guide) -> Request:
            return Request(name, prompt(8), SamplingParams(max_tokens=100, temperature=1.0, seed=1, guide=guide))

        free = asyncio.create_task(answer(engine, request("free", prompt(9), max_tokens=30)))
        waiting = engine.generate(hostile("left", GUIDES["schema"]))
        left = asyncio.create_task(anext(waiting))
        told = await asyncio.gather(
            *(answer(engine, hostile(name, guide)) for name, (guide, _) in HOSTILE.items()), return_exceptions=True
        )
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        return await free, told

    free, told = run(engine_for(model, plan_of(prefill(), decode())), body)  # type: ignore[misc]
    assert (len(free.tokens), free.finish) == (30, "length")
    for result, (_, reason) in zip(told, HOSTILE.values(), strict=True):
        assert reason in (str(result) if isinstance(result, Exception) else result.error)


def test_a_guide_has_a_budget(monkeypatch: pytest.MonkeyPatch, model: LoadedModel) -> None:
    made = guides.Guides(model.folder, model.spec)
    one = made.begin(Request("a", (1,), SamplingParams(guide=GUIDES["regex"]))).result()
    assert not one.error
    monkeypatch.setattr(guides, "BUDGET_PER_TOKEN_S", -1.0)
    (allowed, *_) = [index for index in range(model.spec.vocab) if one.allowed[index // 32] >> (index % 32) & 1]
    one.take((allowed,))
    assert "too much time" in one.error
    with pytest.raises(InvalidRequest, match="json_schema cannot be used"):
        guides.check(Guide("json_schema", '{"type": "frobnicate"}'))
    with pytest.raises(InvalidRequest, match="json_schema cannot be used"):
        guides.check(Guide("json_schema", "{"))
    for guide in GUIDES.values():
        guides.check(guide)
    made.close()


def test_a_required_call_is_what_the_grammar_takes(model: LoadedModel) -> None:
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    made = guides.Guides(model.folder, model.spec)
    parameters = {
        "type": "object",
        "$defs": {"n": {"type": "integer"}},
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "required": ["a"],
    }
    tools = [
        Tool.model_validate(
            {"type": "function", "function": {"name": name, "parameters": {"type": "object"} | parameters}}
        )
        for name in ("deep", "flat")
    ]

    def takes(text: str, *, several: bool) -> bool:
        guide = guide_of(tools, several=several)
        one = made.begin(Request("a", (1,), SamplingParams(guide=guide))).result()
        one.take(tokenizer.encode(text).ids)
        return not one.error

    call = '<tool_call>\n{"name": "flat", "arguments": {"a": 31}}\n</tool_call>'
    assert takes(call, several=False)
    assert takes(f"{call}\n{call}", several=True)
    assert not takes(f"{call}\n{call}", several=False)
    assert not takes(call.replace("31", '"x"'), several=False)
    assert not takes(call.replace("flat", "rm"), several=True)
    assert not takes(call.replace('"name"', " " * 60 + '"name"'), several=True), "blanks have an end"
    made.close()
