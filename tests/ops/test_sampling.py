"""Sampling against numpy: exact sets and scores, and counted frequencies of the draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdserve.core.request import MAX_LOGPROBS
from jdserve.ops.sampling import (
    SamplingRows,
    argmax,
    default_rows,
    filter_logits,
    sample,
    token_logprobs,
    uses_penalties,
)

VOCAB = 24
filtered = jax.jit(filter_logits)


@jax.jit
def run(logits, rows, counts, in_prompt, position, allowed):
    return sample(logits, rows, lambda: (counts, in_prompt), position, allowed)


def sampling_rows(rows, vocab=VOCAB, **leaves):
    """Greedy rows with some leaves replaced; ``bias`` and ``stop`` are dictionaries of row -> entries."""
    made = {name: np.array(leaf) for name, leaf in default_rows(rows, vocab)._asdict().items()}
    for row, entries in leaves.pop("bias", {}).items():
        made["bias_ids"][row, : len(entries)] = list(entries)
        made["bias"][row, : len(entries)] = list(entries.values())
    for row, ids in leaves.pop("stop", {}).items():
        made["stop_ids"][row, : len(ids)] = ids
    for name, value in leaves.items():
        made[name][...] = value
    return SamplingRows(**made)


def choose(logits, rows, counts=None, in_prompt=None, position=0, allowed=0):
    logits = np.asarray(logits, np.float32)
    counts = np.zeros(logits.shape, np.int32) if counts is None else np.asarray(counts, np.int32)
    in_prompt = np.zeros(logits.shape, bool) if in_prompt is None else np.asarray(in_prompt, bool)
    position = np.broadcast_to(np.asarray(position, np.int32), logits.shape[:1])
    allowed = np.broadcast_to(np.asarray(allowed, np.uint32), (len(logits), -(-logits.shape[1] // 32)))
    return jax.tree.map(np.asarray, run(logits, rows, counts, in_prompt, position, allowed))


def random_logits(rows, seed=0, vocab=VOCAB):
    return np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * 3


def seeds(values):
    return np.array([(value >> 32, value & 0xFFFFFFFF) for value in values], np.uint32)


def log_softmax(logits):
    wide = np.asarray(logits, np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_greedy_is_the_first_of_the_largest():
    logits = random_logits(5)
    logits[1, [3, 9, 20]] = logits[1].max() + 1
    logits[2] = 0.0
    logits[3] = -np.inf
    logits[3, 7] = -50.0
    assert choose(logits, sampling_rows(5)).tokens.tolist() == logits.argmax(-1).tolist()
    assert choose(logits, sampling_rows(5)).tokens[1] == 3


@given(st.lists(st.lists(st.integers(-3, 3), min_size=7, max_size=7), min_size=3, max_size=3))
@settings(deadline=None, max_examples=50)
def test_argmax_with_many_ties(rows):
    logits = np.array(rows, np.float32)
    assert np.asarray(argmax(jnp.asarray(logits))).tolist() == logits.argmax(-1).tolist()


def mixed_batch():
    """Eight rows, no two with the same options: logits, rows, counts, in_prompt and position."""
    rng = np.random.default_rng(11)
    rows = sampling_rows(
        8,
        temperature=[0, 1, 0.7, 1.5, 1, 0, 1, 2],
        top_k=[0, 0, 3, 0, 0, 0, 5, 0],
        top_p=[1, 1, 1, 0.8, 1, 1, 0.5, 1],
        min_p=[0, 0, 0, 0, 0.05, 0, 0, 0],
        presence=[0, 0, 1, 0, 0, 0.5, 0, 0],
        frequency=[0, 0, 0, 0.4, 0, 0.5, 0, 0],
        repetition=[1, 1, 1, 1, 1.3, 2, 1, 1],
        seed=seeds([1, 2, 3, 4, 5, 6, 7 << 40, 8]),
        bias={6: {2: 4.0}, 7: {0: -100.0}},
        stop={0: [1, 2], 7: [5]},
        stop_from=[9, 0, 0, 0, 0, 0, 0, 100],
        logprobs=[False, True] * 4,
    )
    counts = rng.integers(0, 3, (8, VOCAB)).astype(np.int32)
    return random_logits(8, 12), rows, counts, rng.random((8, VOCAB)) < 0.3, np.arange(3, 11, dtype=np.int32)


def test_a_row_does_not_depend_on_its_neighbours():
    batch = mixed_batch()
    together = choose(*batch)
    backwards = choose(*jax.tree.map(lambda leaf: leaf[::-1], batch))
    assert backwards.tokens[::-1].tolist() == together.tokens.tolist()
    for row in range(8):
        alone = choose(*jax.tree.map(lambda leaf: leaf[row : row + 1], batch))  # noqa: B023 - used at once
        assert alone.tokens[0] == together.tokens[row]
        if batch[1].logprobs[row]:
            np.testing.assert_allclose(alone.logprobs.logprob[0], together.logprobs.logprob[row], rtol=1e-6)


def test_a_row_without_filters_keeps_its_tail_beside_one_that_filters():
    """The tail is lighter than the rounding of a cumulative sum in float32."""
    logits = np.full((2, VOCAB), -30.0, np.float32)
    logits[:, 5] = 0.0
    kept = np.asarray(filtered(logits, sampling_rows(2, temperature=1.0, top_p=[1.0, 0.9])))
    assert np.array_equal(kept[0], logits[0])
    assert np.isfinite(kept[1]).sum() == 1


def test_seed_and_position_fix_the_token():
    rows = 512
    flat = np.zeros((rows, VOCAB), np.float32)
    same = sampling_rows(rows, temperature=1.0, seed=seeds([42] * rows))
    at = np.arange(rows)
    first = choose(flat, same, position=at).tokens
    assert np.array_equal(choose(flat, same, position=at).tokens, first)
    assert len(set(first.tolist())) == VOCAB
    assert len(set(choose(flat, same, position=9).tokens.tolist())) == 1
    for others in (range(rows), [value << 32 for value in range(rows)]):
        drawn = choose(flat, sampling_rows(rows, temperature=1.0, seed=seeds(others)), position=9).tokens
        assert len(set(drawn.tolist())) == VOCAB


def kept_set(logits, top_k, top_p, min_p):
    """Brute force, in float64, over whole logits: token by token down the list."""
    probability = np.exp(log_softmax(logits))
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[: top_k or None]
    whole, mass, border = sum(probability[token] for token in order), 0.0, np.inf
    for token in order:
        if mass / whole >= top_p:
            break
        mass, border = mass + probability[token], logits[token]
    return {t for t, logit in enumerate(logits) if logit >= border and probability[t] >= min_p * probability.max()}


filters = st.tuples(
    st.lists(st.integers(-6, 6), min_size=VOCAB, max_size=VOCAB),
    st.integers(0, VOCAB + 2),
    st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)


@given(st.lists(filters, min_size=4, max_size=4))
@settings(deadline=None, max_examples=150)
def test_filters_against_brute_force(cases):
    logits, top_k, top_p, min_p = zip(*cases, strict=True)
    rows = sampling_rows(4, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    shaped = np.array(logits, np.float32)
    kept = np.asarray(filtered(shaped, rows))
    for row, (values, k, p, least) in enumerate(cases):
        tokens = set(np.flatnonzero(np.isfinite(kept[row])).tolist())
        # Both borders are compared in float32: what is this near to one may fall on either side.
        fewest = kept_set(values, k, p - 1e-5 if p < 1 else 2.0, least * (1 + 1e-5))
        most = kept_set(values, k, p + 1e-5 if p < 1 else 2.0, least * (1 - 1e-5))
        assert fewest <= tokens <= most
        assert np.array_equal(kept[row][sorted(tokens)], shaped[row][sorted(tokens)])


def assert_drawn_from(tokens, probability):
    """Pearson's statistic below its 99.99 % quantile (Wilson and Hilferty); nothing outside the support."""
    counts = np.bincount(tokens, minlength=len(probability))
    support = probability > 0
    assert not counts[~support].any()
    expected = len(tokens) * probability[support]
    assert expected.min() > 4, "too few draws for the statistic"
    statistic = ((counts[support] - expected) ** 2 / expected).sum()
    degrees = support.sum() - 1
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.72 * np.sqrt(2 / (9 * degrees))) ** 3


