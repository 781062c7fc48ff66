"""The devices of one instance in simulated time: which steps are in flight, and when they end."""

from __future__ import annotations

import itertools
from collections import deque

from jdserve.core.pages import PageCount
from jdserve.core.plan import DecodeInstance, Instance, PrefillInstance
from jdserve.core.steptime import StepFeatures
from jdserve.cost.stepcost import FS, Lines, StepCost, line_fit
from jdserve.policy.build import machine_for
from jdserve.policy.decoding import DecodingScheduler

UNKNOWN = -1


class Flight:
    """A step in flight.

    Attributes:
        end: femtoseconds.
        seqs, context: what it decodes: sequences, and the sum of their contexts.
        lines: of the time that each stage takes (see :meth:`StepCost.lines`); None where it is no line, or unknown.
    """

    __slots__ = ("context", "end", "lines", "seqs")

    def __init__(self, end: int, seqs: int, context: int, lines: Lines | None) -> None:
        self.end = end
        self.seqs = seqs
        self.context = context
        self.lines = lines

    def later(self, steps: int) -> StepFeatures:
        """What the decode step ``steps`` steps later does, with the same sequences."""
        return StepFeatures(0, 0, 0, self.seqs, self.context + steps * self.seqs)


class Site:
    """The devices of one instance, and its machine.

    Every stage is a resource that takes one step at a time, in the order of their launch. *Hidden* steps are those
    after which nothing is decided: the machine is told of them when it is asked the next time. With one stage they are
    taken in closed form, with several one by one.

    Attributes:
        index: of the instance in the plan.
        machine: its scheduler, a brief one.
        decoder: the same, where hidden steps are made use of.
        flights: oldest first.
        busy: femtoseconds that each stage has worked.
        hidden: steps, from the oldest in flight on, that end without a decision; UNKNOWN where the machine was not
            asked yet.
        untold: hidden steps that have ended and were not told to the machine yet.
        version: of the entry on the heap that counts.
        steps, tokens: steps launched, and tokens that they computed or generated.
        parked: requests whose KV waits here, and when they were parked.
        lease: femtoseconds that it may wait.
        timer: the end of the oldest lease is on the heap.
        preempted: a preempted sequence goes back to the router.
        single: there is one stage.
    """

    __slots__ = (
        "_lines",
        "busy",
        "cost",
        "decoder",
        "flights",
        "free",
        "hidden",
        "index",
        "lease",
        "machine",
        "name",
        "parked",
        "preempted",
        "single",
        "steps",
        "timer",
        "tokens",
        "untold",
        "version",
    )

    def __init__(
        self, index: int, instance: Instance, page_size: int, cost: StepCost, *, prefixes: bool, jump: bool
    ) -> None:
        self.index = index
        self.name = instance.name
        # pages need no ids unless prompts share them
        pool = None if prefixes else PageCount(instance.pages, page_size)
        self.machine = machine_for(instance, page_size, pool=pool, brief=True)
        self.cost = cost
        self._lines: dict[int, Lines | None] = {}  # by sequences
        self.flights: deque[Flight] = deque()
        self.untold = 0
        self.free = [0] * instance.pp
        self.busy = [0] * instance.pp
        self.hidden = UNKNOWN
        self.version = 0
        self.steps = 0
        self.tokens = 0
        self.parked: dict[str, int] = {}
        self.lease = round(instance.lease_s * FS) if isinstance(instance, PrefillInstance) else 0
        self.timer = False
        self.preempted = isinstance(instance, DecodeInstance)
        self.decoder = self.machine if jump and isinstance(self.machine, DecodingScheduler) else None
        self.single = instance.pp == 1

    def launch(self, work: StepFeatures, now: int) -> None:
        """Launch a step."""
        seqs, context, new = work.decode_seqs, work.decode_context, work.new_tokens
        lines = None
        if not new:
            lines = self._lines.get(seqs)
            if lines is None:
                lines = self._lines[seqs] = self.cost.lines(seqs)
        if lines is None:
            end = self._through(self._times(work), 0, now)
        else:
            end = self._through(lines, context, now)
        self.flights.append(Flight(end, seqs, context, lines))
        self.steps += 1
        self.tokens += new + seqs
        self.hidden = UNKNOWN

    def _times(self, work: StepFeatures) -> Lines:
        """What a step takes in each stage, as lines in no context."""
        return tuple([(took, 0) for took in self.cost.stages(work)])

    def _through(self, lines: Lines, context: int, at: int) -> int:
        """Send a step that is launched at ``at`` through all stages; when it has passed the last one."""
        free, busy = self.free, self.busy
        for stage, (base, slope) in enumerate(lines):
            took = base + slope * context
            busy[stage] += took
            before = free[stage]
            free[stage] = at = took + (at if at > before else before)
        return at

    def end(self) -> int:
        """Take the oldest step out of the flight; its number, counted as the machine counts."""
        number = self.steps - len(self.flights)
        self.flights.popleft()
        return number

    def due(self) -> int:
        """When the next step may end that needs a decision; with several stages it may be later, never earlier."""
        rounds, place = divmod(self.hidden, len(self.flights))
        flight = self.flights[place]
        return flight.end + self._run(flight, rounds) if rounds else flight.end

    def sync(self, until: int) -> None:
        """Take the hidden steps that have ended by ``until``."""
        flight = self.flights[0]
        if not self.single:
            self._roll(until)
        elif until >= flight.end:
            fits = self._fits(flight, until - flight.end)
            count = min(self.hidden, 1 + fits)
            self._jump(count, flight.end + self._run(flight, count))

    def _fits(self, flight: Flight, budget: int) -> int:
        """How many of the steps after ``flight`` take ``budget`` together, of an instance with one stage."""
        if flight.lines is None:
            return self.cost.steps_within(flight.later(1), budget)
        base, slope = flight.lines[0]
        grows = slope * flight.seqs
        return line_fit(base + slope * flight.context + grows, grows, budget)

    def _jump(self, count: int, end: int) -> None:
        """Take hidden steps of an instance with one stage, after which the next one ends at ``end``."""
        flight = self.flights[0]
        tokens = count * flight.seqs
        self.busy[0] += end - flight.end
        flight.end = end
        flight.context += tokens
        self.steps += count
        self.tokens += tokens
        self.hidden -= count
        self.untold += count

    def _run(self, flight: Flight, count: int) -> int:
        """Time of the ``count`` steps after ``flight`` with the same sequences, where none waits for another one's."""
        if flight.lines is None:
            return self.cost.run(flight.later(1), count)
        context = count * flight.context + flight.seqs * (count * (count + 1) // 2)
        return sum([count * base + slope * context for base, slope in flight.lines])

    def _roll(self, until: int) -> None:
        """Take the hidden steps that have ended by ``until`` one by one."""
        flights, free, busy, hidden = self.flights, self.free, self.busy, self.hidden
        steps = tokens = 0
        for flight in itertools.cycle(flights):
            if steps == hidden or (at := flight.end) > until:
                break
            seqs = flight.seqs
            flight.context = context = flight.context + seqs
            if flight.lines is None:
                flight.end = self._through(self._times(flight.later(0)), 0, at)
            else:
                # as in _through, without the call: this is most of what a pipeline costs
                for stage, (base, slope) in enumerate(flight.lines):
                    took = base + slope * context
                    busy[stage] += took
                    before = free[stage]
                    free[stage] = at = took + (at if at > before else before)
                flight.end = at
            steps += 1
            tokens += seqs
        flights.rotate(-steps)
        self.steps += steps
        self.tokens += tokens
        self.hidden -= steps
        self.untold += steps
