"""Who runs the work of a pipeline stage: the thread that asks, or one thread per stage.

A stage's launches, gathers and scatters are made in the order in which they were asked for, by one thread and no other.
With a single stage that is the launcher thread itself. With several each stage has a thread of its own, because a cheap
program runs inline where it is launched and would hold up the other stages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import jax

from jdserve.runtime.results import Outcome

T = TypeVar("T")


@dataclass(frozen=True)
class Done(Generic[T]):
    """The outcome of work that was done at once."""

    value: T

    def result(self) -> T:
        """What came of it."""
        return self.value


class Driver(Protocol):
    """Runs the work of one stage, in order."""

    def submit(self, work: Callable[..., T], *args: object) -> Outcome[T]:
        """Have ``work(*args)`` done."""
        ...

    def run(self, work: Callable[..., T], *args: object, after: Outcome[Any] | None) -> Outcome[T]:
        """Have a step's program launched; what came of ``after``, on the stage before, is one more argument."""
        ...

    def post(self, work: Callable[..., T], *args: object) -> Outcome[T]:
        """Have ``work(*args)`` done, and count the stage as lost if it fails: nobody needs to look at the outcome."""
        ...

    @property
    def sound(self) -> bool:
        """Whether nothing that was posted has failed."""
        ...

    def close(self) -> None:
        """Drop what has not begun, and wait for the rest."""
        ...


class Inline:
    """Does everything on the thread that asks; errors are raised there."""

    sound = True

    def submit(self, work: Callable[..., T], *args: object) -> Outcome[T]:
        """Do it now."""
        return Done(work(*args))

    def run(self, work: Callable[..., T], *args: object, after: Outcome[Any] | None) -> Outcome[T]:
        """Do it now."""
        assert after is None, "there is no stage before"
        return Done(work(*args))

    def post(self, work: Callable[..., T], *args: object) -> Outcome[T]:
        """Do it now."""
        return Done(work(*args))

    def close(self) -> None:
        """Nothing waits."""


class Bubbles:
    """Seconds in which a stage had nothing to run while another one ran, summed over the stages of an instance.

    A stage runs from the launch of a step's program until what the program gives is there.

    Args:
        stages: of the instance.
        clock: seconds.
    """

    def __init__(self, stages: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stages = stages
        self._clock = clock
        self._busy = self._awake = 0.0
        self._running = 0
        self._since = 0.0
        self._lock = threading.Lock()

    @property
    def busy(self) -> float:
        """Seconds in which stages ran, summed over them."""
        self.change(0)
        return self._busy

    @property
    def awake(self) -> float:
        """Seconds in which at least one stage ran."""
        self.change(0)
        return self._awake

    @property
    def seconds(self) -> float:
        """The bubbles so far."""
        self.change(0)
        return self._stages * self._awake - self._busy

    @contextmanager
    def running(self) -> Iterator[None]:
        """One stage runs."""
        self.change(1)
        try:
            yield
        finally:
            self.change(-1)

    def change(self, by: int) -> None:
        """So many stages more run from now on."""
        with self._lock:
            now = self._clock()
            if self._running:
                self._awake += now - self._since
                self._busy += (now - self._since) * self._running
            self._running += by
            self._since = now


class SpanningBubbles:
    """The same for an instance that spans processes, of which each tells now and then how long its stages have run.

    Here a stage idles while any launch is under way, so the way of activations between processes counts as a bubble.

    Args:
        stages: of the instance.
        hosted: by process, how many of them it takes part in.
        clock: seconds.
    """

    def __init__(self, stages: int, hosted: Mapping[int, int], clock: Callable[[], float] = time.monotonic) -> None:
        self.launches = Bubbles(1, clock)
        self._hosted = hosted
        self._share = stages / sum(hosted.values())
        self._idle = dict.fromkeys(hosted, 0.0)

    def hear(self, process: int, busy_s: float) -> None:
        """The stages of ``process`` have run for so long until now."""
        idle = self._hosted[process] * self.launches.awake - busy_s
        self._idle[process] = max(idle, self._idle[process])  # the news are as old as their way was long

    @property
    def seconds(self) -> float:
        """The bubbles until the last news; what a stage on several processes waits counts once."""
        return self._share * sum(self._idle.values())


class StageThread:
    """One thread with a queue. A step's program ends when what it gives has been computed.

    Args:
        name: of the thread.
        bubbles: of the instance.
    """

    def __init__(self, name: str, bubbles: Bubbles) -> None:
        self._bubbles = bubbles
        self._error: BaseException | None = None
        self._queue = ThreadPoolExecutor(1, thread_name_prefix=name)

    def run(self, work: Callable[..., T], *args: object, after: Outcome[Any] | None) -> Outcome[T]:
        """Queue a step's program, with what the stage before gives."""
        return self.submit(self._run, work, args, after)

    def submit(self, work: Callable[..., T], *args: object) -> Future[T]:
        """Queue the work.

        Raises:
            RuntimeError: the stage was closed, or something that was posted has failed.
        """
        if self._error is not None:
            raise RuntimeError(f"a pipeline stage is lost: {self._error}") from self._error
        return self._queue.submit(work, *args)

    def post(self, work: Callable[..., T], *args: object) -> Outcome[T]:
        """Queue the work; if it fails nothing can be submitted any more."""
        future = self.submit(work, *args)
        future.add_done_callback(self._check)
        return future

    @property
    def sound(self) -> bool:
        """Whether nothing that was posted has failed."""
        return self._error is None

    def close(self) -> None:
        """Drop what has not begun, so that nobody waits for it for ever, and wait for the rest."""
        self._queue.shutdown(cancel_futures=True)

    def _run(self, work: Callable[..., T], args: tuple[object, ...], after: Outcome[Any] | None) -> T:
        more = () if after is None else (after.result(),)
        with self._bubbles.running():
            # Waiting here costs a stage one dispatch per step, and tells when it really runs and whose error it was.
            return jax.block_until_ready(work(*args, *more))

    def _check(self, future: Future[Any]) -> None:
        if not future.cancelled():
            self._error = self._error or future.exception()
