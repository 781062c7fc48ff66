"""The figures, by hand."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jdserve.loadgen.client import CUT_OFF, Record
from jdserve.loadgen.metrics import Attainment, Latency, Slo, attainment, latency, spread, summarise
from jdserve.loadgen.report import show


def record(scheduled, chunks, tokens=None, **changes):
    fields = {
        "scheduled": scheduled,
        "input_len": 5,
        "output_len": 3,
        "sent": scheduled,
        "chunks": chunks,
        "ended": chunks[-1] if chunks else None,
        "prompt_tokens": 5,
        "output_tokens": len(chunks) if tokens is None else tokens,
        "finish": "length",
        "error": None,
    }
    return Record(**(fields | changes))


def test_latencies_by_hand():
    one = latency(record(1.0, [1.5, 1.75, 2.5], sent=1.25))
    # From the scheduled time, not from the sent one.
    assert one == Latency(ttft=0.5, tpot=0.5, e2e=1.5, itl=(0.25, 0.75))


def test_tpot_divides_by_tokens_not_by_chunks():
    assert latency(record(0.0, [1.0, 2.0], tokens=5)).tpot == 0.25


def test_tpot_counts_to_the_end_of_the_text():
    # The last token had no text of its own and came with the reason only.
    assert latency(record(0.0, [1.0, 2.0], tokens=3, ended=3.0)) == Latency(ttft=1.0, tpot=1.0, e2e=3.0, itl=(1.0,))


def test_a_single_token_has_no_tpot():
    assert latency(record(0.0, [1.0])) == Latency(ttft=1.0, tpot=None, e2e=1.0, itl=())


def test_failed_requests_have_no_latency():
    assert latency(record(0.0, [1.0], error="HTTP 500")) is None


def test_spread_by_hand():
    figures = spread([float(value) for value in range(101)])
    assert (figures.mean, figures.p50, figures.p90, figures.p99, figures.max) == (50, 50, 90, 99, 100)
    assert spread([]) is None
    assert spread([1.0, 2.0]).p90 == pytest.approx(1.9)


def test_attainment_by_hand():
    latencies = [
        Latency(ttft=0.1, tpot=0.01, e2e=1, itl=()),
        Latency(ttft=0.2, tpot=0.02, e2e=1, itl=()),  # on both bounds
        Latency(ttft=0.3, tpot=0.01, e2e=1, itl=()),
        Latency(ttft=0.1, tpot=0.03, e2e=1, itl=()),
        Latency(ttft=0.1, tpot=None, e2e=1, itl=()),
        None,
        None,
        None,
    ]
    assert attainment(latencies, Slo(0.2, 0.02)) == Attainment(joint=3 / 8, ttft=4 / 8, tpot=4 / 8)
    assert attainment(latencies, Slo(ttft=0.2)) == Attainment(joint=4 / 8, ttft=4 / 8, tpot=5 / 8)
    assert attainment(latencies, Slo()) is None
    assert attainment([], Slo(1, 1)) is None


seconds = st.floats(0, 10)
latencies = st.lists(
    st.none() | st.builds(Latency, ttft=seconds, tpot=st.none() | seconds, e2e=seconds, itl=st.just(())), min_size=1
)


@given(latencies=latencies, ttft=seconds, tpot=seconds)
def test_joint_attainment_lies_between_its_bounds(latencies, ttft, tpot):
    met = attainment(latencies, Slo(ttft, tpot))
    answered = sum(one is not None for one in latencies) / len(latencies)
    assert met.joint <= min(met.ttft, met.tpot) <= answered
    assert met.joint >= met.ttft + met.tpot - answered - 1e-9


@given(latencies=latencies, slo=st.builds(Slo, seconds, seconds), looser=st.floats(1, 10))
def test_looser_bounds_are_met_as_often_or_more(latencies, slo, looser):
    tight, loose = attainment(latencies, slo), attainment(latencies, Slo(slo.ttft * looser, slo.tpot * looser))
    assert loose.joint >= tight.joint
    assert loose.ttft >= tight.ttft
    assert loose.tpot >= tight.tpot


@given(latencies=latencies, slo=st.builds(Slo, seconds, seconds))
def test_a_failure_more_counts_as_a_miss(latencies, slo):
    before, after = attainment(latencies, slo), attainment([*latencies, None], slo)
    assert after.joint == pytest.approx(before.joint * len(latencies) / (len(latencies) + 1))


RUN = [
    record(1.0, [1.5, 2.0, 2.5], sent=1.125),
    record(2.0, [3.0, 4.0], output_len=2, prompt_tokens=6),
    record(3.0, [], error="HTTP 503: full"),
    record(3.0, [], error="HTTP 503: full"),
    record(4.0, [4.5], error="the stream ended early"),
    record(5.0, [5.5], error=CUT_OFF),
]


def test_summary_by_hand():
    figures = summarise(RUN, Slo(0.5, 1.0), unsent=4)
    assert (figures.completed, figures.failed, figures.cut_off, figures.unsent) == (2, 3, 1, 4)
    assert figures.errors == {"HTTP 503: full": 2, "the stream ended early": 1}
    assert (figures.other_input_len, figures.other_output_len) == (1, 0)
    assert figures.duration_s == 3.0  # from 1.0 to 4.0
    assert figures.offered_rate == 5 / 4
    assert figures.request_throughput == pytest.approx(2 / 3)
    assert figures.input_token_throughput == pytest.approx(11 / 3)
    assert figures.output_token_throughput == pytest.approx(5 / 3)
    assert (figures.ttft.mean, figures.ttft.max) == (0.75, 1.0)
    assert (figures.tpot.p50, figures.e2e.p50) == (0.75, 1.75)
    assert figures.itl.mean == pytest.approx(2 / 3)
    assert figures.lag.max == 0.125
    assert figures.attainment == Attainment(joint=1 / 6, ttft=1 / 6, tpot=2 / 6)


def test_summary_of_nothing():
    figures = summarise([], Slo(1.0, 1.0), unsent=3)
    assert (figures.completed, figures.failed, figures.cut_off, figures.unsent) == (0, 0, 0, 3)
    assert figures.ttft is figures.lag is figures.attainment is figures.offered_rate is None
    assert figures.duration_s == figures.request_throughput == 0


def test_summary_without_a_completed_request():
    figures = summarise(RUN[2:], Slo(1.0, 1.0))
    assert figures.duration_s == figures.output_token_throughput == 0
    assert figures.attainment == Attainment(0, 0, 0)


def test_table_shows_the_figures_and_errors_as_they_are():
    text = io.StringIO()
    show(summarise([*RUN, record(6.0, [], error="[bold] x")], Slo(0.5), unsent=4), Console(file=text, width=100))
    table = text.getvalue()
    for said in ("750.00", "2 x HTTP 503: full", "1 x [bold] x", "14.29%", "TTFT <= 0.5 s", "TPOT unbounded"):
        assert said in table
