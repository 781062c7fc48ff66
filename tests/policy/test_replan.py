"""The trigger fires once for a step of the load, and never for noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdserve.core.errors import InvalidWorkload
from jdserve.policy.replan import NS, Answer, Arrival, Clock, Replan, ReplanTrigger, Traffic, TriggerConfig

WINDOW = 60.0

Rate = Callable[[float], float]


def poisson(rate: Rate, end: float, seed: int, lengths: Rate = lambda _: 500.0) -> Iterator[tuple[float, int]]:
    """(second, prompt tokens) of random arrivals."""
    source, now = random.Random(seed), 0.0
    while True:
        now += source.expovariate(max(rate(now), 1e-9))
        if now >= end:
            return
        yield now, max(1, round(source.expovariate(1 / lengths(now))))


def feed(trigger: ReplanTrigger, arrivals: Iterator[tuple[float, int]], end: float) -> list[tuple[float, Replan]]:
    fired: list[tuple[float, Replan]] = []
    for at, size in arrivals:
        for event in (Arrival(size), Answer(size)):
            fired += [(at, command) for command in trigger.handle(event, round(at * NS))]
    return fired + [(end, command) for command in trigger.handle(Clock(), round(end * NS))]


def trigger(reference: Traffic | None = None, **config: float) -> ReplanTrigger:
    return ReplanTrigger(TriggerConfig(**{"window_s": WINDOW, **config}), reference)


@given(rate=st.floats(0.02, 6), seed=st.integers(0, 2**32), size=st.floats(10, 3000))
@settings(max_examples=25, deadline=None)
def test_a_constant_load_never_fires(rate: float, seed: int, size: float) -> None:
    arrivals = poisson(lambda _: rate, 720, seed, lambda _: size)
    assert feed(trigger(), arrivals, 720) == []


@given(gap_ms=st.integers(300, 200_000))
@settings(max_examples=20, deadline=None)
def test_even_arrivals_never_fire(gap_ms: int) -> None:
    arrivals = ((n * gap_ms / 1000, 100) for n in range(int(720_000 / gap_ms)))
    assert feed(trigger(), arrivals, 720) == []


@given(rate=st.floats(6, 10), factor=st.sampled_from([0.4, 0.5, 2.0]), at=st.floats(120, 180), seed=st.integers())
@settings(max_examples=15, deadline=None)
def test_a_step_of_the_rate_fires_once_with_the_new_rate(rate: float, factor: float, at: float, seed: int) -> None:
    arrivals = poisson(lambda now: rate * factor if now >= at else rate, 600, seed)
    fired = feed(trigger(), arrivals, 600)
    assert len(fired) == 1
    second, command = fired[0]
    assert at < second <= at + 3 * WINDOW + 10
    assert command.traffic.rate == pytest.approx(rate * factor, rel=0.4)
    assert "rate" in {shift.quantity for shift in command.shifts}


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_change_of_lengths_fires(factor: float) -> None:
    arrivals = poisson(lambda _: 5, 480, 1, lambda now: 500 * (factor if now >= 240 else 1))
    ((_, command),) = feed(trigger(), arrivals, 480)
    assert {shift.quantity for shift in command.shifts} == {"input", "output"}
    assert command.traffic.input.value == pytest.approx(500 * factor, rel=0.25)


def test_a_burst_shorter_than_a_window_changes_nothing() -> None:
    arrivals = poisson(lambda now: 50 if 245 < now < 285 else 5, 600, 2)
    assert feed(trigger(), arrivals, 600) == []


def test_no_traffic_reads_as_zero_and_lets_the_plan_shrink() -> None:
    machine = trigger()
    ((_, command),) = feed(machine, poisson(lambda _: 5, 300, 3), 3600)
    assert command.traffic.rate == command.traffic.rate_high == 0.0
    assert (machine.traffic.input.value, machine.traffic.output.value) == (0.0, 0.0)
    assert not math.isnan(machine.traffic.dispersion)
    # and when the requests are back it says so
    later = ((3600 + at, size) for at, size in poisson(lambda _: 5, 300, 4))
    ((_, back),) = feed(machine, later, 3900)
    assert back.traffic.rate == pytest.approx(5, rel=0.2)


def test_what_was_never_asked_for_reads_as_zero() -> None:
    machine = trigger()
    assert machine.handle(Clock(), 10**6 * NS) == []
    assert (machine.traffic.rate, machine.traffic.rate_high, machine.traffic.input.value) == (0.0, 0.0, 0.0)


def test_long_silence_is_the_same_as_every_window_of_it() -> None:
    jumped, stepped = trigger(), trigger()
    for machine in (jumped, stepped):
        feed(machine, poisson(lambda _: 4, 240, 5), 240)
    fired = jumped.handle(Clock(), 10**5 * NS)
    each = [command for second in range(240, 10**5 + 1, 20) for command in stepped.handle(Clock(), second * NS)]
    assert fired == each
    later = list(poisson(lambda _: 4, 600, 6))
    shifted = [(10**5 + at, size) for at, size in later]
    assert feed(jumped, iter(shifted), 10**5 + 600) == feed(stepped, iter(shifted), 10**5 + 600)


def test_a_load_that_is_not_the_planned_one_fires_at_once() -> None:
    planned = Traffic.planned(10.0, 500, 500)
    ((at, command),) = feed(trigger(planned), poisson(lambda _: 20, 600, 7), 600)
    assert at <= 2 * WINDOW + 1
    assert command.shifts[0].before == 10.0
    assert feed(trigger(planned), poisson(lambda _: 10, 600, 8), 600) == []


def test_bursty_arrivals_are_no_shift() -> None:
    def bursts() -> Iterator[tuple[float, int]]:
        source, now = random.Random(9), 0.0
        while now < 1800:
            now += source.expovariate(0.2)
            yield from ((now, 100) for _ in range(source.randrange(1, 40)))

    machine = trigger()
    assert feed(machine, bursts(), 1800) == []
    assert machine.traffic.dispersion > 5


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rate", [9.5, 10.0, 10.5])
def test_a_load_at_the_boundary_does_not_flap(rate: float, seed: int) -> None:
    """Units of 10 req/s each, a load of about one unit, ten minutes: at most one change of plan."""
    machine, units, changes = trigger(), math.ceil(Traffic.planned(rate, 1, 1).rate_high / 10), 0
    for _, command in feed(machine, poisson(lambda _: rate, 600, seed), 600):
        wanted = math.ceil(command.traffic.rate_high / 10)
        changes += wanted != units
        units = wanted
    assert changes <= 1


@pytest.mark.parametrize("wrong", [{"window_s": 0}, {"change": math.nan}, {"certainty": -1}, {"window_s": math.inf}])
def test_settings_have_bounds(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidWorkload, match=next(iter(wrong))):
        TriggerConfig(**wrong)


@pytest.mark.parametrize("wrong", [(-1, 1, 1), (math.nan, 1, 1), (1, math.inf, 1)])
def test_a_planned_load_has_bounds(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidWorkload, match="finite"):
        Traffic.planned(*wrong)
