"""Whole topologies under random orders of completions, cancels and failures."""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdserve.core.plan import ColocatedInstance, DecodeInstance, Instance, PrefillInstance
from jdserve.policy.commands import Emit, Pull
from jdserve.policy.decode import DecodeScheduler
from jdserve.policy.events import KVLanded, KVReady, StepDone
from policy.harness import Harness, oldest, step_ids

SEEDS = st.integers(0, 2**32 - 1)
STAGES = (1, 1, 2, 3)
PULLS = ("overlapped", "overlapped", "between_steps")


def _prefill(name: str, rng: random.Random, size: int) -> PrefillInstance:
    return PrefillInstance(
        name=name,
        pp=rng.choice(STAGES),
        pages=rng.randint(38, 90) // size,
        batching=rng.choice(("lm", "kv_capacity")),
        lm_tokens=rng.randint(8, 60),
        max_batch=rng.randint(1, 6),
        prefix_cache=rng.random() < 0.7,
    )


def _decode(name: str, rng: random.Random, size: int) -> DecodeInstance:
    pp = rng.choice(STAGES)
    return DecodeInstance(
        name=name,
        pp=pp,
        pages=rng.randint(48, 90) // size,
        max_num_seqs=rng.randint(1, 8),
        watermark=rng.choice((0.0, 0.0, 0.2)),
        pull=rng.choice(PULLS),
        in_flight=rng.choice((None, rng.randint(1, pp))),
    )


def _colocated(name: str, rng: random.Random, size: int) -> ColocatedInstance:
    return ColocatedInstance(
        name=name,
        pp=rng.choice(STAGES),
        mode=rng.choice(("prefill_first", "chunked")),
        pages=rng.randint(48, 90) // size,
        token_budget=rng.randint(6, 40),
        max_num_seqs=rng.randint(1, 8),
        watermark=rng.choice((0.0, 0.0, 0.2)),
        prefix_cache=rng.random() < 0.7,
    )


def _topology(rng: random.Random, size: int) -> list[Instance]:
    kind = rng.choice(("disaggregated", "colocated", "mixed"))
    instances: list[Instance] = []
    if kind != "colocated":
        instances += [_prefill(f"p{i}", rng, size) for i in range(rng.randint(1, 3))]
        instances += [_decode(f"d{i}", rng, size) for i in range(rng.randint(1, 3))]
    if kind != "disaggregated":
        instances += [_colocated(f"c{i}", rng, size) for i in range(rng.randint(1, 2))]
    return instances


