"""Text from tokens: nothing lost, nothing early, stop strings cut, however the tokens arrive."""

from __future__ import annotations

import pytest
from fake_engine import byte_fallback, byte_level
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders

from jdserve.core.request import SamplingParams
from jdserve.runtime.outputs import TokenOutput
from jdserve.server.detokenizer import detokenizer
from jdserve.server.text import StopMatcher, TextStream, join, prompt_texts
from jdserve.server.tokenizer import Tokenizer


def _with_added() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.backend.add_tokens([AddedToken("<tool é call>", special=False)])
    return tokenizer


def _metaspace() -> Tokenizer:
    backend = byte_fallback().backend
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


TOKENIZERS = {
    "byte_level": _with_added(),
    "byte_fallback": byte_fallback(),
    "metaspace": _metaspace(),
}
ANY = st.sampled_from(sorted(TOKENIZERS))
IDS = st.lists(st.integers(0, 310), max_size=24) | st.lists(st.integers(255, 275), max_size=24)


def _joined(tokenizer: Tokenizer, ids: list[int]) -> str:
    texts = detokenizer(tokenizer)
    return "".join(texts.push(token) for token in ids) + texts.flush()


@given(ANY, IDS)
@settings(max_examples=600)
def test_joined_pieces_are_the_decoded_ids(name: str, ids: list[int]) -> None:
    assert _joined(TOKENIZERS[name], ids) == TOKENIZERS[name].decode(ids)


@given(ANY, st.text(max_size=20))
@settings(max_examples=300)
def test_no_piece_of_a_sound_text_holds_half_a_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    if name != "metaspace":
        texts = detokenizer(tokenizer)
        pieces = [texts.push(token) for token in ids] + [texts.flush()]
        assert "".join(pieces) == text
        assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces) or "\ufffd" in text
    assert _joined(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"])
def test_characters_spread_over_tokens(tokenizer: Tokenizer) -> None:
    text = "삼겹살 🌶️ ก็"
    ids = tokenizer.backend.encode(text).ids
    assert len(ids) > len(text)
    assert _joined(tokenizer, ids) == text


def test_bytes_come_out_as_soon_as_the_character_is_whole() -> None:
    tokenizer = byte_level()
    texts = detokenizer(tokenizer)
    ids = tokenizer.backend.encode("é가").ids
    assert [texts.push(token) for token in ids] == ["", "é", "", "", "가"]


def test_an_incomplete_character_is_flushed() -> None:
    tokenizer = byte_level()
    texts = detokenizer(tokenizer)
    ids = tokenizer.backend.encode("가").ids[:2]
    assert [texts.push(token) for token in ids] == ["", ""]
    assert texts.flush() == "\ufffd"


def test_a_continuation_keeps_the_space_at_the_seam() -> None:
    tokenizer = byte_fallback()
    prompt, more = tokenizer.backend.encode("ab").ids, tokenizer.backend.encode("ab a").ids
    texts = detokenizer(tokenizer, prompt)
    assert "".join(texts.push(token) for token in more) + texts.flush() == " ab a"
    assert _joined(tokenizer, more) == "ab a"


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


@given(st.text("abc", max_size=30), STOPS, st.lists(st.integers(1, 5), min_size=30, max_size=30))
@settings(max_examples=500)
def test_matcher_against_brute_force(text: str, stops: list[str], cuts: list[int]) -> None:
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    expected = None
    if ends:
        end = min(ends)
        expected = (max(len(stop) for stop in stops if text[:end].endswith(stop)), end)
    matcher, fed, found = StopMatcher(stops), 0, None
    for cut in cuts:
        piece = text[fed : fed + cut]
        fed += len(piece)
        match = matcher.feed(piece)
        if match is not None:
            found = (match[0], fed - match[1])
            break
        starts = [k for stop in stops for k in range(len(stop)) if text[:fed].endswith(stop[:k])]
        assert matcher.held == max(starts, default=0)
    assert found == expected


def _feed(tokenizer: Tokenizer, params: SamplingParams, ids: list[int], per_output: int, finish: str = "length"):
    stream = TextStream(tokenizer, params)
    deltas = []
    for at in range(0, len(ids), per_output):
        part = tuple(ids[at : at + per_output])
        last = at + per_output >= len(ids)
        deltas.append(stream.feed(TokenOutput("r", part, finish=finish if last else None)))  # type: ignore[arg-type]
        if deltas[-1].finish:
            break
    return deltas


@given(ANY, st.lists(st.integers(3, 270), min_size=1, max_size=20), STOPS, st.booleans(), st.integers(0, 5), st.data())
@settings(max_examples=500)
def test_stream_does_not_depend_on_how_tokens_arrive(name, ids, stops, include, min_tokens, data) -> None:
    tokenizer = TOKENIZERS[name]
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens)
    whole = tokenizer.decode(ids)
    results = []
    for per_output in (1, data.draw(st.integers(2, 20))):
        deltas = _feed(tokenizer, params, ids, per_output)
        text = join(deltas)
        results.append(text)
        assert "".join(token.text for token in text.tokens) == text.text
        assert len(text.tokens) == text.produced
        offset = 0
        for token in text.tokens:
            assert token.offset == offset
            offset += len(token.text)
    assert results[0] == results[1]
    text = results[0]
    assert whole.startswith(text.text)
    if min_tokens == 0:
        end = min((whole.find(stop) + len(stop) for stop in stops if stop in whole), default=None)
        assert (text.finish == "stop") == (end is not None)
        if end is not None:
            longest = max(len(stop) for stop in stops if whole[:end].endswith(stop))
            assert text.text == whole[: end if include else end - longest]
    if text.finish == "length":
        assert (text.text, text.produced) == (whole, len(ids))


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.backend.token_to_id(char) for char in "xabxabc"]
    deltas = _feed(tokenizer, SamplingParams(stop=("abc",)), ids, 1)
    assert [delta.text for delta in deltas] == ["x", "", "", "abx", "", "", ""]
    assert deltas[-1].finish == "stop"
    assert [len(delta.tokens) for delta in deltas] == [1, 0, 0, 3, 0, 0, 3]


