"""A process of an instance that does not lead it: it does to its part of the stages what the leader tells it.

The thread that runs it takes the messages in order; pulls run on threads of their own, because they wait. Whatever goes
wrong ends the process, after the leader was told: a follower that has missed a step is of no use.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import msgspec

from jdserve.compat import CompilationCounter
from jdserve.core.plan import ColocatedInstance, Plan, Worker
from jdserve.models.checkpoint import LoadedModel
from jdserve.runtime import lockstep
from jdserve.runtime.buckets import buckets_for
from jdserve.runtime.channel import Channel, Frames, Keys
from jdserve.runtime.drivers import Bubbles
from jdserve.runtime.hosts import address_of
from jdserve.runtime.instance import PULLS_AT_A_TIME
from jdserve.runtime.launch import keep_programs, loader, plan_devices
from jdserve.runtime.links import layout_of
from jdserve.runtime.part import Gathered, Part, Scores, nothing_landed
from jdserve.runtime.progress import Progress
from jdserve.runtime.steps import StepInputs, StepOutputs
from jdserve.runtime.team import make_activations
from jdserve.runtime.wire import World
from jdserve.sharding.rules import ShardingRules
from jdserve.transfer.base import Landed
from jdserve.transfer.pull import PullTransport

TICK_S = 0.1
BEAT_S = 0.5


class Follower:
    """See the module.

    Attributes:
        begun: the instance takes work.

    Args:
        plan: in force.
        worker: this process, which hosts a part of one instance.
        world: of the instance.
        keys: of the server.
        model: of the plan.
        progress: of the start.

    Raises:
        InvalidPlan: the plan does not fit the machine.
        CheckpointError: the weights cannot be restored.
    """

    def __init__(
        self, plan: Plan, worker: Worker, world: World, keys: Keys, model: LoadedModel, progress: Progress
    ) -> None:
        self.begun = False
        self._rank = world.rank
        self._progress = progress
        instance = plan.instance(worker.instances[0])
        layout = layout_of(plan, instance, model.spec)
        self._activations = make_activations(worker, layout)
        self._channel = Channel.connect(world.steps, keys)
        self._told: queue.SimpleQueue[lockstep.ToFollower | BaseException] = queue.SimpleQueue()
        self._beaten = 0.0
        self._bubbles = Bubbles(instance.pp)
        self._thread = threading.Thread(
            target=self._channel.run, args=(self._take, self._tick, TICK_S), name="leader", daemon=True
        )
        self._thread.start()
        keep_programs()
        self._part = Part(
            plan,
            instance,
            model.spec,
            layout,
            buckets_for(plan, instance),
            plan_devices(plan, worker)[instance.name],
            loader(plan, model, progress),
            ShardingRules(),
            self._activations,
            self._told.put,
            self._bubbles,
        )
        self._kv = None
        if not isinstance(instance, ColocatedInstance):
            self._kv = PullTransport(address_of(worker.host), jax.local_devices()[0])
        self._copies: dict[int, Gathered] = {}
        self._offered = 0
        self._pulls = ThreadPoolExecutor(PULLS_AT_A_TIME, thread_name_prefix="pull")
        self._pulling: dict[int, tuple[threading.Event, Future[Landed]]] = {}
        self._compilations: CompilationCounter | None = None
        self._ended = threading.Event()

    def _compile(self) -> None:
        done = itertools.count(1)
        self._part.compile(lambda: self._progress("compile", next(done) / self._part.programs))
        activations = "" if self._activations is None else self._activations.address
        self._post(lockstep.Here(self._rank, activations, "" if self._kv is None else self._kv.address))

    def run(self, begun: Callable[[], None]) -> None:
        """Compile the programs here, then do what the leader says until it says that it is over.

        Args:
            begun: called when the instance begins to take work.

        Raises:
            Exception: whatever broke the part; the leader knows it already.
        """
        try:
            self._compile()
            while not isinstance(message := self._told.get(), lockstep.End):
                if isinstance(message, BaseException):
                    raise message
                if isinstance(message, lockstep.Begin):
                    self._part.drain()
                    self._compilations, self.begun = CompilationCounter(), True
                    begun()
                self._do(message)
            self._part.drain()
        except BaseException as error:
            self._post(lockstep.Failed(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._channel.close()
            self._thread.join()
            self._ended.set()
        self._part.close()
        if self._kv is not None:
            self._kv.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until :meth:`run` has come to its end."""
        self._ended.wait(timeout_s)

    def recompilations(self) -> int:
        """Programs compiled here since the instance took work."""
        return 0 if self._compilations is None else self._compilations.count

    def _post(self, message: lockstep.ToLeader) -> None:
        self._channel.post((lockstep.encode(message),))

    def _take(self, frames: Frames) -> None:
        try:
            self._told.put(lockstep.to_follower.decode(frames[0]))
        except msgspec.MsgspecError as error:
            self._told.put(error)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._beaten > BEAT_S:
            self._beaten = now
            self._post(lockstep.Beat(self._rank, self._bubbles.busy))

    def _do(self, message: lockstep.ToFollower) -> None:
        if not (isinstance(message, lockstep.Offer) and message.id == self._offered):
            self._copies.pop(self._offered, None)
        match message:
            case lockstep.Meet(addresses):
                assert self._activations is not None, "one stage passes nothing on"
                self._activations.meet(addresses)
            case lockstep.Admit():
                self._part.admit(lockstep.admission_of(message))
            case lockstep.Run():
                self._run(message)
            case lockstep.Insert():
                self._insert(message)
            case lockstep.Check(id):
                self._post(lockstep.Answer(id, self._rank, "" if self._part.intact else "a part is lost"))
            case lockstep.Begin() | lockstep.End():
                pass
            case _:
                self._move(message)

    def _run(self, message: lockstep.Run) -> None:
        allowed = None if message.allowed is None else lockstep.unpack(message.allowed)
        chunk_tokens, chunks, decodes = map(lockstep.unpack, message.inputs)
        outcome = self._part.run(message.shape, StepInputs(chunk_tokens, chunks, decodes, allowed))
        if self._part.samples and isinstance(outcome, Future):  # else the leader sees the result itself
            outcome.add_done_callback(lambda done: self._send(message.id, done, message.scores))

    def _send(self, id: int, done: Future[StepOutputs], scores: Scores) -> None:
        if not done.cancelled() and done.exception() is None:
            self._post(lockstep.result_of(id, done.result(), scores))

    def _insert(self, message: lockstep.Insert) -> None:
        pages = lockstep.unpack(message.pages)
        if message.id:
            landed = self._pulling.pop(message.id)[1].result()
        else:
            landed = nothing_landed(message.source, self._part.layout, self._part.meshes, len(pages))
        self._part.insert(landed, message.source, pages)

    def _move(self, message: lockstep.ToFollower) -> None:
        """What moves KV."""
        match message:
            case lockstep.Gather(id, pages):
                self._copies[id] = self._part.gather(lockstep.unpack(pages))
            case lockstep.Drop(id):
                del self._copies[id]
            case lockstep.Offer(id, handle, lease_s):
                assert self._kv is not None
                self._offered = id
                until = time.monotonic_ns() + int(lease_s * 1e9)
                copy = self._copies[id].copy(handle.layout, handle.pages)
                self._kv.keep(msgspec.structs.replace(handle, deadline=until), copy, self._rank)
            case lockstep.Release(handle):
                assert self._kv is not None
                self._kv.release(handle)
            case lockstep.Pull():
                self._pull(message)
            case lockstep.Abandon(id):
                self._pulling.pop(id)[0].set()
            case _:
                raise AssertionError(f"handled elsewhere: {type(message).__name__}")

    def _pull(self, message: lockstep.Pull) -> None:
        kv, abandoned = self._kv, threading.Event()
        assert kv is not None
        future = self._pulls.submit(
            kv.pull, message.handle, self._part.layout, self._part.meshes, message.timeout_s, abandoned.is_set
        )
        self._pulling[message.id] = (abandoned, future)
        future.add_done_callback(lambda done: self._answer(message.id, done))

    def _answer(self, id: int, done: Future[Landed]) -> None:
        error = done.exception()
        self._post(lockstep.Answer(id, self._rank, "" if error is None else str(error) or type(error).__name__))