def restricted(logits, keep):
    """Softmax over the ``keep`` largest logits."""
    weights = np.exp(log_softmax(logits))
    weights[np.argsort(-logits)[keep:]] = 0
    return weights / weights.sum()


EIGHT = np.array([0.4, 2.0, -1.0, 1.1, 0.0, -0.5, 1.6, -1.5], np.float32)


@pytest.mark.parametrize(
    ("options", "probability"),
    [
        ({"temperature": 1.0}, restricted(EIGHT, 8)),
        ({"temperature": 0.5}, restricted(EIGHT / 0.5, 8)),
        ({"temperature": 2.0}, restricted(EIGHT / 2.0, 8)),
        ({"temperature": 1.0, "top_k": 3}, restricted(EIGHT, 3)),
        ({"temperature": 2.0, "top_p": 0.5}, restricted(EIGHT / 2.0, 3)),
        ({"temperature": 1.0, "min_p": 0.3}, restricted(EIGHT, 3)),
        ({"temperature": 1.0, "top_k": 4, "top_p": 0.9}, restricted(EIGHT, 3)),
    ],
)
def test_frequencies(options, probability):
    draws = 8192
    logits = np.tile(EIGHT, (draws, 1))
    places = choose(logits, sampling_rows(draws, 8, seed=seeds([3] * draws), **options), position=np.arange(draws))
    assert_drawn_from(places.tokens, probability)
    requests = choose(logits, sampling_rows(draws, 8, seed=seeds(range(draws)), **options), position=77)
    assert_drawn_from(requests.tokens, probability)


