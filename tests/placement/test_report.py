"""The report: one page that asks for nothing, with curves that go through the figures of the search."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest

from jdserve.core.request import SLO
from jdserve.cost.models import model
from jdserve.cost.roofline import RooflineModel
from jdserve.placement import SearchResult
from jdserve.placement.job import Job
from jdserve.placement.report import html
from jdserve.placement.study import Study, study
from jdserve.placement.svg import Axis, Line, chart, nice
from placement.toy import cluster, run, source

VOID = {"meta", "br"}


def job(slo: SLO) -> Job:
    spec, machines = model("llama-3-8b"), cluster()
    return Job(
        spec=spec,
        model="llama-3-8b",
        dtype="bfloat16",
        cluster=machines,
        source=source(),
        workload="toy <script>",
        slo=slo,
        latency=RooflineModel(spec=spec, dtype="bfloat16", device=machines.device, per_node=3),
        rate=None,
        devices=3,
        max_model_len=2048,
        requests=80,
        steady=False,
        confirm=1,
        tolerance=0.05,
    )


@pytest.fixture(scope="module", params=[True, False], ids=["wide", "narrow"])
def found(request: pytest.FixtureRequest) -> Study:
    """Of a plan with colocated instances, and of one whose KV moves."""
    return study(job(SLO(0.06, 0.012)), run(wide=request.param))


class Page(HTMLParser):
    """Checks that tags are closed, and collects words and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.addresses: list[str] = []
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_curves_go_through_the_figures_of_the_search(found: Study) -> None:
    option = found.result.option
    assert option is not None
    assert option.goodput is not None
    best = found.systems[0]
    at = next(point for point in best.by_rate if point.rate == option.goodput)
    assert at.joint == option.attainment.share >= 0.9
    assert at.joint <= min(at.ttft, at.tpot)
    assert at.low <= at.joint <= at.high
    assert next(point.joint for point in best.by_scale if point.scale == 1.0) == option.attainment.share
    assert best.tightest is not None
    assert best.tightest <= 1.0
    assert [point.joint for point in best.by_scale] == sorted(point.joint for point in best.by_scale)
    assert len(found.systems) == len(found.result.options)


def test_times_of_a_request_add_up(found: Study) -> None:
    spent, tpot, ttft = found.spent, found.tpot, found.ttft
    assert spent is not None
    assert ttft is not None
    assert tpot is not None
    assert min(msgspec.structs.astuple(spent)) >= 0
    assert (ttft.at(50) or 0) <= (ttft.at(90) or 0) <= (ttft.at(99) or 0)
    assert spent.queue + spent.prefill == pytest.approx(ttft.at(50), rel=1.0)
    assert found.bottleneck is not None
    assert found.result.option is not None
    assert found.bottleneck.rate == 1.15 * (found.result.option.goodput or 0)
    assert sum(bool(seat.instance) for seat in found.seats) == sum(i.tp * i.pp for i in found.instances)


def test_the_page_stands_alone_and_says_everything(found: Study) -> None:
    text = html(found)
    page = Page(text)
    assert page.addresses == []
    assert "script" not in page.seen
    assert not re.search(r"url\(|@import|https?:", text)
    for words in (
        "The cluster",
        "Attainment against rate",
        "Attainment against SLO scale",
        "TTFT at",
        "TPOT at",
        "Where the time goes",
        "The next bottleneck",
        "Links",
        "The alternatives",
        "Candidates",
        "toy <script>",
        found.result.reason,
    ):
        assert words in page.words
    assert all(entry.reason in page.words for entry in found.result.log)
    assert page.seen.count("svg") >= 6
    assert html(found) == text


def test_the_same_as_json(found: Study) -> None:
    again = msgspec.json.decode(found.to_json(), type=Study)
    assert again.to_json() == found.to_json()
    assert html(again) == html(found)


def test_a_job_that_cannot_be_done_has_a_page_too() -> None:
    slo = SLO(0.0001, 0.0001)
    answer: SearchResult = run(slo=slo)
    page = Page(html(study(job(slo), answer)))
    assert "Cannot be done" in page.words
    assert answer.reason in page.words
    assert answer.nearest is not None
    assert answer.nearest.label in page.words


@pytest.mark.parametrize(("step", "wanted"), [(0.03, 0.05), (0.2, 0.2), (2.1, 2.5), (7, 10), (100, 100)])
def test_ticks_are_round(step: float, wanted: float) -> None:
    assert nice(step) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "axis", [Axis(0, 0.03, "x"), Axis(0, 7, "x"), Axis(0.01, 3, "x", log=True), Axis(1e-4, 1e3, "x", log=True)]
)
def test_an_axis_has_a_few_ticks_inside(axis: Axis) -> None:
    ticks = axis.ticks()
    assert 3 <= len(ticks) <= 9
    assert all(0 <= axis.place(tick) <= 1 for tick in ticks)
    assert (axis.place(axis.low), axis.place(axis.high * 2)) == (0, 1)


def test_lines_stay_inside_the_picture() -> None:
    drawn = chart("t", Axis(0, 1, "x"), Axis(0, 1, "y"), [Line("a", "blue", [(-5, 9), (5, -9)])])
    (points,) = re.findall(r'points="([^"]*)"', drawn)
    assert points == "60.0,14.0 416.0,256.0"
