"""The same tokens through every topology: greedy and sampled, alone and together, preempted and cached."""

from __future__ import annotations

import asyncio

import pytest

from jdserve.core.plan import Plan
from jdserve.core.request import Request
from jdserve.models.checkpoint import LoadedModel
from jdserve.policy.record import replay
from runtime.harness import (
    Answer,
    answer,
    colocated,
    decode,
    engine_for,
    plan_of,
    prefill,
    prompt,
    request,
    run,
    serve,
    serve_alone,
)

SAMPLED = [
    {"temperature": 0.9, "seed": 11},
    {"temperature": 1.3, "seed": 12, "top_k": 40},
    {"temperature": 0.8, "seed": 13, "top_p": 0.9},
    {"temperature": 1.0, "seed": 14, "min_p": 0.05},
    {"temperature": 0.7, "seed": 15, "presence_penalty": 0.8, "frequency_penalty": 0.6},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "logit_bias": {5: 60.0, 9: 60.0}, "frequency_penalty": 1.5},
    {"temperature": 0.6, "seed": -3, "repetition_penalty": 1.2, "logprobs": 3},
]


def workload() -> list[Request]:
    """50 prompts, half of them greedy; their lengths lie around page borders and past a launch of 64."""
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 65, 90, *range(6, 58, 4))
    greedy = [request(f"g{n}", prompt(n, n), max_tokens=20, logprobs=3) for n in lengths]
    sampled = [SAMPLED[i % len(SAMPLED)] for i in range(25)]
    return greedy + [
        request(f"s{i}", prompt(10 + i, 100 + i), max_tokens=20, **params) for i, params in enumerate(sampled)
    ]


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> list[Answer]:
    """The oracle: one colocated instance on one device, requests one by one."""
    return serve_alone(model, workload())


TOPOLOGIES: dict[str, Plan] = {
    "1P1D": plan_of(prefill(), decode()),
    "2P1D": plan_of(prefill("p0"), prefill("p1"), decode()),
    "1P2D": plan_of(prefill(), decode("d0"), decode("d1")),
    "TP2-TP1": plan_of(prefill(tp=2), decode()),
    "TP1-TP2": plan_of(prefill(), decode(tp=2)),
    "two decode layouts": plan_of(prefill(), decode("d0"), decode("d1", tp=2)),
    "colocated": plan_of(colocated()),
    "chunked": plan_of(colocated("chunked", token_budget=32)),
    "colocated TP4": plan_of(colocated(tp=4)),
    "kv_capacity": plan_of(prefill(batching="kv_capacity"), decode()),
}


FURTHER = ("two decode layouts", "kv_capacity", "chunked", "colocated TP4")
"""Left out unless they are asked for."""


def same(ours: list[Answer], oracle: list[Answer]) -> None:
    for one, other in zip(ours, oracle, strict=True):
        assert one.tokens == other.tokens
        assert one.finish == other.finish
        assert [entry.token for entry in one.logprobs] == [entry.token for entry in other.logprobs]
        for entry, wanted in zip(one.logprobs, other.logprobs, strict=True):
            assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [token for token, _ in entry.top] == [token for token, _ in wanted.top]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in FURTHER else []) for name in TOPOLOGIES]
)
def test_every_topology_gives_the_tokens_of_one_device(
    name: str, model: LoadedModel, alone: list[Answer], tmp_path
) -> None:
    """PD-11, with more degrees in test_pipeline."""
    ours = serve(model, TOPOLOGIES[name], workload(), record=tmp_path)
    same(ours, alone)
    for one in ours:
        assert len(one.tokens) == 20
        assert one.cached_tokens == 0  # moved KV is no cache hit
    logs = sorted(tmp_path.glob("*.jsonl"))
    assert len(logs) == len(TOPOLOGIES[name].instances) + 1
    for log in logs:
        result = replay(log.read_text().splitlines())
        assert result.identical
        assert result.events > 10


def test_logprobs_cover_the_first_token_too(alone: list[Answer]) -> None:
    """PD-08; that 1P1D gives the same ones is part of every topology."""
    assert [len(answer.logprobs) for answer in alone[:25]] == [20] * 25
    assert all(len(entry.top) == 3 for entry in alone[0].logprobs)


@pytest.mark.parametrize("roles", ["disaggregated", "colocated", pytest.param("chunked", marks=pytest.mark.long)])
def test_preempted_requests_end_with_the_same_tokens(roles: str, model: LoadedModel) -> None:
    """KV-05, PD-05: 7 pages of 16, two requests of 34 + 35 tokens: one must give way, nobody may notice."""
    small = {"pages": 7, "watermark": 0.0, "max_num_seqs": 2}
    plans = {
        "disaggregated": plan_of(prefill(pages=7), decode(**small), longest=112),
        "colocated": plan_of(colocated(prefix_cache=False, **small), longest=112),
        "chunked": plan_of(colocated("chunked", prefix_cache=False, **small), longest=112),
    }
    wanted = [
        request("a", prompt(34, 1), max_tokens=35),
        request("b", prompt(34, 2), max_tokens=35, temperature=0.9, seed=3, frequency_penalty=0.5, logprobs=0),
    ]
    preemptions: list[int] = []

    async def body(engine):
        answers = await asyncio.gather(*(answer(engine, one) for one in wanted))
        preemptions.append(sum(instance.preemptions for instance in engine.stats().instances))
        return answers

    ours = run(engine_for(model, plans[roles]), body)
    assert preemptions[0] >= 1
    same(ours, serve_alone(model, wanted))  # type: ignore[arg-type]
    assert [one.news for one in ours] == [35, 35]  # type: ignore[attr-defined]


@pytest.mark.parametrize("disaggregated", [True, False])
def test_a_cached_prefix_changes_nothing(disaggregated: bool, model: LoadedModel) -> None:
    """KV-03: the second answer equals the first, and at least the last prompt token is computed again."""
    lengths = (15, 16, 17, 32, 33)

    async def body(engine):
        pairs = []
        for n in lengths:
            first = await answer(engine, request(f"a{n}", prompt(n, n), max_tokens=12, logprobs=1))
            pairs.append((first, await answer(engine, request(f"b{n}", prompt(n, n), max_tokens=12, logprobs=1))))
        return pairs

    plan = plan_of(prefill(), decode()) if disaggregated else plan_of(colocated())
    pairs = run(engine_for(model, plan), body)
    for first, second in pairs:  # type: ignore[attr-defined]
        same([second], [first])
        assert first.cached_tokens == 0
    cached = [second.cached_tokens for _, second in pairs]  # type: ignore[attr-defined]
    assert cached == [0, 0, 16, 16, 32]


def test_sec_06_a_cache_salt_isolates(model: LoadedModel) -> None:
    async def body(engine):
        first = await answer(engine, request("a", prompt(40), max_tokens=2))
        other = Request("b", prompt(40), request("b", prompt(40), max_tokens=2).params, cache_salt="tenant")
        return first, await answer(engine, other), await answer(engine, request("c", prompt(40), max_tokens=2))

    first, salted, plain = run(engine_for(model, plan_of(prefill(), decode())), body)  # type: ignore[misc]
    assert (salted.cached_tokens, plain.cached_tokens) == (0, 32)
    assert first.tokens == salted.tokens == plain.tokens
