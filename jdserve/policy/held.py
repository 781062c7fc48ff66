"""A sequence on an instance, and the batches in which sequences decode."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from jdserve.core.pages import BlockTable, PageCount, PagePool
from jdserve.core.request import Sequence


class Held:
    """One sequence on an instance, with its pages.

    Attributes:
        sequence: its state and token counts; while it is in a batch, those it joined with.
        priority: the queue is in the order of it, and of arrival.
        prefix: chained hashes of the leading full prompt pages that may be shared.
        source: prefill instance on which its KV is parked; "" where the instance computes the prompt itself.
        table: its pages, empty until they are reserved.
        admitted: counts admissions; the largest is the youngest sequence.
        order: counts what began to run; sequences decode in this order.
        computing: a step in flight computes a part of its prompt.
        batch: in which it decodes, None before it does.
        joined: steps of the batch when it joined.
        end: entry of the batch's list of ends that counts for it.
        told: tokens of it that went out.
        cancelled: it ends as soon as nothing writes its pages any more.
    """

    __slots__ = (
        "admitted",
        "batch",
        "cancelled",
        "computing",
        "end",
        "id",
        "joined",
        "order",
        "prefix",
        "priority",
        "sequence",
        "source",
        "table",
        "told",
    )

    def __init__(self, sequence: Sequence, prefix: tuple[bytes, ...] = (), source: str = "", priority: int = 0) -> None:
        self.id = sequence.id
        self.sequence = sequence
        self.prefix = prefix
        self.priority = priority
        self.source = source
        self.table = NO_PAGES
        self.admitted = 0
        self.order = 0
        self.computing = False
        self.batch: Batch | None = None
        self.joined = 0
        self.end: tuple[int, int, Held] | None = None
        self.told = 0
        self.cancelled = False

    @property
    def in_step(self) -> bool:
        """A step in flight writes its pages."""
        return self.computing or (self.batch is not None and self.batch.flying)

    @property
    def computed(self) -> int:
        """Leading tokens whose KV is in the pool."""
        batch = self.batch
        return self.sequence.computed if batch is None else self.sequence.computed + batch.steps - self.joined


NO_PAGES = BlockTable(())
"""What a sequence has before its reservation; never changed."""


class Batch:
    """Sequences that decode together: one token each in every step.

    What a step changes in all of them is kept once for the batch. So a step costs what it decides (who ends, who needs
    a page), not what the batch has members.

    Where the pool only counts pages, so does the batch: a member's table then grows when it leaves.

    Attributes:
        members: by request id, in the order in which they began to run.
        steps: steps taken.
        tokens: tokens of all members whose KV is in the pool.
        flying: a step of the batch is in flight.
        leaving: members that were cancelled meanwhile.
        page_size: token positions per page.
    """

    __slots__ = ("_due", "_ends", "_full", "_pool", "flying", "leaving", "members", "page_size", "steps", "tokens")

    def __init__(self, pool: PagePool) -> None:
        self.members: dict[str, Held] = {}
        self.steps = 0
        self.tokens = 0
        self.flying = False
        self.leaving: list[Held] = []
        self.page_size = pool.page_size
        self._pool = pool
        self._ends: list[tuple[int, int, Held]] = []  # a heap; entries of those that left are passed over
        # by the step, modulo the page size, at which their pages are full: the members, and how many
        self._due: dict[int, dict[str, Held]] = {}
        self._full = [0] * pool.page_size

    def __len__(self) -> int:
        return len(self.members)

    def join(self, held: Held) -> None:
        """Take in a sequence that began to run after all members."""
        sequence, id, steps = held.sequence, held.id, self.steps
        computed = sequence.computed
        held.batch = self
        held.joined = steps
        self.members[id] = held
        self.tokens += computed
        held.end = end = (steps + sequence.max_new_tokens - sequence.generated, held.order, held)
        heapq.heappush(self._ends, end)
        phase = (steps - computed) % self.page_size
        self._full[phase] += 1
        due = self._due.get(phase)
        if due is None:
            self._due[phase] = {id: held}
        else:
            due[id] = held

    def leave(self, held: Held) -> None:
        """Let a member go, with its counts brought up to date."""
        sequence, id, size = held.sequence, held.id, self.page_size
        steps = self.steps - held.joined
        sequence.generated += steps
        sequence.computed = computed = sequence.computed + steps
        held.batch = held.end = None
        del self.members[id]
        self.tokens -= computed
        if isinstance(self._pool, PageCount):
            # every launched step had room for its token
            table = held.table
            pages = (computed - 1) // size + 1
            if pages > len(table.pages):
                table.pages = range(pages)
        phase = (self.steps - computed) % size
        self._full[phase] -= 1
        del self._due[phase][id]

    def step(self, count: int = 1) -> None:
        """Count ``count`` steps."""
        self.steps += count
        self.tokens += count * len(self.members)

    def ended(self) -> list[Held]:
        """Members that have all their tokens, in order; asked once after each step."""
        found: list[Held] = []
        ends, steps = self._ends, self.steps
        while ends and ends[0][0] <= steps:
            entry = heapq.heappop(ends)
            if entry[2].end is entry:
                found.append(entry[2])
        return found

    def left(self) -> int:
        """Steps until the first member has all its tokens; 1 where there is no member."""
        ends = self._ends
        while ends:
            entry = ends[0]
            if entry[2].end is entry:
                return entry[0] - self.steps
            heapq.heappop(ends)
        return 1

    def short(self) -> list[Held]:
        """Members that need a page before the next step can be launched."""
        steps, size = self.steps, self.page_size
        due = self._due.get(steps % size)
        if not due:
            return []
        # who has just joined may have a page in reserve
        return [
            held
            for held in due.values()
            if held.joined < steps or len(held.table.pages) * size == held.sequence.computed
        ]

    def grow(self, short: Seq[Held]) -> None:
        """Give each of ``short`` a page."""
        if isinstance(self._pool, PageCount):
            self._pool.take(len(short))
            return
        for held in short:
            self._pool.grow(held.table, 1)

    def grow_at(self, ahead: int) -> None:
        """Give the members the pages without which the step ``ahead`` >= 1 steps after the one in flight cannot go."""
        due = self._due.get((self.steps + ahead) % self.page_size)
        if due:
            self.grow(list(due.values()))

    def growth(self, steps: int) -> int:
        """Pages that the next ``steps`` steps after the one in flight take: in S steps one per member."""
        size, full = self.page_size, self._full
        first = (self.steps + 1) % size
        behind = first + steps % size
        pages = steps // size * len(self.members) + sum(full[first:behind])
        return pages if behind <= size else pages + sum(full[: behind - size])

    def growth_at(self, ahead: int) -> int:
        """Pages of the step ``ahead`` steps after the one in flight."""
        return self._full[(self.steps + ahead) % self.page_size]


def pages_last(batches: Seq[Batch], available: int, most: int) -> int:
    """For how many of the next ``most`` steps ``available`` pages suffice, the batches taking turns.

    In every stretch of S steps of a batch, S being the page size, each of its members needs one page. So all batches
    together have floor(available / members) such stretches, and what is left lasts until more members than that are
    due.
    """
    turns = len(batches)
    members = len(batches[0].members) if turns == 1 else sum(len(batch.members) for batch in batches)
    full, rest = divmod(available, members)
    steps = full * batches[0].page_size * turns
    if steps >= most:
        return most
    for event in range(batches[0].page_size * turns):
        rest -= batches[event % turns].growth_at(event // turns + 1)
        if rest < 0:
            break
        steps += 1
    return min(steps, most)


def in_order(sequences: Iterable[Held]) -> list[Held]:
    """Sequences in the order in which they began to run."""
    return sorted(sequences, key=lambda held: held.order)
