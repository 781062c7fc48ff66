"""An instance whose stages or meshes span processes, seen from the process that leads it.

The leader runs the state machine and the executor as if it were alone; only its stages tell every other process (a
*follower*, see :mod:`jdserve.runtime.follower`) what to do before they do their own part of it. So all processes launch
the same programs in the same order: a stage that spans processes runs in lockstep, and a stage elsewhere runs when its
turn comes. Nothing waits for an acknowledgement; results travel back where the last stage is elsewhere.

A follower that fails or falls silent makes every wait on it raise, and the instance dies with it; the front door
restarts all its workers together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
from jax import Array
from jax.sharding import Mesh

from jdserve.core.errors import TransferError
from jdserve.runtime import lockstep
from jdserve.runtime.buckets import StepShape
from jdserve.runtime.drivers import SpanningBubbles
from jdserve.runtime.part import Gathered, Part, Scores
from jdserve.runtime.results import Outcome
from jdserve.runtime.state import Admission
from jdserve.runtime.steps import StepInputs, StepOutputs
from jdserve.runtime.team import Team
from jdserve.transfer.base import KVPages, Landed, Take, never
from jdserve.transfer.layout import KVHandle, KVLayout, TransportKind
from jdserve.transfer.offers import make_handle
from jdserve.transfer.pull import PullTransport, make_parts

CHECK_S = 30.0
"""Longest wait for a follower to say whether its part is intact: a step may be in flight."""


class SpanningStages:
    """All stages of an instance that spans processes; see the module, and :class:`~jdserve.runtime.part.Stages`.

    Args:
        part: of this process.
        team: the others.
    """

    def __init__(self, part: Part, team: Team) -> None:
        self._part = part
        self._team = team
        layout = part.layout
        places = {(layout.process(stage, rank), stage) for stage in range(layout.pp) for rank in range(layout.tp)}
        self._bubbles = SpanningBubbles(layout.pp, Counter(process for process, _ in places))
        team.on_busy = self._bubbles.hear

    def compile(self, compiled: Callable[[], None]) -> None:
        """Compile the programs here, and wait until the others have compiled theirs."""
        self._part.compile(compiled)
        self._team.meet()

    def admit(self, row: Admission) -> None:
        """Write one sequence into its slot on all stages."""
        self._team.tell(lockstep.Admit(lockstep.pack_all(row)))
        self._part.admit(row)

    def run(self, shape: StepShape, inputs: StepInputs, scores: Callable[[], Scores]) -> Outcome[StepOutputs]:
        """One launch through all stages."""
        id = self._team.new_id()
        result = None if self._part.samples else self._team.result(id)
        packed = (lockstep.pack(inputs.chunk_tokens), lockstep.pack(inputs.chunks), lockstep.pack(inputs.decodes))
        allowed = None if inputs.allowed is None else lockstep.pack(inputs.allowed)
        self._team.tell(lockstep.Run(id, shape, packed, allowed, scores()))
        self._bubbles.launches.change(1)
        here = self._part.run(shape, inputs)
        outcome = here if result is None else result
        if isinstance(outcome, Future):
            outcome.add_done_callback(lambda _: self._bubbles.launches.change(-1))
        return outcome

    def gather(self, pages: np.ndarray) -> Gathered:
        """Copy pages out of all pools."""
        id = self._team.new_id()
        self._team.tell(lockstep.Gather(id, lockstep.pack(pages)))
        return Gathered(self._part.gather(pages).stages, id)

    def drop(self, gathered: Gathered) -> None:
        """Have the others forget their parts of the copy."""
        self._team.tell(lockstep.Drop(gathered.id))

    def read(self, pages: np.ndarray, take: Take, failed: Callable[[], None]) -> None:
        """Not across processes: what takes pages this way moves them inside one host."""
        raise AssertionError("pages of an instance that spans processes are copied, not read")

    def insert(self, landed: Landed, source: KVLayout, pages: np.ndarray) -> Seq[Outcome[Array]]:
        """Write landed pages into all pools."""
        self._team.tell(lockstep.Insert(landed.id, source, lockstep.pack(pages)))
        return self._part.insert(landed, source, pages)

    @property
    def intact(self) -> bool:
        """Whether all parts are."""
        id = self._team.new_id()
        try:
            self._team.expect(id)
            self._team.tell(lockstep.Check(id))
            return self._part.intact and self._team.answers(id, CHECK_S) == ""
        except RuntimeError:
            return False

    @property
    def bubble_s(self) -> float:
        """Idle time of all stages."""
        if self._part.layout.pp == 1:
            return 0.0
        self._bubbles.hear(0, self._part.bubbles.busy)
        return self._bubbles.seconds

    def close(self) -> None:
        """Finish what the others were told too, and end."""
        if self._team.sound:
            self._part.drain()
        self._team.close()
        self._part.close()


class TeamTransport:
    """Moves KV of an instance that spans processes: each of them offers and pulls its own pieces.

    See :class:`~jdserve.transfer.base.Transport`.

    Args:
        pull: of this process.
        team: the others.
        clock: nanoseconds, that of the instance.
    """

    kind: TransportKind = "pull"
    reads = False

    def __init__(self, pull: PullTransport, team: Team, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._pull = pull
        self._team = team
        self._clock = clock

    def offer(self, request_id: str, source: str, pages: KVPages, destination: KVLayout, lease_s: float) -> KVHandle:
        """Have every process offer its pieces; a pull that comes before its offer waits for it.

        Raises:
            TransferError: the layouts do not fit.
            RuntimeError: a process of the instance is lost.
        """
        copy = pages.copy()
        handle = make_handle(
            self.kind,
            request_id,
            source,
            copy.layout,
            destination,
            copy.pages,
            self._clock() + int(lease_s * 1e9),
            parts=make_parts(copy.layout, destination, [self._pull.address, *self._team.kv[1:]]),
        )
        self._team.tell(lockstep.Offer(copy.id, handle, lease_s))
        self._pull.keep(handle, copy, process=0)
        return handle

    def pull(
        self,
        handle: KVHandle,
        layout: KVLayout,
        meshes: Seq[Mesh],
        timeout_s: float,
        abandoned: Callable[[], bool] = never,
    ) -> Landed:
        """Have every process pull its pieces and wait until all have.

        Raises:
            TransferError: see :meth:`~jdserve.transfer.pull.PullTransport.pull`; one of the processes had no success.
            RuntimeError: a process of the instance is lost.
        """
        id = self._team.new_id()
        deadline = time.monotonic() + timeout_s
        self._team.expect(id)
        try:
            self._team.tell(lockstep.Pull(id, handle, timeout_s))
            landed = self._pull.pull(handle, layout, meshes, timeout_s, abandoned)
            error = self._team.answers(id, max(0.0, deadline - time.monotonic()), abandoned)
            if error is None:
                error = f"request {handle.request_id}: KV did not arrive in all processes within {timeout_s} s"
            if error:
                raise TransferError(error)
        except TransferError:
            self._team.forget(id)
            self._team.tell(lockstep.Abandon(id))
            raise
        return replace(landed, id=id)

    def release(self, handle: KVHandle) -> None:
        """Have every process drop its pieces."""
        self._team.tell(lockstep.Release(handle))
        self._pull.release(handle)

    def expire(self) -> None:
        """Free what offers of this process hold whose lease has ended; the others do so themselves."""
        self._pull.expire()

    def close(self) -> None:
        """Free everything here; the others end with the instance."""
        self._pull.close()

    @property
    def offers(self) -> int:
        """Copies that wait for their pull or their release."""
        return self._pull.offers
