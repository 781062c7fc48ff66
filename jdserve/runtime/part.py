"""The pipeline stages of an instance that live in this process, wholly or in part, and who drives them.

Without workers that share an instance a part is all of it. Where an instance spans processes every one of them has a
part, and all parts are told the same work in the same order: see :mod:`jdserve.runtime.spanning`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jdserve.compat import Device
from jdserve.core.plan import Instance, Plan, PrefillInstance
from jdserve.core.spec import ModelSpec
from jdserve.runtime.activations import Activations
from jdserve.runtime.buckets import Buckets, StepShape
from jdserve.runtime.drivers import Bubbles, Driver, Inline, StageThread
from jdserve.runtime.results import Outcome
from jdserve.runtime.stage import Load, Stage
from jdserve.runtime.state import Admission
from jdserve.runtime.steps import StepInputs, StepOutputs
from jdserve.sharding.rules import ShardingRules, instance_mesh
from jdserve.transfer.base import KVCopy, Landed, Take
from jdserve.transfer.layout import KVLayout
from jdserve.transfer.pieces import assemble, flat_devices, flat_shapes, pieces_here
from jdserve.transfer.reshard import plan_pieces

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """Which log-probabilities of a launch somebody asked for: those of sampled tokens, those of prompt tokens."""

    sampled: bool = False
    prompt: bool = False


@dataclass(frozen=True)
class Gathered:
    """Pages that are being copied out of the pool.

    Attributes:
        stages: keys and values of each stage, None for one in other processes.
        id: see :class:`~jdserve.transfer.base.KVCopy`.
    """

    stages: Seq[Outcome[tuple[Array, Array]] | None]
    id: int = 0

    def copy(self, layout: KVLayout, pages: int) -> KVCopy:
        """What can be offered, once the programs are launched; ``pages`` counts padding."""
        return KVCopy(layout, [() if stage is None else stage.result() for stage in self.stages], pages, self.id)


class Stages(Protocol):
    """All stages of an instance, as its executor sees them. Work is done in the order in which it is asked for."""

    def compile(self, compiled: Callable[[], None]) -> None:
        """Compile every program; says so after each of those that are compiled here."""
        ...

    def admit(self, row: Admission) -> None:
        """Write one sequence into its slot."""
        ...

    def run(self, shape: StepShape, inputs: StepInputs, scores: Callable[[], Scores]) -> Outcome[StepOutputs]:
        """One launch through all stages. Log-probabilities that ``scores()`` does not ask for may be missing."""
        ...

    def gather(self, pages: np.ndarray) -> Gathered:
        """Copy pages out of the pool."""
        ...

    def drop(self, gathered: Gathered) -> None:
        """Nobody wants the copy."""
        ...

    def read(self, pages: np.ndarray, take: Take, failed: Callable[[], None]) -> None:
        """Have every stage read pages of its pool; see :meth:`~jdserve.transfer.base.KVPages.read`."""
        ...

    def insert(self, landed: Landed, source: KVLayout, pages: np.ndarray) -> Seq[Outcome[Array]]:
        """Write landed pages into the pool; what this gives is ready when ``landed`` has been read."""
        ...

    @property
    def intact(self) -> bool:
        """Whether no stage has lost its pool, and all of them take work."""
        ...

    @property
    def bubble_s(self) -> float:
        """Idle time of the stages, warming up included."""
        ...

    def close(self) -> None:
        """End the threads."""
        ...


class LeavingKV:
    """KV of one prompt that leaves the pool; see :class:`~jdserve.transfer.base.KVPages`.

    Args:
        stages: of the instance.
        layout: of the instance.
        padded: page ids, a bucket full.
    """

    def __init__(self, stages: Stages, layout: KVLayout, padded: np.ndarray) -> None:
        self.layout = layout
        self.pages = len(padded)
        self._stages = stages
        self._padded = padded
        self._gathered: Gathered | None = None
        self._copied = False

    def gather(self) -> None:
        """Launch what :meth:`copy` gives: later it would wait for the steps launched meanwhile."""
        if self._gathered is None:
            self._gathered = self._stages.gather(self._padded)

    def copy(self) -> KVCopy:
        """A copy on the devices, always the same one."""
        self.gather()
        assert self._gathered is not None
        self._copied = True
        return self._gathered.copy(self.layout, self.pages)

    def read(self, take: Take, failed: Callable[[], None]) -> None:
        """Have every stage read the pages."""
        self._stages.read(self._padded, take, failed)

    def drop(self) -> None:
        """Forget a copy that nobody asked for."""
        if self._gathered is not None and not self._copied:
            self._stages.drop(self._gathered)


@dataclass(frozen=True)
class _Arrival:
    """The outcome of a stage elsewhere, waited for by whoever asks."""

    result: Callable[[], Array]


class Part:
    """See the module, and :class:`Stages`.

    Attributes:
        meshes: of all stages.
        stages, drivers: those that are here, by index.
        bubbles: idle time of the stages here.
        programs: how many programs :meth:`compile` makes.

    Args:
        plan: that the instance is part of.
        instance: which one.
        spec: of the model.
        layout: of the instance's KV.
        buckets: of the instance.
        devices: of each stage's mesh, in order.
        load: gives the weights of a stage.
        rules: how logical axes lie on a mesh.
        activations: to and from other processes, where there are any.
        failed: told what broke a stage's program, where there are other processes that may wait for it.
        bubbles: measure the stages here; made if not given.
    """

    def __init__(
        self,
        plan: Plan,
        instance: Instance,
        spec: ModelSpec,
        layout: KVLayout,
        buckets: Buckets,
        devices: Seq[Seq[Device]],
        load: Load,
        rules: ShardingRules,
        activations: Activations | None = None,
        failed: Callable[[BaseException], None] | None = None,
        bubbles: Bubbles | None = None,
    ) -> None:
        me = jax.process_index()
        self.meshes = [instance_mesh(list(stage)) for stage in devices]
        self.layout = layout
        self._rules = rules
        self._hidden = (spec.hidden, jnp.dtype(plan.dtype))
        self._activations = activations
        self._failed = failed
        self.stages = {
            index: Stage(plan, instance, spec, layout, buckets, index, self.meshes, load, rules)
            for index, mesh in enumerate(self.meshes)
            if any(device.process_index == me for device in mesh.devices.flat)
        }
        self.programs = len(buckets.steps) * len(self.stages)
        self.bubbles = bubbles or Bubbles(len(self.stages))
        self.drivers: dict[int, Driver] = dict.fromkeys(self.stages, Inline())
        # Copying KV out of the pool must not keep the launcher thread from sending the first token.
        if instance.pp > 1 or isinstance(instance, PrefillInstance):
            self.drivers = {index: StageThread(f"{instance.name}-stage{index}", self.bubbles) for index in self.stages}
        self._last = len(self.meshes) - 1
        self._launches = itertools.count()

    @property
    def samples(self) -> bool:
        """Whether the last stage is here, so that :meth:`run` gives what it sampled."""
        return self._last in self.stages

    def compile(self, compiled: Callable[[], None]) -> None:
        """Compile the programs of all stages here side by side."""
        for compiling in [driver.submit(stage.compile, compiled) for _, stage, driver in self._each()]:
            compiling.result()

    def admit(self, row: Admission) -> None:
        """Write one sequence into its slot on every stage here."""
        for _, stage, driver in self._each():
            driver.post(stage.admit, row)

    def run(self, shape: StepShape, inputs: StepInputs, scores: Callable[[], Scores] | None = None) -> Outcome[Any]:
        """One launch through the stages here; gives what the last of them does."""
        launch = next(self._launches)
        outcome: Outcome[Any] | None = None
        for index, stage, driver in self._each():
            if self._activations is None:
                outcome = driver.run(stage.run, shape, inputs, after=outcome)
                continue
            before = outcome if index - 1 in self.stages else None
            arrival = _Arrival(functools.partial(self._arrive, launch, index, shape, before)) if index else None
            outcome = driver.run(self._cross, launch, index, shape, inputs, after=arrival)
            if isinstance(outcome, Future):
                outcome.add_done_callback(self._check)
        assert outcome is not None
        return outcome

    def _arrive(self, launch: int, index: int, shape: StepShape, before: Outcome[Array] | None) -> Array:
        """Wait for what the stage before gave, which may be in another process."""
        assert self._activations is not None
        width, dtype = self._hidden
        wanted = jax.ShapeDtypeStruct(
            (shape.tokens + shape.seqs, width), dtype, sharding=self._rules.replicated(self.meshes[index])
        )
        given = self._activations.take(launch, index, None if before is None else before.result(), wanted)
        return jax.block_until_ready(given)

    def _cross(self, launch: int, index: int, shape: StepShape, inputs: StepInputs, given: Array | None = None) -> Any:
        """Run a stage whose neighbours may be in other processes."""
        assert self._activations is not None
        out = self.stages[index].run(shape, inputs, given)
        if index < self._last:
            self._activations.give(launch, index, out)
        return out

    def _check(self, outcome: Future[Any]) -> None:
        if self._failed is not None and not outcome.cancelled() and (error := outcome.exception()) is not None:
            self._failed(error)

    def gather(self, pages: np.ndarray) -> Gathered:
        """Copy pages out of the pools here."""
        copies = {index: driver.submit(stage.gather, pages) for index, stage, driver in self._each()}
        return Gathered([copies.get(index) for index in range(len(self.meshes))])

    def drop(self, gathered: Gathered) -> None:
        """Nothing holds it."""

    def read(self, pages: np.ndarray, take: Take, failed: Callable[[], None]) -> None:
        """Have every stage read pages of its pool, behind what was launched before."""
        wanted = pages.tolist()

        def read(index: int, stage: Stage) -> None:
            stage.read(lambda shards: take(index, shards, wanted))

        def check(done: Future[None]) -> None:
            if done.cancelled():
                failed()
            elif (error := done.exception()) is not None:
                logger.error("KV could not be read out of the pool", exc_info=error)
                failed()

        for index, stage, driver in self._each():
            try:
                reading = driver.submit(read, index, stage)
            except RuntimeError:
                failed()  # the stage is lost
                continue
            assert isinstance(reading, Future), "a stage that gives KV has a thread"
            reading.add_done_callback(check)

    def insert(self, landed: Landed, source: KVLayout, pages: np.ndarray) -> Seq[Outcome[Array]]:
        """Write landed pages into the pools here."""
        pools = [self.stages[i].pool_sharding if i in self.stages else None for i in range(len(self.meshes))]
        parts = assemble(landed, source, self.layout, pools)
        return [
            driver.post(stage.insert, keys, values, pages)
            for (_, stage, driver), (keys, values) in zip(self._each(), parts, strict=True)
        ]

    @property
    def intact(self) -> bool:
        """Whether no stage here has lost its pool, and all of them take work."""
        try:
            checks = [driver.submit(stage.intact) for _, stage, driver in self._each()]
            return all(check.result() for check in checks) and all(driver.sound for driver in self.drivers.values())
        except RuntimeError:
            return False

    @property
    def bubble_s(self) -> float:
        """Idle time of the stages here."""
        return self.bubbles.seconds

    def drain(self) -> None:
        """Wait for what was asked for: a neighbour may need it."""
        with contextlib.suppress(RuntimeError):
            for waiting in [driver.submit(bool) for driver in self.drivers.values()]:
                waiting.result()

    def close(self) -> None:
        """End the stage threads."""
        for driver in self.drivers.values():
            driver.close()

    def _each(self) -> list[tuple[int, Stage, Driver]]:
        return [(index, stage, self.drivers[index]) for index, stage in self.stages.items()]


def nothing_landed(source: KVLayout, layout: KVLayout, meshes: Seq[Mesh], pages: int) -> Landed:
    """What a pull of empty KV would give this process."""
    pieces = list(pieces_here(plan_pieces(source, layout), meshes).values())
    empty = [np.zeros(shape, jnp.dtype(layout.dtype)) for shape in flat_shapes(pieces, layout, pages)]
    arrays = [jax.device_put(part, device) for part, device in zip(empty, flat_devices(pieces, meshes), strict=True)]
    return Landed(list(zip(arrays[::2], arrays[1::2], strict=True)), pages, 0)
