"""Arrivals, workloads and prompts: what is sent, and when."""

import gzip
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from jdserve.loadgen import arrivals, prompts
from jdserve.loadgen.errors import BenchError
from jdserve.loadgen.workload import Row, Workload

rates = st.floats(0.01, 1e4)
seeds = st.integers(0, 2**32)


def test_fixed_arrivals_are_even_and_start_at_zero():
    assert arrivals.fixed(4, 5) == [0, 0.25, 0.5, 0.75, 1.0]


@given(rate=rates, seed=seeds, count=st.integers(1, 200))
def test_poisson_arrivals_never_decrease_and_depend_on_the_seed_alone(rate, seed, count):
    times = arrivals.poisson(rate, count, seed)
    assert len(times) == count
    assert times == sorted(times)
    assert times[0] >= 0
    assert times == arrivals.poisson(rate, count, seed)
    # Common random numbers: another rate stretches the same gaps. A power of two keeps it exact.
    assert arrivals.poisson(rate * 2, count, seed) == [at / 2 for at in times]


@given(rate=rates, seed=seeds)
def test_poisson_mean_rate_and_gap_variance(rate, seed):
    count = 4000
    times = arrivals.poisson(rate, count, seed)
    gaps = [(after - before) * rate for before, after in zip([0.0, *times], times, strict=False)]
    # The mean of n unit exponentials has deviation 1/sqrt(n), their variance sqrt(8/n); six of them never happen.
    mean = math.fsum(gaps) / count
    assert abs(mean - 1) < 6 / math.sqrt(count)
    assert abs(math.fsum((gap - mean) ** 2 for gap in gaps) / count - 1) < 6 * math.sqrt(8 / count)


def test_poisson_seeds_differ():
    assert arrivals.poisson(1, 10, 0) != arrivals.poisson(1, 10, 1)


def test_replay_counts_from_the_first_row_and_speeds_up():
    assert arrivals.replay([100.0, 101.0, 101.0, 104.0], speed=2) == [0, 0.5, 0.5, 2]


@given(gaps=st.lists(st.floats(0, 1e6), min_size=1, max_size=50), speed=st.floats(0.01, 100))
def test_replay_is_monotone(gaps, speed):
    seconds = [math.fsum(gaps[: place + 1]) for place in range(len(gaps))]
    times = arrivals.replay(seconds, speed)
    assert times[0] == 0
    assert times == sorted(times)


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf])
def test_bad_rates_are_refused(rate):
    for call in (lambda: arrivals.fixed(rate, 1), lambda: arrivals.poisson(rate, 1, 0)):
        with pytest.raises(BenchError, match="rate: must be a finite number above 0"):
            call()
    with pytest.raises(BenchError, match="speed: must be a finite number above 0"):
        arrivals.replay([0.0], rate)


def test_bad_counts_and_traces_are_refused():
    with pytest.raises(BenchError, match="count: must be at least 1, got 0"):
        arrivals.fixed(1, 0)
    with pytest.raises(BenchError, match="at least 1 row"):
        arrivals.replay([])
    with pytest.raises(BenchError, match=r"arrivals\[1\].*at least the one before \(2.0\), got 1.0"):
        arrivals.replay([2.0, 1.0])
    with pytest.raises(BenchError, match=r"arrivals\[0\].*got nan"):
        arrivals.replay([math.nan])


def test_uniform_workload():
    assert Workload.uniform(2, 8, 4).rows == (Row(8, 4), Row(8, 4))
    assert Workload.uniform(2, 8, 4).arrivals() is None
    with pytest.raises(BenchError, match="input_len: must be at least 1, got -3"):
        Workload.uniform(2, -3, 4)


def write(tmp_path, name, text):
    path = tmp_path / name
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


CSV = "arrival_s,input_len,output_len,tenant\n1.5,100,10,a\n1.5,7,1,b\n4,33,3,c\n"
JSONL = (
    '{"input_len": 100, "output_len": 10, "arrival_s": 1.5, "tenant": "a"}\n'
    '{"input_len": 7, "output_len": 1, "arrival_s": 1.5}\n{"input_len": 33, "output_len": 3, "arrival_s": 4}\n'
)


@pytest.mark.parametrize(
    ("name", "text"), [(n + z, t) for n, t in (("t.csv", CSV), ("t.jsonl", JSONL)) for z in ("", ".gz")]
)
def test_trace_formats_agree(tmp_path, name, text):
    path = write(tmp_path, name, text)
    workload = Workload.read(path)
    assert workload.rows == (Row(100, 10, 1.5), Row(7, 1, 1.5), Row(33, 3, 4.0))
    assert workload.arrivals() == [1.5, 1.5, 4.0]
    assert Workload.read(path, count=2).rows == workload.rows[:2]
    assert Workload.read(path, divisor=20).rows == (Row(5, 1, 1.5), Row(1, 1, 1.5), Row(2, 1, 4.0))