def test_neighbouring_positions_are_independent():
    draws = 16384
    pair = np.zeros((draws, 3), np.float32)
    tokens = choose(pair, sampling_rows(draws, 3, temperature=1.0), position=np.arange(draws)).tokens
    assert_drawn_from(tokens[::2] * 3 + tokens[1::2], np.full(9, 1 / 9))


def shaped_by_numpy(logits, rows, counts, in_prompt, position):
    out = logits.astype(np.float64)
    for row in range(len(out)):
        for token in range(VOCAB):
            if counts[row, token] or in_prompt[row, token]:
                factor = float(rows.repetition[row])
                out[row, token] = out[row, token] / factor if out[row, token] > 0 else out[row, token] * factor
            out[row, token] -= rows.frequency[row] * counts[row, token]
            out[row, token] -= rows.presence[row] * (counts[row, token] > 0)
        for token, value in zip(rows.bias_ids[row], rows.bias[row], strict=True):
            if token < VOCAB:
                out[row, token] += value
        for token in rows.stop_ids[row]:
            if token < VOCAB and position[row] < rows.stop_from[row]:
                out[row, token] = -np.inf
    return out


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.floats(-2, 2), min_size=4, max_size=4),
    st.lists(st.floats(-2, 2), min_size=4, max_size=4),
    st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
)
@settings(deadline=None, max_examples=60)
def test_penalties_bias_and_held_stops_against_numpy(seed, presence, frequency, repetition):
    """The greedy token is the largest of numpy's logits, up to rounding."""
    rng = np.random.default_rng(seed)
    bias = {row: dict(zip(rng.permutation(VOCAB)[:3].tolist(), rng.normal(size=3) * 5, strict=True)) for row in (0, 2)}
    rows = sampling_rows(
        4,
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        bias=bias,
        stop={row: rng.permutation(VOCAB)[:4].tolist() for row in range(4)},
        stop_from=[0, 5, 6, 7],
    )
    logits, position = random_logits(4, seed), np.array([0, 5, 5, 5], np.int32)
    counts, in_prompt = rng.integers(0, 4, (4, VOCAB)), rng.random((4, VOCAB)) < 0.4
    expected = shaped_by_numpy(logits, rows, counts, in_prompt, position)
    tokens = choose(logits, rows, counts, in_prompt, position).tokens
    assert (expected[np.arange(4), tokens] >= expected.max(-1) - 1e-4).all()


@pytest.mark.parametrize(
    ("options", "token"),
    [
        ({}, 0),
        ({"presence": 0.3}, 1),  # token 0 was generated, token 1 only stands in the prompt
        ({"presence": 0.1}, 0),
        ({"frequency": 0.1}, 1),
        ({"frequency": 0.06}, 0),
        ({"repetition": 1.25}, 2),
        ({"presence": -0.5, "frequency": 0.0}, 0),
        ({"bias": {0: {3: 10.0, 0: -1.0}}}, 3),
        ({"bias": {0: {0: -100.0}}}, 1),
    ],
)
def test_each_penalty_alone(options, token):
    logits = np.full((1, VOCAB), -5.0)
    logits[0, :4] = [2.0, 1.8, 1.7, 0.0]
    counts, in_prompt = np.zeros((1, VOCAB)), np.zeros((1, VOCAB))
    counts[0, 0], in_prompt[0, 1] = 3, 1
    assert choose(logits, sampling_rows(1, **options), counts, in_prompt).tokens[0] == token


def test_history_matters_only_with_penalties():
    logits, rows = random_logits(3), sampling_rows(3, presence=[0, 0, 1], repetition=[1, 2, 1])
    assert np.asarray(uses_penalties(rows)).tolist() == [False, True, True]
    assert choose(logits, rows, np.full((3, VOCAB), 9)).tokens[0] == choose(logits, rows).tokens[0]


