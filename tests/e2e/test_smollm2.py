"""The built-in model through both kinds of plan, against transformers' greedy tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jdserve.core.plan import ColocatedInstance, DecodeInstance, Plan
from jdserve.core.request import SamplingParams
from jdserve.llm import LLM, Completion

FIXTURES = Path(__file__).parents[1] / "fixtures"
PLANS = Path(__file__).parents[2] / "plans"
LONGEST = 1152
STEPS = 24

NEAR = 1e-4
"""Two logits are as good as equal when they differ by less than this share of the largest."""


def read_plan(name: str) -> Plan:
    """A plan of the repository with fewer programs: a shorter context and a smaller batch."""

    def smaller(instance: Any) -> Any:
        if isinstance(instance, DecodeInstance | ColocatedInstance):
            return msgspec.structs.replace(instance, max_num_seqs=4)
        return instance

    plan = Plan.load(PLANS / name)
    instances = tuple(smaller(instance) for instance in plan.instances)
    return msgspec.structs.replace(plan, max_model_len=LONGEST, instances=instances)


def read_cases() -> list[dict[str, Any]]:
    """All prompts with the oracle's tokens; for each step its two best logits and the largest."""
    cases = json.loads((FIXTURES / "smollm2_greedy.json").read_text())
    known = {tuple(case["prompt_ids"]): case["ids"] for case in cases}
    for case in json.loads((FIXTURES / "expected.json").read_text()):
        assert known[tuple(case["prompt_ids"])] == case["ids"], "the two oracles agree"
    return cases


def ids_of(answer: Completion) -> list[int]:
    return [token.token for token in answer.tokens]


def first_difference(ours: Sequence[int], theirs: Sequence[int], best: Sequence[Sequence[float]]) -> int | None:
    """Where two runs part, None if nowhere. That is no fault only where the oracle itself had two equals."""
    step = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if step is None:
        assert len(ours) == len(theirs)
        return None
    first, second, largest = best[step]
    assert first - second < NEAR * largest, f"step {step}: {ours[step]} for {theirs[step]}, which leads clearly"
    return step


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Completion]]:
    cases = read_cases()
    prompts = [case["prompt_ids"] for case in cases]
    greedy = SamplingParams(max_tokens=STEPS, temperature=0)
    given: dict[str, list[Completion]] = {}
    for name in ("quickstart.json", "colocated.json"):
        with LLM(read_plan(name)) as llm:
            texts = {case["prompt"]: tuple(case["prompt_ids"]) for case in cases if "prompt" in case}
            assert asyncio.run(llm.tokenizer.encode(list(texts), add_special_tokens=True)) == list(texts.values())
            given[name] = llm.generate(prompts, greedy)
            stats = llm.stats()
            assert stats.recompilations == 0
            assert (stats.transfers.count > 0) == (name == "quickstart.json")
    return given


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["quickstart.json", "colocated.json"])
def test_greedy_tokens_equal_transformers(answers: dict[str, list[Completion]], name: str) -> None:
    parted = 0
    for case, answer in zip(read_cases(), answers[name], strict=True):
        where = first_difference(ids_of(answer), case["ids"], case["best"])
        parted += where is not None
        if where is None and answer.finish == "length":
            assert answer.text == case["text"]
    print(f"{name}: {parted} of {len(answers[name])} texts part from transformers', each where two logits tie")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_disaggregated_equals_colocated(answers: dict[str, list[Completion]]) -> None:
    parted = 0
    for case, one, other in zip(read_cases(), *answers.values(), strict=True):
        parted += first_difference(ids_of(one), ids_of(other), case["best"]) is not None
    print(f"1P1D and colocated: {parted} of {len(answers['quickstart.json'])} texts part, each where two logits tie")