def test_lengths_alone_have_no_arrivals(tmp_path):
    workload = Workload.read(write(tmp_path, "t.csv", "input_len,output_len\n55,4\n829,170\n"))
    assert workload.rows == (Row(55, 4), Row(829, 170))
    assert workload.arrivals() is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "", "at least 1 row, got 0"),
        ("t.csv", "input_len,output_len\n", "at least 1 row, got 0"),
        ("t.csv", "input_len\n3\n", "line 2: .*missing required field `output_len`"),
        ("t.csv", "input_len,output_len\n3,\n", "line 2: .*missing required field `output_len`"),
        ("t.csv", "input_len,output_len\n3,4\n3,x\n", r"line 3: Expected `int`.*output_len"),
        ("t.csv", "input_len,output_len\n0,4\n", r"line 2: Expected `int` >= 1.*input_len"),
        ("t.csv", "input_len,output_len,arrival_s\n3,4,1\n3,4,\n", "row 2: arrival_s must be on all rows or on none"),
        ("t.csv", "input_len,output_len,arrival_s\n3,4,\n3,4,1\n", "row 2: arrival_s must be on all rows or on none"),
        ("t.csv", "input_len,output_len,arrival_s\n3,4,1\n3,4,0.5\n", "row 2: arrival_s .*at least 1.0, got 0.5"),
        ("t.csv", "input_len,output_len,arrival_s\n3,4,nan\n", "row 1: arrival_s must be finite|Expected `float"),
        ("t.jsonl", "", "at least 1 row, got 0"),
        ("t.jsonl", '{"input_len": 3, "output_len": 4}\n{"input_len": 3\n', "line 2: "),
        ("t.jsonl", '{"input_len": 3, "output_len": -4}\n', r"line 1: Expected `int` >= 1.*output_len"),
        ("t.jsonl", "[3, 4]\n", "line 1: Expected `object`"),
        ("t.txt", "3 4\n", r"must end in .csv, .jsonl"),
        ("t", "3 4\n", r"must end in .csv, .jsonl"),
    ],
)
def test_broken_traces_are_refused_with_the_line(tmp_path, name, text, message):
    with pytest.raises(BenchError, match=message):
        Workload.read(write(tmp_path, name, text))


def test_unreadable_traces_are_refused(tmp_path):
    with pytest.raises(BenchError, match=r"cannot be read: .*No such file"):
        Workload.read(tmp_path / "none.csv")
    (tmp_path / "no.csv.gz").write_text("input_len,output_len\n1,1\n")
    with pytest.raises(BenchError, match="cannot be read: "):
        Workload.read(tmp_path / "no.csv.gz")
    (tmp_path / "binary.csv").write_bytes(b"input_len,output_len\n\xff\xfe,1\n")
    with pytest.raises(BenchError, match="cannot be read: "):
        Workload.read(tmp_path / "binary.csv")


def test_too_many_rows_or_a_bad_divisor_are_refused(tmp_path):
    path = write(tmp_path, "t.csv", CSV)
    with pytest.raises(BenchError, match="has 3 rows, 4 were asked for"):
        Workload.read(path, count=4)
    for divisor in (0.5, math.nan, math.inf):
        with pytest.raises(BenchError, match="divisor: must be a finite number of at least 1"):
            Workload.read(path, divisor=divisor)


@given(size=st.integers(1, 80), lengths=st.lists(st.integers(1, 200), max_size=200), seed=seeds)
def test_prompts_have_exact_lengths_and_start_at_places_of_their_own(size, lengths, seed):
    text = range(1000, 1000 + size)
    made = list(prompts.cut(text, lengths, seed))
    assert [len(prompt) for prompt in made] == lengths
    assert made == list(prompts.cut(text, lengths, seed))
    for first in range(0, len(made), size):
        starts = [prompt[0] for prompt in made[first : first + size]]
        assert len(set(starts)) == len(starts)
    for prompt in made[:size]:  # the first round is the text as it stands
        assert all((after - before) % size == 1 % size for before, after in itertools.pairwise(prompt))


def test_a_text_that_is_used_again_gives_other_prompts():
    text = range(400)
    made = [tuple(prompt) for prompt in prompts.cut(text, [64] * 1200, seed=0)]
    assert len(set(made)) == 1200
    assert made != [tuple(prompt) for prompt in prompts.cut(text, [64] * 1200, seed=1)]


def test_an_empty_text_is_refused(tmp_path):
    with pytest.raises(BenchError, match="at least 1 token, got 0"):
        list(prompts.cut([], [1], 0))
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(BenchError, match=r"--text: .*blank"):
        prompts.read_text(tmp_path / "blank.txt")
    with pytest.raises(BenchError, match=r"--text: cannot read .*No such file"):
        prompts.read_text(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(BenchError, match=r"--text: .* must be UTF-8"):
        prompts.read_text(tmp_path / "latin.txt")


def test_the_packaged_text_is_long_and_does_not_repeat():
    words = prompts.read_text().split()
    assert len(words) > 1200
    runs = [tuple(words[place : place + 6]) for place in range(len(words) - 5)]
    assert len(set(runs)) == len(runs)


def test_local_tokenizer_from_file_and_folder(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "red": 1, "blue": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[UNK] $A", special_tokens=[("[UNK]", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert prompts.encode(path, "blue red green") == [2, 1, 0]
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(BenchError, match=r"--tokenizer: .* is no tokenizer.json"):
        prompts.encode(tmp_path / "bad.json", "red")
    with pytest.raises(BenchError, match="--tokenizer: there is no file"):
        prompts.encode(tmp_path / "none.json", "red")