def test_stop_tokens_are_held_until_their_position():
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, 2], logits[:, 3], logits[:, 4] = 9.0, 8.0, 7.0
    rows = sampling_rows(4, stop={row: [2, 3] for row in range(4)}, stop_from=10)
    assert choose(logits, rows, position=[0, 9, 10, 11]).tokens.tolist() == [4, 4, 2, 2]
    drawing = sampling_rows(4, temperature=2.0, stop={row: [2, 3] for row in range(4)}, stop_from=10)
    flat = np.full((4, VOCAB), -np.inf)
    flat[:, [2, 3, 4]] = 1.0
    assert set(choose(flat, drawing, position=[0, 3, 6, 9]).tokens.tolist()) == {4}


def test_logprobs_against_numpy():
    """Of the logits as the model gave them, whatever shaped the choice."""
    rows = sampling_rows(6, temperature=1.5, top_k=4, seed=seeds(range(6)), logprobs=True, bias={0: {1: 100.0}})
    logits = random_logits(6, 21)
    result = choose(logits, rows)
    expected = log_softmax(logits)
    chosen = expected[np.arange(6), result.tokens]
    assert result.tokens[0] == 1
    np.testing.assert_allclose(result.logprobs.logprob, chosen, rtol=0, atol=1e-5)
    assert result.logprobs.rank.tolist() == (1 + (expected > chosen[:, None]).sum(-1)).tolist()
    assert result.logprobs.top_ids.tolist() == np.argsort(-logits, axis=-1)[:, :MAX_LOGPROBS].tolist()
    np.testing.assert_allclose(result.logprobs.top, -np.sort(-expected)[:, :MAX_LOGPROBS], rtol=0, atol=1e-5)


def test_logprobs_of_a_small_vocabulary_and_of_ties():
    scores = token_logprobs(jnp.asarray([[1.0, 1.0, 0.0]]), jnp.asarray([1], jnp.int32))
    assert scores.top_ids.shape == (1, 3)
    assert scores.rank.tolist() == [1]


def test_no_logprobs_where_nobody_asks():
    result = choose(random_logits(2), sampling_rows(2))
    assert all(not leaf.any() for leaf in result.logprobs)
    assert result.logprobs.top.shape == (2, MAX_LOGPROBS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_reported(temperature):
    logits = random_logits(5)
    logits[1, 3] = np.nan
    logits[2] = np.nan
    logits[3, 0] = np.inf
    logits[4, :-1] = -np.inf
    rows = sampling_rows(5, temperature=temperature, top_k=3)
    result = choose(logits, rows)
    assert result.finite.tolist() == [True, False, False, False, True]
    assert ((result.tokens >= 0) & (result.tokens < VOCAB)).all()
    assert result.tokens[0] == choose(logits[:1], sampling_rows(1, temperature=temperature, top_k=3)).tokens[0]


def test_a_tiny_temperature_is_greedy():
    logits = random_logits(3) + 20
    rows = sampling_rows(3, temperature=[1e-30, 1e-10, 1e-4], seed=seeds([1, 2, 3]))
    assert choose(logits, rows).tokens.tolist() == logits.argmax(-1).tolist()


def test_a_guided_row_takes_only_what_is_allowed():
    """Whatever else shapes it, and whatever its neighbours are; a vocabulary that is no multiple of 32."""
    vocab = 70
    logits = random_logits(4, vocab=vocab)
    logits[:, 69] += 40
    logits[2, [5, 63, 68]] = 1.0  # each of them is drawn now and then
    words = np.zeros((4, 3), np.uint32)
    words[1] = [0, 1 << 3, 0]
    words[2] = [1 << 5, 1 << 31, 1 << 4]
    rows = sampling_rows(
        4, vocab, guided=[False, True, True, False], temperature=[0, 1, 1, 1], bias={1: {4: 100.0}, 2: {4: 100.0}},
        seed=seeds([1, 2, 3, 4]), logprobs=True,
    )  # fmt: skip
    seen = set()
    for position in range(40):
        result = choose(logits, rows, position=position, allowed=words)
        assert result.tokens[[0, 1, 3]].tolist() == [69, 35, 69]
        assert result.finite.all()
        seen.add(int(result.tokens[2]))
    assert seen == {5, 63, 68}
    np.testing.assert_allclose(
        result.logprobs.logprob, np.asarray(jax.nn.log_softmax(logits))[np.arange(4), result.tokens], atol=1e-5
    )