def _arrive(harness: Harness, rng: random.Random, number: int) -> None:
    prompt = rng.choice((rng.randint(1, 12), rng.randint(1, 40)))
    output = rng.choice((0, 1, 2, *(rng.randint(3, 30) for _ in range(6))))
    group = rng.randint(0, 2)
    shared = rng.randint(0, prompt // harness.page_size)
    prefix = tuple(
        bytes((group, index)) if index < shared else bytes((9, number, index))
        for index in range(prompt // harness.page_size)
    )
    harness.arrive(f"r{number}", prompt, output, prefix)


def _complete(harness: Harness, rng: random.Random, faults: bool) -> bool:
    """End one step or pull, whichever; False when there is none."""
    choices: list[Any] = [*harness.busy(), *harness.flights]
    if not choices:
        return False
    choice = rng.choice(choices)
    if not isinstance(choice, str):
        harness.end_pull(choice, fail=faults and rng.random() < 0.15)
        return True
    ids = step_ids(harness.sites[choice].step)
    stopped = [id for id in ids if rng.random() < 0.01]
    failed = [id for id in ids if faults and rng.random() < 0.01]
    harness.finish_step(choice, stopped, failed)
    return True


def _disturb(harness: Harness, rng: random.Random) -> None:
    dice = rng.random()
    if dice < 0.5 and (live := harness.live()):
        harness.cancel(rng.choice(live))
    elif dice < 0.7:
        parked = [(name, id) for name, site in harness.sites.items() for id in site.parked]
        if parked:
            harness.expire(*rng.choice(parked))
    elif dice < 0.8 and harness.sites:
        harness.fail(rng.choice(sorted(harness.sites)))
    else:
        dead = sorted(set(harness._instances) - set(harness.sites))
        if dead:
            harness.join(rng.choice(dead))


def _finish(harness: Harness, rng: random.Random) -> None:
    for _ in range(20_000):
        if not _complete(harness, rng, faults=False):
            break
    harness.check_end()
    harness.check_replay()


@given(seed=SEEDS)
@settings(max_examples=120, deadline=None)
def test_every_request_ends_once_whatever_fails(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((1, 2, 4))
    harness = Harness(_topology(rng, size), size, max_retries=rng.randint(0, 3))
    number = 0
    for _ in range(rng.randint(10, 200)):
        dice = rng.random()
        if dice < 0.3:
            _arrive(harness, rng, number)
            number += 1
        elif dice < 0.36:
            _disturb(harness, rng)
        else:
            _complete(harness, rng, faults=True)
    if rng.random() < 0.3:
        harness.drain()
        _arrive(harness, rng, number)
        assert harness.tickets[f"r{number}"].end == "rejected"
    _finish(harness, rng)


@given(seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_without_faults_only_requests_that_never_fit_are_rejected(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((1, 2, 4))
    harness = Harness(_topology(rng, size), size)
    for number in range(rng.randint(1, 25)):
        _arrive(harness, rng, number)
        for _ in range(rng.randint(0, 6)):
            _complete(harness, rng, faults=False)
    _finish(harness, rng)
    for ticket in harness.tickets.values():
        assert ticket.end in ("length", "stop") or "pages, there are" in ticket.reason, ticket


def _snapshot(machine: DecodeScheduler) -> object:
    """Everything a machine knows, in plain values; what stands in it twice is told once."""
    seen: dict[int, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, int | str | bytes | float | bool | None):
            return value
        if id(value) in seen and not isinstance(value, tuple):
            return ("again", seen[id(value)])
        seen[id(value)] = len(seen)
        if isinstance(value, dict):
            return [(plain(key), plain(item)) for key, item in value.items()]
        if isinstance(value, list | tuple | deque):
            return [plain(item) for item in value]
        if hasattr(value, "__slots__"):
            return [(name, plain(getattr(value, name))) for name in value.__slots__]
        return plain(vars(value)) if hasattr(value, "__dict__") else value

    return plain(vars(machine))


def _random_decode(rng: random.Random) -> DecodeScheduler:
    size = rng.choice((1, 2, 3, 4, 16))
    pages = rng.randint(8, 120)
    pp = rng.choice(STAGES)
    instance = DecodeInstance(
        name="d",
        pp=pp,
        pages=pages,
        max_num_seqs=rng.randint(1, 10),
        watermark=rng.choice((0.0, 0.1)),
        pull=rng.choice(PULLS),
        in_flight=rng.choice((None, rng.randint(1, pp))),
    )
    machine = DecodeScheduler(instance, size)
    pulling: list[str] = []
    for number in range(rng.randint(1, 60)):
        dice = rng.random()
        if dice < 0.3:
            event: Any = KVReady(f"r{number}", "p", rng.randint(1, pages * size // 4 + 1), rng.randint(1, 60))
        elif dice < 0.6 and pulling:
            event = KVLanded(pulling.pop(0))
        elif machine._flights:
            event = StepDone(oldest(machine))
        else:
            continue
        for command in machine.handle(event, number):
            if isinstance(command, Pull):
                pulling.append(command.request_id)
    return machine


def _single_step(machine: DecodeScheduler) -> list[Any]:
    return machine.handle(StepDone(oldest(machine)), 0)


@given(seed=SEEDS)
@settings(max_examples=250, deadline=None)
def test_advance_equals_single_steps_and_the_horizon_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    machine = _random_decode(rng)
    horizon = machine.horizon()
    for refused in (0, -1, horizon + 1):
        with pytest.raises(ValueError, match="horizon"):
            machine.advance(refused, 0)
    if not horizon:
        return
    for k in {1, rng.randint(1, horizon), horizon}:
        skipping, stepping = copy.deepcopy(machine), copy.deepcopy(machine)
        merged = skipping.advance(k, 0)
        tokens: Counter[str] = Counter()
        single: list[Any] = []
        for _ in range(k):
            single = _single_step(stepping)
            batch = list(stepping._flights[-1].batch.members)
            assert single[:-1] == [Emit(id) for id in batch]
            tokens.update(batch)
        assert sorted(merged[:-1], key=str) == sorted((Emit(*token) for token in tokens.items()), key=str)
        assert merged[-1] == single[-1]
        assert skipping.horizon() == stepping.horizon() == horizon - k
        assert _snapshot(skipping) == _snapshot(stepping)
        skipping.pool.check()
    # one step further a decision is taken
    last = copy.deepcopy(machine)
    last.advance(horizon, 0)
    told = {type(command).__name__ for command in _single_step(last)}
    # on several stages a sequence may wait for a page until another step ends
    assert told & {"Preempt", "Release", "Pull"} or (last._depth > 1 and "RunStep" not in told)
