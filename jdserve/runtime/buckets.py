"""The sole list of legal step shapes. Warm-up compiles exactly these; nothing else is ever launched.

A program has a fixed shape; a step has whatever shape the policy chose. :func:`split` cuts a step into launches, each
padded to a bucket, so that few programs serve every step: a long prompt is a chain of launches that attend to what the
launches before them wrote.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jdserve.core.pages import pages_for
from jdserve.core.plan import ColocatedInstance, DecodeInstance, Instance, Plan, PrefillInstance
from jdserve.policy.commands import Chunk, DecodeSeq

MAX_LAUNCH_TOKENS = 512
"""Prompt tokens of the largest program: past it a launch is compute-bound and a longer one gains nothing."""

MIN_LAUNCH_TOKENS = 32
"""Prompt tokens of the smallest program: below it a launch costs what reading the weights costs."""

TOKENS_PER_SEGMENT = 16
"""Prompt tokens of a program per chunk that it has room for."""

LAUNCH_OVERHEAD_TOKENS = 24
"""What one more launch costs (reading the weights once more), in prompt tokens; decides between padding and cutting."""


@dataclass(frozen=True, order=True)
class StepShape:
    """Shape of one program.

    Attributes:
        tokens: packed prompt tokens.
        segments: prompt chunks among them.
        seqs: decoding sequences.
    """

    tokens: int = 0
    segments: int = 0
    seqs: int = 0


@dataclass(frozen=True)
class Launch:
    """One launch of a step: what goes into which program."""

    shape: StepShape
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[DecodeSeq, ...] = ()


@dataclass(frozen=True)
class Buckets:
    """Every shape that an instance may launch.

    Attributes:
        prompts: programs for prompt chunks alone, by size.
        decodes: programs for decoding alone, by batch.
        mixed: programs for both, by size.
        transfers: pages per KV gather or insert.
        slots: sequences that the instance keeps state of at a time.
    """

    prompts: tuple[StepShape, ...]
    decodes: tuple[StepShape, ...]
    mixed: tuple[StepShape, ...]
    transfers: tuple[int, ...]
    slots: int

    @property
    def steps(self) -> tuple[StepShape, ...]:
        """All step programs."""
        return self.prompts + self.decodes + self.mixed


def ladder(first: int, last: int, factor: int) -> tuple[int, ...]:
    """``first`` and its products by ``factor`` below ``last``, and ``last``."""
    values: list[int] = []
    while first < last:
        values.append(first)
        first *= factor
    return (*values, last)


def buckets_for(plan: Plan, instance: Instance) -> Buckets:
    """The shapes of one instance of a plan."""
    prompts: tuple[StepShape, ...] = ()
    decodes: tuple[StepShape, ...] = ()
    mixed: tuple[StepShape, ...] = ()
    transfers: tuple[int, ...] = ()
    longest = min(MAX_LAUNCH_TOKENS, plan.max_model_len)
    prefills = isinstance(instance, PrefillInstance)
    slots = instance.max_batch * instance.pp if prefills else instance.max_num_seqs
    share = -(-slots // instance.pp)  # a step is for one stage of them
    if prefills:
        prompts = _prompt_shapes(longest, share)
    else:
        decodes = tuple(StepShape(seqs=size) for size in ladder(1, share, 2))
    if isinstance(instance, ColocatedInstance):
        chunked = instance.mode == "chunked"
        prompts = _prompt_shapes(min(longest, instance.token_budget) if chunked else longest, slots)
        if chunked:
            mixed = tuple(
                StepShape(shape.tokens, shape.segments, size)
                for shape in prompts
                for size in sorted({min(8, share), share})
            )
    if isinstance(instance, PrefillInstance | DecodeInstance):
        transfers = ladder(1, pages_for(plan.max_model_len, plan.page_size), 2)
    return Buckets(prompts, decodes, mixed, transfers, slots)


def _prompt_shapes(longest: int, slots: int) -> tuple[StepShape, ...]:
    # Wide steps: a prompt is cut to fit, so what lies between two sizes costs a launch more and not the padding.
    sizes = ladder(min(MIN_LAUNCH_TOKENS, longest), longest, 4)
    return tuple(StepShape(size, max(1, min(slots, size // TOKENS_PER_SEGMENT))) for size in sizes)


def fitting(sizes: Seq[int], wanted: int) -> int:
    """The smallest of the ascending ``sizes`` that holds ``wanted``.

    Raises:
        ValueError: none does; the policy asked for more than the plan allows.
    """
    for size in sizes:
        if size >= wanted:
            return size
    raise ValueError(f"no program holds {wanted}; the largest is {sizes[-1] if sizes else None}")


def split(buckets: Buckets, chunks: Seq[Chunk], decodes: Seq[DecodeSeq]) -> tuple[Launch, ...]:
    """Cut a step into launches.

    Prompt tokens are cut at the sizes of :func:`cut_tokens` and where a program has no segment left. Decoding sequences
    ride on the first launch when there is a mixed program, and go alone otherwise.
    """
    parts = list(_pack(buckets.prompts, chunks))
    launches: list[Launch] = []
    if decodes and not (parts and buckets.mixed):
        size = fitting([shape.seqs for shape in buckets.decodes], len(decodes))
        launches.append(Launch(StepShape(seqs=size), decodes=tuple(decodes)))
    for index, (shape, part) in enumerate(parts):
        riders = tuple(decodes) if index == 0 and buckets.mixed else ()
        if riders:
            size = fitting(sorted({mixed.seqs for mixed in buckets.mixed}), len(riders))
            shape = StepShape(shape.tokens, shape.segments, size)  # noqa: PLW2901
        launches.append(Launch(shape, part, riders))
    return tuple(launches)


def _pack(shapes: Seq[StepShape], chunks: Seq[Chunk]) -> list[tuple[StepShape, tuple[Chunk, ...]]]:
    packed: list[tuple[StepShape, tuple[Chunk, ...]]] = []
    rest = list(reversed(chunks))
    while rest:
        wanted = cut_tokens([shape.tokens for shape in shapes], sum(chunk.count for chunk in rest))
        shape = next(shape for shape in shapes if shape.tokens == wanted)
        part: list[Chunk] = []
        room = shape.tokens
        while rest and room and len(part) < shape.segments:
            chunk = rest.pop()
            if chunk.count > room:
                rest.append(Chunk(chunk.request_id, chunk.start + room, chunk.count - room, chunk.pages, chunk.last))
                chunk = Chunk(chunk.request_id, chunk.start, room, chunk.pages, last=False)
            part.append(chunk)
            room -= chunk.count
        used = shape.tokens - room
        shape = next(s for s in shapes if s.tokens >= used and s.segments >= len(part))
        packed.append((shape, tuple(part)))
    return packed


def cut_tokens(sizes: Seq[int], tokens: int) -> int:
    """Size of the first launch of ``tokens`` prompt tokens that wastes least on padding and further launches."""
    if tokens >= sizes[-1]:
        return sizes[-1]

    def cost(left: int) -> int:
        return 0 if left <= 0 else LAUNCH_OVERHEAD_TOKENS + min(size + cost(left - size) for size in options(left))

    def options(left: int) -> list[int]:
        return [size for size in sizes if size <= left][-1:] + [size for size in sizes if size >= left][:1]

    return min(options(tokens), key=lambda size: size + cost(tokens - size))
