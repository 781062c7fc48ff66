"""The step-time formula against the sums written out."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdserve.core.steptime import StepFeatures, StepTime

TIME = StepTime(
    base=1.0,
    per_new_token=1e1,
    per_new_pair=1e3,
    per_prefix_pair=1e5,
    per_decode_seq=1e7,
    per_context_token=1e9,
)

chunks = st.lists(st.tuples(st.integers(0, 10**4), st.integers(1, 10**4)), max_size=8)
contexts = st.lists(st.integers(1, 10**5), max_size=8)


def test_features_of_a_mixed_step() -> None:
    features = StepFeatures.of(chunks=[(0, 3), (4, 2)], contexts=[7, 9])
    assert features == StepFeatures(new_tokens=5, new_pairs=13, prefix_pairs=8, decode_seqs=2, decode_context=16)


def test_an_empty_step_has_no_features() -> None:
    assert StepFeatures.of() == StepFeatures()
    assert TIME.seconds(StepFeatures()) == 1.0


@given(chunks=chunks, contexts=contexts)
def test_a_mixed_step_has_the_features_of_its_parts(chunks: list[tuple[int, int]], contexts: list[int]) -> None:
    both = StepFeatures.of(iter(chunks), iter(contexts))
    parts = (StepFeatures.of(chunks), StepFeatures.of(contexts=contexts))
    assert msgspec.structs.astuple(both) == tuple(
        sum(values) for values in zip(*map(msgspec.structs.astuple, parts), strict=True)
    )


@given(chunks=chunks)
def test_chunks_read_the_pairs_of_the_whole_prompt(chunks: list[tuple[int, int]]) -> None:
    # Cutting a chunk in two leaves its tokens, and turns pairs inside it into pairs with the prefix.
    for start, count in chunks:
        cut = count // 2
        whole = StepFeatures.of([(start, count)])
        halves = StepFeatures.of([(start, cut), (start + cut, count - cut)])
        assert halves.new_tokens == whole.new_tokens
        assert whole.new_pairs + whole.prefix_pairs == halves.new_pairs + halves.prefix_pairs + cut * (count - cut)


def test_each_coefficient_weighs_its_own_feature() -> None:
    features = StepFeatures(new_tokens=2, new_pairs=3, prefix_pairs=4, decode_seqs=5, decode_context=6)
    assert TIME.seconds(features) == 6_050_403_021.0


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_full_pipelines_divide_the_interval(pp: int) -> None:
    features = StepFeatures(new_tokens=4)
    assert TIME.interval(features, pp) == 41.0 / pp


def test_coefficients_that_were_not_measured_cost_nothing() -> None:
    assert StepTime(base=0.5).seconds(StepFeatures(1, 2, 3, 4, 5)) == 0.5
