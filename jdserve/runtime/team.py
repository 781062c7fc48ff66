"""The processes of one instance that spans several, seen from the one that leads it: what is said, and what is lost."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future

import msgspec

from jdserve.core.plan import Worker
from jdserve.runtime import lockstep
from jdserve.runtime.activations import Activations
from jdserve.runtime.channel import Channel, Frames, Keys
from jdserve.runtime.hosts import address_of
from jdserve.runtime.steps import StepOutputs
from jdserve.runtime.wire import World
from jdserve.transfer.base import never
from jdserve.transfer.layout import KVLayout

TICK_S = 0.1
SILENCE_S = 15.0
"""A follower that says nothing for so long is lost."""

POLL_S = 0.01


class Team:
    """The followers of an instance: what is said to them, and what they answer. Any thread may use it.

    Attributes:
        activations: of this process; None where the instance has one stage.
        kv: where each process offers KV, by number; that of the leader is empty. Known once :meth:`meet` returns.
        on_busy: told, on the channel's thread, for how many seconds the stages of a process have run.

    Args:
        world: of the instance; this process is rank 0.
        keys: of the server.
        activations: see there.
        clock: seconds.

    Raises:
        OSError: the address for followers cannot be bound.
    """

    def __init__(
        self,
        world: World,
        keys: Keys,
        activations: Activations | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.activations = activations
        self.kv: Seq[str] = ()
        self.on_busy: Callable[[int, float], None] = lambda rank, busy_s: None
        self._clock = clock
        self._heard = dict.fromkeys(range(1, world.size), clock())
        self._here: dict[int, lockstep.Here] = {}
        self._identities: dict[int, bytes] = {}
        self._ids = itertools.count(1)
        self._results: dict[int, Future[StepOutputs]] = {}
        self._answers: dict[int, dict[int, str]] = {}
        self._lost = ""
        self._changed = threading.Condition()
        host, _, port = world.steps.rpartition(":")
        self._channel = Channel.listen(host, int(port), keys)
        self._thread = threading.Thread(
            target=self._channel.run, args=(self._take, self._tick, TICK_S), name="team", daemon=True
        )
        self._thread.start()

    def meet(self) -> None:
        """Wait until every follower has compiled its programs, and have all processes know each other.

        Raises:
            RuntimeError: a follower is lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._lost) or len(self._here) == len(self._heard))
            self._check_lost()
            followers = [self._here[rank] for rank in sorted(self._here)]
        self.kv = ["", *(one.kv for one in followers)]
        if self.activations is not None:
            addresses = (self.activations.address, *(one.activations for one in followers))
            self.tell(lockstep.Meet(addresses))
            self.activations.meet(addresses)

    def tell(self, message: lockstep.ToFollower) -> None:
        """Tell every follower.

        Raises:
            RuntimeError: a follower is lost.
        """
        payload = lockstep.encode(message)
        with self._changed:
            self._check_lost()
            for identity in self._identities.values():
                self._channel.post((identity, payload))

    def new_id(self) -> int:
        """For something that followers are told of."""
        return next(self._ids)

    def result(self, id: int) -> Future[StepOutputs]:
        """What will come of the step ``id``; to be called before it is told of."""
        future: Future[StepOutputs] = Future()
        with self._changed:
            self._check_lost()
            self._results[id] = future
        return future

    def expect(self, id: int) -> None:
        """Keep answers to ``id`` for :meth:`answers`; to be called before it is told of."""
        with self._changed:
            self._answers[id] = {}

    def answers(self, id: int, timeout_s: float, abandoned: Callable[[], bool] = never) -> str | None:
        """Wait for the answers of all followers; gives what is wrong, empty if nothing is, None if not all answer.

        Args:
            id: of the question.
            timeout_s: longest wait.
            abandoned: asked while waiting; true ends it.

        Raises:
            RuntimeError: a follower is lost.
        """
        deadline = self._clock() + timeout_s
        with self._changed:
            while len(self._answers[id]) < len(self._heard):
                self._check_lost()
                if abandoned() or self._clock() > deadline:
                    return None
                self._changed.wait(POLL_S)
            return "; ".join(error for error in self._answers.pop(id).values() if error)

    def forget(self, id: int) -> None:
        """Keep no answers to ``id`` any more."""
        with self._changed:
            self._answers.pop(id, None)

    def begin(self) -> None:
        """Everything is warm: a follower that compiles something from now on counts it."""
        self.tell(lockstep.Begin())

    def lose(self, reason: object) -> None:
        """The instance can do nothing any more; all that wait are told so."""
        with self._changed:
            self._lost = self._lost or str(reason)
            results, self._results = self._results, {}
            self._changed.notify_all()
        for future in results.values():
            future.set_exception(RuntimeError(self._lost))

    @property
    def sound(self) -> bool:
        """Whether nothing is lost."""
        return not self._lost

    def close(self) -> None:
        """Have all followers end when they have done what they were told."""
        if self.sound:
            self.tell(lockstep.End())
        self.lose("the instance has been closed")
        self._channel.close()
        self._thread.join()

    def _check_lost(self) -> None:
        if self._lost:
            raise RuntimeError(f"a process of the instance is lost: {self._lost}")

    # What follows runs on the thread of the channel.

    def _take(self, frames: Frames) -> None:
        identity, payload = frames
        try:
            message = lockstep.to_leader.decode(payload)
        except msgspec.MsgspecError as error:
            self.lose(f"a message from a process of the instance was refused: {error}")
            return
        match message:
            case lockstep.Beat(rank, busy_s):
                self._hear(rank, identity)
                if rank in self._heard:
                    self.on_busy(rank, busy_s)
            case lockstep.Here(rank):
                self._hear(rank, identity)
                with self._changed:
                    self._here[rank] = message
                    self._changed.notify_all()
            case lockstep.Result(id):
                with self._changed:
                    future = self._results.pop(id, None)
                if future is not None:
                    future.set_result(lockstep.outputs_of(message))
            case lockstep.Answer(id, rank, error):
                with self._changed:
                    if id in self._answers:
                        self._answers[id][rank] = error
                        self._changed.notify_all()
            case lockstep.Failed(reason):
                self.lose(reason)

    def _hear(self, rank: int, identity: bytes) -> None:
        if rank in self._heard:
            with self._changed:
                self._identities.setdefault(rank, identity)
            self._heard[rank] = self._clock()

    def _tick(self) -> None:
        silent = [rank for rank, heard in self._heard.items() if self._clock() - heard > SILENCE_S]
        if silent and self.sound:
            self.lose(f"process {silent[0]} of the instance has been silent for {SILENCE_S:.0f} s")


def make_activations(worker: Worker, layout: KVLayout) -> Activations | None:
    """The end of ``worker``; None where the instance has one stage."""
    return Activations(address_of(worker.host), layout) if layout.pp > 1 else None
