"""Cutting steps into launches: every token once, in order, in a shape that was compiled."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdserve.policy.commands import Chunk, DecodeSeq
from jdserve.runtime.buckets import Buckets, StepShape, buckets_for, cut_tokens, fitting, ladder, split
from runtime.harness import colocated, decode, plan_of, prefill


def chunks_of(counts: list[int]) -> list[Chunk]:
    return [Chunk(f"r{i}", 7 * i, count, (1,), last=i % 3 != 2) for i, count in enumerate(counts)]


def seqs_of(count: int) -> list[DecodeSeq]:
    return [DecodeSeq(f"d{i}", 10 + i, (1,)) for i in range(count)]


def buckets(kind: str) -> Buckets:
    instance = {"prefill": prefill(max_batch=8), "chunked": colocated("chunked"), "first": colocated()}[kind]
    plan = plan_of(instance, decode(), longest=600) if kind == "prefill" else plan_of(instance, longest=600)
    return buckets_for(plan, instance)


@given(st.sampled_from(["prefill", "chunked", "first"]), st.lists(st.integers(1, 700), max_size=9), st.integers(0, 4))
def test_a_step_is_cut_into_legal_launches(kind: str, counts: list[int], seqs: int) -> None:
    made = buckets(kind)
    decodes = seqs_of(seqs if kind != "prefill" else 0)
    launches = split(made, chunks_of(counts), decodes)
    computed: dict[str, list[Chunk]] = {}
    for launch in launches:
        assert launch.shape in made.steps
        assert sum(chunk.count for chunk in launch.chunks) <= launch.shape.tokens
        assert len(launch.chunks) <= launch.shape.segments
        assert len(launch.decodes) <= launch.shape.seqs
        for chunk in launch.chunks:
            computed.setdefault(chunk.request_id, []).append(chunk)
    assert [seq for launch in launches for seq in launch.decodes] == decodes
    assert len(computed) == len(counts)
    for whole in chunks_of(counts):
        parts = computed[whole.request_id]
        assert parts[0].start == whole.start
        assert all(one.start + one.count == other.start for one, other in itertools.pairwise(parts))
        assert sum(part.count for part in parts) == whole.count
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [whole.last]


def test_riders_share_the_first_launch_where_a_mixed_program_exists() -> None:
    mixed = split(buckets("chunked"), chunks_of([40, 100]), seqs_of(3))
    assert len(mixed[0].decodes) == 3
    assert mixed[0].shape.tokens > 0
    apart = split(buckets("first"), chunks_of([20]), seqs_of(3))
    assert [(launch.shape.tokens > 0, launch.shape.seqs) for launch in apart] == [(False, 4), (True, 0)]


def test_cutting_weighs_padding_against_another_launch() -> None:
    sizes = (32, 128, 512)
    assert cut_tokens(sizes, 600) == 512
    assert cut_tokens(sizes, 130) == 128
    assert cut_tokens(sizes, 120) == 128
    assert cut_tokens(sizes, 33) == 32
    assert cut_tokens(sizes, 300) == 128


def test_the_list_of_shapes_is_short() -> None:
    assert ladder(1, 6, 2) == (1, 2, 4, 6)
    assert ladder(5, 5, 2) == (5,)
    assert [shape.tokens for shape in buckets("prefill").prompts] == [32, 128, 512]
    assert buckets("prefill").decodes == buckets("prefill").mixed == ()
    assert buckets("chunked").mixed == (StepShape(32, 2, 4), StepShape(64, 4, 4))


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="no program holds 9; the largest is 8"):
        fitting((1, 8), 9)
