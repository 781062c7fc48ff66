"""Arrivals, lengths, traces and prefixes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdserve.core.errors import InvalidWorkload
from jdserve.sim.lengths import FromTrace, LogNormal, SharedPrefix, Uniform
from jdserve.sim.prefixes import Prefixes
from jdserve.sim.traces import TRACES, load_trace
from jdserve.sim.workload import FS, Source, Workload

UNIFORM = Uniform(100, 10)


def gaps(workload: Workload) -> list[float]:
    times = [0, *workload.arrivals]
    return [(after - before) / FS for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize(
    ("name", "requests", "inputs", "outputs", "rate"),
    [
        ("azure2023_conv", 19366, 1154.7, 211.1, 5.53),
        ("azure2023_code", 8819, 2047.8, 27.9, 2.567),
        ("mooncake_conversation", 12031, 12035.1, 342.6, 3.401),
        ("mooncake_synthetic", 3993, 15325.5, 149.1, 3.907),
        ("arxiv_summarization", 28257, 2588.1, 291.4, None),
        ("humaneval", 164, 171.3, 98.2, None),
        ("sharegpt", 1600, 758.7, 186.3, None),
    ],
)
def test_traces_that_come_along(name: str, requests: int, inputs: float, outputs: float, rate: float | None) -> None:
    trace = load_trace(name)
    assert name in TRACES
    assert len(trace) == requests
    assert sum(trace.inputs) / requests == pytest.approx(inputs, abs=0.06)
    assert sum(trace.outputs) / requests == pytest.approx(outputs, abs=0.06)
    assert bool(trace.blocks) == name.startswith("mooncake")
    if rate is None:
        with pytest.raises(InvalidWorkload, match=f"{name}: has lengths only, no arrivals"):
            Workload.replay(trace)
    else:
        assert Workload.replay(trace).rate == pytest.approx(rate, rel=1e-3)
        assert Workload.replay(trace, speed=2).rate == pytest.approx(2 * rate, rel=1e-3)


def test_mooncake_files_in_either_form(tmp_path: Path) -> None:
    rows = "[0, 1000, 5, [1, 2]]\n[27, 600, 0, [1, 3]]\n"
    objects = (
        '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"timestamp": 27, "input_length": 600, "output_length": 0, "hash_ids": [1, 3]}\n'
    )
    for text in (rows, objects):
        path = tmp_path / "t.jsonl"
        path.write_text(text)
        trace = load_trace(path)
        assert (trace.inputs, trace.outputs, trace.arrivals_s) == ((1000, 600), (5, 0), (0.0, 0.027))
        assert trace.blocks == ((1, 2), (1, 3))
    path.write_text("[5, 10, 1, []]\n[4, 10, 1, []]\n")
    with pytest.raises(InvalidWorkload, match="line 2: timestamp must be at least 5"):
        load_trace(path)
    path.write_text("[5, 0, 1, []]\n")
    with pytest.raises(InvalidWorkload, match="line 1: Expected `int` >= 1"):
        load_trace(path)


def test_files_in_our_own_format_may_have_empty_answers_and_equal_times(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("input_len,output_len,arrival_s\n5,0,1.5\n6,1,1.5\n")
    workload = Workload.replay(load_trace(path))
    assert (workload.arrivals, workload.outputs) == ((0, 0), (0, 1))
    with pytest.raises(InvalidWorkload, match=r"the arrivals of .* take no time"):
        Source(lengths=UNIFORM, process="trace", trace=load_trace(path))
    path.write_text("input_len,output_len\n")
    with pytest.raises(InvalidWorkload, match="at least 1 row, got 0"):
        load_trace(path)
    with pytest.raises(InvalidWorkload, match="neither a file nor one of azure2023_conv"):
        load_trace("azure")


@given(
    process=st.sampled_from(("fixed", "poisson", "gamma")),
    rate=st.sampled_from((0.5, 3.0, 700.0)),
    count=st.integers(1, 60),
    seed=st.integers(0, 9),
)
def test_rates_stretch_the_same_requests_and_more_of_them_go_on(process, rate, count, seed) -> None:
    source = Source(lengths=FromTrace(load_trace("sharegpt")), process=process, cv=2.0, seed=seed)
    workload = source.at(rate, count)
    double = source.at(2 * rate, count)
    assert (workload.inputs, workload.outputs) == (double.inputs, double.outputs)
    assert all(abs(a - 2 * b) <= 2 for a, b in zip(workload.arrivals, double.arrivals, strict=True))
    assert workload.arrivals == source.at(rate, count + 20).arrivals[:count]
    assert workload.inputs == source.at(rate, count + 20).inputs[:count]


@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 3.0)])
def test_gaps_have_the_rate_and_variation_asked_for(process, cv) -> None:
    found = gaps(Source(lengths=UNIFORM, process=process, cv=cv).at(4.0, 20_000))
    mean = math.fsum(found) / len(found)
    deviation = math.sqrt(math.fsum((gap - mean) ** 2 for gap in found) / len(found))
    assert mean == pytest.approx(0.25, rel=6 * cv / math.sqrt(len(found)))
    assert deviation / mean == pytest.approx(cv, rel=0.1)


def test_the_gaps_of_a_trace_at_another_rate() -> None:
    trace = load_trace("azure2023_code")
    workload = Source(lengths=UNIFORM, process="trace", trace=trace).at(10.0, 2 * len(trace))
    assert workload.rate == pytest.approx(10.0, rel=1e-3)
    replayed = Workload.replay(trace)
    scale = replayed.rate / 10.0
    assert workload.arrivals[1000] == pytest.approx(replayed.arrivals[1000] * scale, rel=1e-9)


def test_lengths_in_order_resampled_fitted_and_behind_a_common_prefix() -> None:
    trace = load_trace("sharegpt")
    assert Source(lengths=FromTrace(trace, resample=False)).at(1, 1602).inputs == (*trace.inputs, *trace.inputs[:2])
    resampled = Source(lengths=FromTrace(trace)).at(1, 4000)
    assert sum(resampled.inputs) / 4000 == pytest.approx(758.7, rel=0.05)
    fit = LogNormal.fit(trace)
    drawn = Source(lengths=fit).at(1, 4000)
    assert sum(map(math.log, drawn.inputs)) / 4000 == pytest.approx(fit.input_mean, rel=0.02)
    assert max(drawn.inputs) <= max(trace.inputs)
    assert min(*drawn.inputs, *drawn.outputs) >= 1
    shared = Source(lengths=SharedPrefix(Uniform(100, 10), groups=3, blocks=2, block_tokens=64)).at(1, 300)
    assert set(shared.inputs) == {228}
    assert set(shared.blocks) == {(0, 1), (2, 3), (4, 5)}


def test_pages_of_blocks() -> None:
    workload = Workload(
        arrivals=(0, 0, 0), inputs=(13, 9, 3), outputs=(1, 1, 1), blocks=((1, 2, 3), (1, 5), (1,)), block_tokens=6
    )
    first, second, third = (Prefixes(workload, 4).of(index) for index in range(3))
    assert (len(first), len(second), len(third)) == (3, 2, 0)
    assert first[0] == second[0], "tokens 0..3 are in the block that both have"
    assert first[1] != second[1], "tokens 4..7 reach into blocks that differ"
    assert len(set(first)) == 3


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf])
def test_bad_rates(rate: float) -> None:
    with pytest.raises(InvalidWorkload, match="rate: must be a finite number above 0"):
        Source(lengths=UNIFORM).at(rate, 10)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Source(lengths=UNIFORM).at(1, 0), "count: must be at least 1, got 0"),
        (lambda: Source(lengths=UNIFORM, cv=0.0), "cv: must be a finite number above 0"),
        (lambda: Source(lengths=UNIFORM, process="trace"), "a trace with arrivals is needed"),
        (lambda: Workload.of([], [], []), "must have at least 1 request, got 0"),
        (lambda: Workload.of([0.0, math.nan], [1, 1], [1, 1]), r"arrivals\[1\]: must be finite"),
        (lambda: Workload.of([1.0, 0.5], [1, 1], [1, 1]), "never decrease"),
        (lambda: Workload.of([0.0], [0], [1]), r"inputs\[0\]: must be at least 1, got 0"),
        (lambda: Workload.of([0.0], [1], [-1]), r"outputs\[0\]: must be at least 0, got -1"),
        (lambda: Workload.of([0.0], [1, 2], [1]), "1 arrivals, 2 inputs"),
        (lambda: Uniform(0, 1), "input: must be at least 1"),
        (lambda: LogNormal(1, -1, 1, 1), "input_sigma: must be at least 0"),
        (lambda: LogNormal(1, 1, 1, 1, correlation=2), "correlation: must be between -1 and 1"),
        (lambda: SharedPrefix(UNIFORM, 0, 1), "groups: must be at least 1"),
    ],
)
def test_bad_workloads(build, message) -> None:
    with pytest.raises(InvalidWorkload, match=message):
        build()