@pytest.mark.parametrize(("include", "text"), [(False, " t"), (True, " th")])
def test_a_token_is_cut_where_the_stop_string_is(include: bool, text: str) -> None:
    tokenizer = byte_level()
    ids = [tokenizer.backend.token_to_id("Ġthe")] * 3
    whole = join(_feed(tokenizer, SamplingParams(stop=("h",), include_stop_str_in_output=include), ids, 1))
    assert (whole.text, whole.tokens[0].text, whole.produced) == (text, text, 1)


def test_stop_strings_wait_for_min_tokens() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.backend.token_to_id(char) for char in "abcabcabc"]
    deltas = _feed(tokenizer, SamplingParams(stop=("bc",), min_tokens=4), ids, 1)
    assert (join(deltas).text, join(deltas).produced) == ("abca", 6)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_is_part_of_the_text_only_when_asked(include: bool, text: str) -> None:
    tokenizer = byte_level()
    ids = [tokenizer.backend.token_to_id(char) for char in "abc"]
    params = SamplingParams(include_stop_str_in_output=include, stop_token_ids=(ids[-1],))
    deltas = _feed(tokenizer, params, ids, 1, finish="stop")
    assert (join(deltas).text, join(deltas).produced) == (text, 3)


def test_an_end_without_a_token_flushes() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer, SamplingParams())
    assert stream.feed(TokenOutput("r", tuple(tokenizer.backend.encode("가").ids[:1]))).text == ""
    assert stream.feed(TokenOutput("r", finish="length")).text == "\ufffd"


@given(ANY, IDS)
@settings(max_examples=200)
def test_prompt_texts_joined_are_the_prompt(name: str, ids: list[int]) -> None:
    tokens = prompt_texts(TOKENIZERS[name], ids, ())
    assert "".join(token.text for token in tokens) == TOKENIZERS[name].decode(ids)
    assert [token.token for token in tokens] == ids
