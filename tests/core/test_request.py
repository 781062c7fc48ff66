"""The states of a sequence, and the bounds of sampling parameters and SLOs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdserve.core.errors import IllegalTransition, InvalidRequest
from jdserve.core.request import (
    MAX_GUIDE,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    SLO,
    TRANSITIONS,
    Guide,
    Request,
    SamplingParams,
    Sequence,
    State,
)

VOCAB = 100


def only(field: str, value: Any) -> SamplingParams:
    """Default parameters but for one field."""
    return SamplingParams(**{field: value})


LEGAL = {
    ("queued", "prefilling"),
    ("prefilling", "prefilled"),
    ("prefilling", "decoding"),
    ("prefilling", "queued"),
    ("prefilled", "pulling"),
    ("prefilled", "queued"),
    ("pulling", "decoding"),
    ("pulling", "prefilled"),
    ("pulling", "queued"),
    ("decoding", "queued"),
} | {(state, "finished") for state in ("queued", "prefilling", "prefilled", "pulling", "decoding")}


@pytest.mark.parametrize(("start", "end"), list(itertools.product(State, State)))
def test_every_move_is_legal_or_raises(start: State, end: State) -> None:
    sequence = Sequence("r", 3, 4, start)
    if (start.value, end.value) in LEGAL:
        sequence.move(end)
        assert sequence.state is end
        return
    with pytest.raises(IllegalTransition, match=f"request r: {start.value} -> {end.value} is not a legal move"):
        sequence.move(end)
    assert sequence.state is start


def test_the_table_knows_every_state() -> None:
    assert set(TRANSITIONS) == set(State)


def test_a_sequence_counts_its_tokens() -> None:
    sequence = Sequence("r", 3, 4)
    assert (sequence.state, sequence.tokens, sequence.computed) == (State.QUEUED, 3, 0)
    sequence.generated = 2
    assert sequence.tokens == 5


def test_a_continued_request_may_generate_the_rest() -> None:
    request = Request("r", (1, 2, 3, 4), SamplingParams(max_tokens=10), generated=3)
    assert request.remaining == 7


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("temperature", 0.0, 2.0),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("seed", -MAX_SEED - 1, MAX_SEED),
        ("min_tokens", 0, 16),
        ("logprobs", 0, MAX_LOGPROBS),
        ("prompt_logprobs", 0, MAX_LOGPROBS),
        ("top_k", 0, None),
        ("max_tokens", 0, None),
    ],
)
def test_closed_bounds(field: str, low: float, high: float | None) -> None:
    step = 1 if isinstance(low, int) else 1e-6
    for value in (low, 10**400 if high is None else high):
        only(field, value).validate(VOCAB)
    outside: list[float] = [low - step] if high is None else [low - step, high + step]
    if isinstance(low, float):
        outside += [math.nan, math.inf, -math.inf]
    elif high is not None:
        outside += [10**400, -(10**400)]
    bound = f"at least {low}" if high is None else f"between {low} and {high}"
    for value in outside:
        refused(only(field, value), field, f"{field} must be {bound}, got {value}")


@pytest.mark.parametrize(("field", "high"), [("top_p", 1.0), ("repetition_penalty", 10.0)])
def test_bounds_that_exclude_zero(field: str, high: float) -> None:
    for value in (5e-324, high):
        only(field, value).validate(VOCAB)
    for value in (0.0, -1.0, high + 1e-6, math.nan, math.inf):
        refused(only(field, value), field, f"{field} must be above 0 and at most {high:g}, got {value}")


def test_max_tokens_bounds_min_tokens() -> None:
    SamplingParams(max_tokens=3, min_tokens=3).validate(VOCAB)
    refused(SamplingParams(max_tokens=3, min_tokens=4), "min_tokens", "min_tokens must be between 0 and 3, got 4")


@pytest.mark.parametrize("token", [-1, VOCAB, 10**400])
def test_token_ids_are_those_of_the_vocabulary(token: int) -> None:
    message = f"holds token id {token}, outside 0..99"
    refused(SamplingParams(logit_bias={token: 1.0}), "logit_bias", f"logit_bias {message}")
    refused(SamplingParams(stop_token_ids=(0, token)), "stop_token_ids", f"stop_token_ids {message}")
    SamplingParams(logit_bias={0: 1.0, VOCAB - 1: -1.0}, stop_token_ids=(0, VOCAB - 1)).validate(VOCAB)


@pytest.mark.parametrize("value", [-100.5, 100.5, math.nan, math.inf])
def test_logit_bias_values_are_bounded(value: float) -> None:
    refused(
        SamplingParams(logit_bias={1: value}), "logit_bias", f"logit_bias must be between -100.0 and 100.0, got {value}"
    )


def test_logit_bias_entries_are_bounded() -> None:
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 100.0)).validate(10**6)
    refused(
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)),
        "logit_bias",
        "logit_bias takes at most 300 entries, got 301",
    )


def test_an_empty_stop_string_is_refused() -> None:
    SamplingParams(stop=("\n", " ")).validate(VOCAB)
    refused(SamplingParams(stop=("a", "")), "stop", "stop must not hold an empty string")


def test_a_guide_is_bounded_and_decides_alone_where_the_text_ends() -> None:
    alone = "{} does not go together with a regex, which decides where the text ends"
    SamplingParams(guide=Guide("regex", "a" * MAX_GUIDE)).validate(VOCAB)
    refused(
        SamplingParams(guide=Guide("regex", "a" * (MAX_GUIDE + 1))),
        "regex",
        "a regex of 65537 characters is above the limit of 65536",
    )
    refused(SamplingParams(guide=Guide("regex", "a"), ignore_eos=True), "ignore_eos", alone.format("ignore_eos"))
    refused(SamplingParams(guide=Guide("regex", "a"), min_tokens=1), "min_tokens", alone.format("min_tokens"))


def test_what_has_no_bound_passes() -> None:
    fields = set(SamplingParams.__struct_fields__)
    SamplingParams(ignore_eos=True, include_stop_str_in_output=True).validate(VOCAB)
    bounded = {"temperature", "min_p", "presence_penalty", "frequency_penalty", "seed", "min_tokens", "logprobs"}
    bounded |= {"prompt_logprobs", "top_k", "max_tokens", "top_p", "repetition_penalty", "logit_bias", "stop", "guide"}
    # A new field stands here until a test above covers its bound.
    assert fields - bounded == {"stop_token_ids", "ignore_eos", "include_stop_str_in_output"}


numbers = st.one_of(st.integers(), st.floats())


@given(
    values=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), numbers
        )
        | dict.fromkeys(("max_tokens", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs"), st.integers()),
    )
)
def test_validation_passes_or_names_a_field_that_was_given(values: dict[str, Any]) -> None:
    error = None
    try:
        SamplingParams(**values).validate(VOCAB)
    except InvalidRequest as refusal:
        error = refusal
    if error is not None:
        assert error.param in values
        assert str(error).startswith(f"{error.param} must be ")


def test_an_slo_is_met_jointly() -> None:
    slo = SLO(ttft_s=1.0, tpot_s=0.1)
    assert slo.met(1.0, 0.1)
    assert not slo.met(1.01, 0.1)
    assert not slo.met(1.0, 0.11)
    assert not slo.met(math.nan, 0.1)


def refused(params: SamplingParams, field: str, message: str) -> None:
    """Assert that ``params`` are refused because of ``field``."""
    with pytest.raises(InvalidRequest) as error:
        params.validate(VOCAB)
    assert error.value.param == field
    assert str(error.value) == message
