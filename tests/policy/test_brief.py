"""A brief machine decides what the other one decides."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdserve.core.pages import PageCount
from jdserve.core.plan import Instance
from jdserve.policy.build import machine_for
from jdserve.policy.commands import BriefStep, Command, Emit, Preempt, Pull, RunStep
from jdserve.policy.events import Event
from policy import harness
from policy.test_properties import _arrive, _complete, _disturb, _finish, _topology


class Pair:
    """A machine that checks a brief one on the way."""

    def __init__(self, instance: Instance, page_size: int, *, count: bool) -> None:
        self.full = machine_for(instance, page_size)
        pool = PageCount(instance.pages, page_size) if count else None
        self.brief = machine_for(instance, page_size, pool=pool, brief=True)
        self.tokens: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}

    def handle(self, event: Event, now: int) -> list[Command]:
        try:
            commands = self.full.handle(event, now)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)):
                self.brief.handle(event, now)
            raise
        assert self._outcome(commands, False) == self._outcome(self.brief.handle(event, now), True)
        self.brief.pool.check()
        for name in ("owned", "free", "cached", "available"):
            assert getattr(self.brief.pool, name) == getattr(self.full.pool, name)
        for name in ("waiting", "waiting_tokens", "running", "parked", "preemptions"):
            assert getattr(self.brief, name) == getattr(self.full, name)
        return commands

    def _outcome(self, commands: list[Command], brief: bool) -> list[Any]:
        """What is left of commands when they are told briefly, with the tokens of each request so far."""
        told: list[Any] = []
        tokens = self.tokens[brief]
        for command in commands:
            match command:
                case Emit(request_id, count, finish, parked):
                    tokens[request_id] += count
                    if finish or parked:
                        told.append((request_id, finish, parked, tokens[request_id]))
                case RunStep():
                    prompts = tuple(chunk.request_id for chunk in command.chunks)
                    told.append((command.step_id, command.features(), prompts))
                case BriefStep():
                    told.append((command.step_id, command.features(), command.prompts))
                case Pull(request_id, source, count):
                    told.append((request_id, source, count))
                case Preempt(request_id):
                    told.append((command, tokens[request_id]))
                case _:
                    told.append(command)
        return told

    def __getattr__(self, name: str) -> Any:
        return getattr(self.full, name)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_a_brief_machine_decides_the_same(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((1, 2, 4))
    count = rng.random() < 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "machine_for", lambda instance, size: Pair(instance, size, count=count))
        topology = _topology(rng, size)
        run = harness.Harness(topology, size, max_retries=rng.randint(0, 3))
        for number in range(rng.randint(10, 150)):
            dice = rng.random()
            if dice < 0.3:
                if count:
                    run.arrive(f"r{number}", rng.randint(1, 40), rng.randint(0, 30))
                else:
                    _arrive(run, rng, number)
            elif dice < 0.36:
                _disturb(run, rng)
            else:
                _complete(run, rng, faults=True)
        _finish(run, rng)
