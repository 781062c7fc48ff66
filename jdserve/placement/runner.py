"""Candidates on all cores: the same answers, whatever their number."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import repeat
from types import TracebackType
from typing import NamedTuple

from jdserve.placement.candidates import Part, Unit
from jdserve.placement.compose import Composed, alone_plan, compose
from jdserve.placement.evaluate import Evaluator
from jdserve.placement.job import Job, Scope
from jdserve.placement.sizing import Sizer

POOL_FROM = 16
"""Tasks from which worker processes are worth their start."""


class Task(NamedTuple):
    """A question about one candidate.

    Attributes:
        what: a unit, or the instances of one phase by themselves.
        climb: find the highest grid step that passes; otherwise say whether ``step`` does.
        step: to be asked about; or one that is known to pass, None for none.
        limit: rate that is known not to pass.
        start: where to begin to climb, when no step is known to pass.
    """

    what: Unit | Part
    climb: bool
    step: int | None
    limit: float
    start: int | None = None


class Tools:
    """What answers tasks.

    Attributes:
        job, sizer, evaluator: see there.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.sizer = Sizer(job)
        self.evaluator = Evaluator(job)

    def composed(self, what: Unit | Part) -> tuple[Composed, Scope]:
        """One unit by itself, or one phase."""
        if isinstance(what, Part):
            return alone_plan(self.job, self.sizer, what), "prefill" if what.role == "prefill" else "decode"
        return compose(self.job, self.sizer, [what], "any"), "both"

    def perform(self, task: Task) -> tuple[int | None, int]:
        """The answer (1 or 0, or a grid step, or None for none), and how many runs it took."""
        evaluator = self.evaluator
        before = evaluator.runs
        composed, scope = self.composed(task.what)
        if task.climb:
            answer = evaluator.highest(composed, scope, task.step, task.limit, task.start)
        else:
            assert task.step is not None
            answer = int(evaluator.passes(composed, evaluator.rate(task.step), scope))
        return answer, evaluator.runs - before


@lru_cache(maxsize=1)
def _tools(blob: bytes) -> Tools:
    return Tools(pickle.loads(blob))


def _perform(blob: bytes, task: Task) -> tuple[int | None, int]:
    return _tools(blob).perform(task)


class Runner:
    """Answers tasks, in this process or in several.

    Attributes:
        tools: of this process.
        runs: simulations so far, all processes together.

    Args:
        job: see there.
        workers: processes; None takes as many as there are cores once there is enough to do, 1 stays in this process.
    """

    def __init__(self, job: Job, workers: int | None = None) -> None:
        self.tools = Tools(job)
        self._workers = len(os.sched_getaffinity(0)) if workers is None else workers
        self._eager = workers is not None
        self._blob = pickle.dumps(job) if self._workers > 1 else b""
        self._pool: ProcessPoolExecutor | None = None
        self._asked = 0
        self._elsewhere = 0

    @property
    def runs(self) -> int:
        """Simulations so far, all processes together."""
        return self.tools.evaluator.runs + self._elsewhere

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def answer(self, tasks: Seq[Task]) -> list[int | None]:
        """The answer to each task."""
        self._asked += len(tasks)
        if len(tasks) < 2 or self._workers < 2 or (not self._eager and self._asked < POOL_FROM):
            return [self.tools.perform(task)[0] for task in tasks]
        if self._pool is None:
            # spawned, so that nothing depends on what this process has loaded or locked
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, mp_context=context)
        answers = list(self._pool.map(_perform, repeat(self._blob), tasks))
        self._elsewhere += sum(runs for _, runs in answers)
        return [answer for answer, _ in answers]
