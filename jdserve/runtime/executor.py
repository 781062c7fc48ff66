"""The device seam: everything that the runtime asks of an instance's meshes, and the executor that does it with jax.

An executor belongs to the launcher thread of its instance: no other thread calls it, so nothing in it is locked. It
hands the work to the stages of the instance, always to all of them in the same order, and a step is a chain of
programs, each of which waits for the one on the stage before. The stages may have threads or processes of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import jax
import numpy as np

from jdserve.compat import Device
from jdserve.core.pages import pages_for
from jdserve.core.plan import ColocatedInstance, Instance, Plan
from jdserve.core.request import Request, SamplingParams
from jdserve.core.spec import ModelSpec
from jdserve.policy.commands import RunStep
from jdserve.runtime.buckets import Launch, buckets_for, fitting, split
from jdserve.runtime.guides import Guided
from jdserve.runtime.links import layout_of
from jdserve.runtime.part import LeavingKV, Part, Scores, Stages
from jdserve.runtime.results import AdmittedSeq, LaunchedStep, Outcome, PendingStep
from jdserve.runtime.spanning import SpanningStages
from jdserve.runtime.stage import Load
from jdserve.runtime.state import admission
from jdserve.runtime.steps import StepInputs, StepOutputs
from jdserve.runtime.team import Team
from jdserve.sharding.rules import ShardingRules
from jdserve.transfer.base import Landed
from jdserve.transfer.layout import KVLayout


class Executor(Protocol):
    """What runs the steps of one instance."""

    @property
    def layout(self) -> KVLayout:
        """How this instance stores KV."""
        ...

    def warm_up(self, progress: Callable[[float], None]) -> None:
        """Compile and run every program once; afterwards nothing is compiled any more."""
        ...

    def admit(self, request: Request, pages: tuple[int, ...], guided: Guided | None = None) -> None:
        """Keep the state of ``request`` on the device: before its first chunk, or with its KV in ``pages``.

        ``guided`` is its guide, if it has one, fed with what was generated so far.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop that state; unknown ids are ignored."""
        ...

    def launch(self, step: RunStep) -> PendingStep:
        """Start a step over admitted requests."""
        ...

    @property
    def transfer_sizes(self) -> Seq[int]:
        """Pages in a gather or an insert, ascending: every other number is padded to one of these."""
        ...

    def leaving(self, pages: tuple[int, ...]) -> LeavingKV:
        """``pages`` of the pool, to be copied out behind what was launched before."""
        ...

    def pull(self, pull: Callable[..., Landed]) -> Landed:
        """Call ``pull(layout, meshes)`` of a transport; the one method that any thread may call."""
        ...

    def insert(self, landed: Landed, source: KVLayout, pages: tuple[int, ...]) -> Callable[[], None]:
        """Put landed KV into ``pages`` of the pool; gives what waits, on any thread, until ``landed`` was read."""
        ...

    @property
    def intact(self) -> bool:
        """Whether the pool is still there: a step that broke on the device takes the donated pool with it."""
        ...

    @property
    def bubble_s(self) -> float:
        """Seconds in which a pipeline stage had nothing to run while another one ran, summed over the stages of this
        process."""
        ...

    def close(self) -> None:
        """End the threads; what was launched and has not begun is dropped."""
        ...


class JaxExecutor:
    """Executor over one mesh of tensor-parallel devices per pipeline stage.

    Args:
        plan: that the instance is part of.
        instance: which one.
        spec: of the model.
        devices: of each stage's mesh, in order.
        load: gives the weights of a stage.
        rules: how logical axes lie on a mesh.
        team: the other processes of the instance, where it spans several.

    Raises:
        ValueError: KV that moves between instances is cut by its heads, and the rules do not split them.
    """

    def __init__(
        self,
        plan: Plan,
        instance: Instance,
        spec: ModelSpec,
        devices: Seq[Seq[Device]],
        load: Load,
        rules: ShardingRules | None = None,
        team: Team | None = None,
    ) -> None:
        rules = rules or ShardingRules()
        if rules.kv_heads is None and instance.tp > 1 and not isinstance(instance, ColocatedInstance):
            raise ValueError(
                f"rules.kv_heads must not be None: {instance.name} exchanges KV, which is cut by its heads"
            )
        self._spec = spec
        self._longest = plan.max_model_len
        self._width = pages_for(plan.max_model_len, plan.page_size)
        self._buckets = buckets_for(plan, instance)
        self.layout = layout_of(plan, instance, spec)
        self._depth = instance.pp
        part = Part(
            plan,
            instance,
            spec,
            self.layout,
            self._buckets,
            devices,
            load,
            rules,
            None if team is None else team.activations,
            None if team is None else team.lose,
        )
        self._meshes, self._programs = part.meshes, part.programs
        self._stages: Stages = part if team is None else SpanningStages(part, team)
        self._warm_up_bubble_s = 0.0
        self._seqs: dict[str, AdmittedSeq] = {}
        self._slots = list(range(self._buckets.slots - 1, -1, -1))

    def warm_up(self, progress: Callable[[float], None]) -> None:
        """Compile every bucket ahead of time and run it once on padding."""
        done = itertools.count(1)
        self._stages.compile(lambda: progress(next(done) / (self._programs + 1)))
        for shape in self._buckets.steps:
            jax.block_until_ready(self._chain(Launch(shape)).result())
        # The dummy slot stays greedy: otherwise every padded batch would draw noise for all of its rows.
        self._admit_row(Request("", (0,), SamplingParams(temperature=0.0)), (), self._buckets.slots)
        if not self.intact:
            raise RuntimeError("a program broke while warming up")
        self._warm_up_bubble_s = self._stages.bubble_s
        progress(1.0)

    @property
    def intact(self) -> bool:
        """Whether no stage has lost its pool, and all of them take work."""
        return self._stages.intact

    @property
    def bubble_s(self) -> float:
        """Seconds of idle stages; 0 with a single one."""
        return self._stages.bubble_s - self._warm_up_bubble_s

    def close(self) -> None:
        """End the stage threads."""
        self._stages.close()

    def admit(self, request: Request, pages: tuple[int, ...], guided: Guided | None = None) -> None:
        """Write the request's row on the devices."""
        slot = self._slots.pop()
        self._seqs[request.id] = AdmittedSeq(request, slot, len(pages), guided=guided)
        self._admit_row(request, pages, slot)

    def _admit_row(self, request: Request, pages: tuple[int, ...], slot: int) -> None:
        row = admission(
            request,
            pages,
            slot,
            width=self._width,
            longest=self._longest,
            vocab=self._spec.vocab,
            eos=self._spec.eos,
        )
        self._stages.admit(row)

    def forget(self, request_id: str) -> None:
        """Free the request's slot."""
        seq = self._seqs.pop(request_id, None)
        if seq is not None:
            self._slots.append(seq.slot)

    def launch(self, step: RunStep) -> PendingStep:
        """Launch every part of the step; parts follow each other on the device without the host."""
        launches = split(self._buckets, step.chunks, step.decodes)
        return LaunchedStep([(launch, self._chain(launch)) for launch in launches], self._seqs)

    def _chain(self, launch: Launch) -> Outcome[StepOutputs]:
        """One launch through all stages; the outcome is that of the last."""
        return self._stages.run(launch.shape, self._inputs(launch), lambda: self._scores(launch))

    def _scores(self, launch: Launch) -> Scores:
        chunks = [self._seqs[chunk.request_id].request.params for chunk in launch.chunks]
        decodes = [self._seqs[decode.request_id].request.params for decode in launch.decodes]
        return Scores(
            any(params.logprobs is not None for params in (*chunks, *decodes)),
            any(params.prompt_logprobs is not None for params in chunks),
        )

    def _inputs(self, launch: Launch) -> StepInputs:
        """Host inputs, in fresh arrays: jax may still read those of an earlier launch."""
        shape, dummy = launch.shape, self._buckets.slots
        chunk_tokens = np.zeros((4, shape.tokens), np.int32)
        chunk_tokens[2] = shape.segments
        chunk_tokens[3] = -1
        chunks = np.zeros((4, shape.segments), np.int32)
        chunks[0] = dummy
        at = 0
        for index, chunk in enumerate(launch.chunks):
            seq = self._seqs[chunk.request_id]
            stop = chunk.start + chunk.count
            place = slice(at, at + chunk.count)
            at += chunk.count
            chunk_tokens[0, place] = seq.request.prompt[chunk.start : stop]
            chunk_tokens[1, place] = np.arange(chunk.start, stop)
            chunk_tokens[2, place] = index
            if seq.request.params.prompt_logprobs is not None:
                following = seq.request.prompt[chunk.start + 1 : stop + 1]
                chunk_tokens[3, place.start : place.start + len(following)] = following
            chunks[:, index] = seq.slot, chunk.start, at - 1, chunk.last
        decodes = np.zeros((4, shape.seqs), np.int32)
        decodes[0] = dummy
        decodes[1] = self._width
        decodes[3] = -1
        for index, decode in enumerate(launch.decodes):
            seq = self._seqs[decode.request_id]
            decodes[0, index] = seq.slot
            if len(decode.pages) > seq.pages:
                decodes[1, index], decodes[2, index] = seq.pages, decode.pages[seq.pages]
                seq.pages += 1
            if self._depth > 1:
                decodes[3, index] = seq.token  # the first stage does not see what the last one sampled
        return StepInputs(chunk_tokens, chunks, decodes, self._allowed(launch))

    def _allowed(self, launch: Launch) -> np.ndarray | None:
        """Tokens that the guided rows may choose; None where no row of the launch is guided."""
        rows = [(index, chunk.request_id) for index, chunk in enumerate(launch.chunks)]
        rows += [(launch.shape.segments + index, decode.request_id) for index, decode in enumerate(launch.decodes)]
        guided = [(row, guide) for row, name in rows if (guide := self._seqs[name].guided) is not None]
        if not guided:
            return None
        allowed = np.zeros((launch.shape.segments + launch.shape.seqs, -(-self._spec.vocab // 32)), np.uint32)
        for row, guide in guided:
            allowed[row] = guide.allowed
        return allowed

    @property
    def transfer_sizes(self) -> Seq[int]:
        """Buckets of the instance."""
        return self._buckets.transfers

    def leaving(self, pages: tuple[int, ...]) -> LeavingKV:
        """Pages of the pool, padded to a bucket with the null page."""
        padded = _padded(pages, fitting(self._buckets.transfers, len(pages)))
        return LeavingKV(self._stages, self.layout, padded)

    def pull(self, pull: Callable[..., Landed]) -> Landed:
        """Let a transport land KV on the meshes of all stages."""
        return pull(self.layout, self._meshes)

    def insert(self, landed: Landed, source: KVLayout, pages: tuple[int, ...]) -> Callable[[], None]:
        """Write landed KV into the pool in place; padding goes to the null page."""
        inserts = self._stages.insert(landed, source, _padded(pages, landed.pages))
        return lambda: jax.block_until_ready([insert.result() for insert in inserts])


def _padded(pages: tuple[int, ...], size: int) -> np.ndarray:
    padded = np.zeros(size, np.int32)
    padded[: len(pages)] = pages
    return padded
