"""The devices of one instance in simulated time: which steps are in flight, and when they end."""

from __future__ import annotations

from collections import deque

from jdserve.core.pages import PageCount
from jdserve.core.plan import DecodeInstance, Instance, PrefillInstance
from jdserve.core.steptime import StepFeatures
from jdserve.cost.stepcost import FS, StepCost
from jdserve.policy.build import machine_for
from jdserve.policy.decoding import DecodingScheduler

UNKNOWN = -1


class Flight:
    """A step in flight.

    Attributes:
        end: femtoseconds.
        step_id: of the machine.
        seqs, context: what it decodes: sequences, and the sum of their contexts.
        took: femtoseconds in each stage.
        slopes: what the stages take longer in the next step of the same sequences; None where it is not known.
    """

    __slots__ = ("context", "end", "seqs", "slopes", "step_id", "took")

    def __init__(self, step_id: int, work: StepFeatures, took: tuple[int, ...]) -> None:
        self.end = 0
        self.step_id = step_id
        self.seqs = work.decode_seqs
        self.context = work.decode_context
        self.took = took
        self.slopes: tuple[int, ...] | None = None

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
        launched: number of the turn of the loop in which the last step was launched.
        steps, tokens: steps launched, and tokens that they computed or generated.
        parked: requests whose KV waits here, and when they were parked.
        lease: femtoseconds that it may wait.
        timer: the end of the oldest lease is on the heap.
        preempted: a preempted sequence goes back to the router.
        single: there is one stage.
    """

    __slots__ = (
        "busy",
        "cost",
        "decoder",
        "flights",
        "free",
        "hidden",
        "index",
        "launched",
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
        self.flights: deque[Flight] = deque()
        self.untold = 0
        self.free = [0] * instance.pp
        self.busy = [0] * instance.pp
        self.hidden = UNKNOWN
        self.version = 0
        self.launched = -1
        self.steps = 0
        self.tokens = 0
        self.parked: dict[str, int] = {}
        self.lease = round(instance.lease_s * FS) if isinstance(instance, PrefillInstance) else 0
        self.timer = False
        self.preempted = isinstance(instance, DecodeInstance)
        self.decoder = self.machine if jump and isinstance(self.machine, DecodingScheduler) else None
        self.single = instance.pp == 1

    def launch(self, step_id: int, work: StepFeatures, now: int, turn: int) -> None:
        """Launch a step."""
        flight = Flight(step_id, work, self.cost.stages(work))
        self._pass(flight, now)
        self.flights.append(flight)
        self.steps += 1
        self.tokens += work.new_tokens + flight.seqs
        self.launched = turn
        self.hidden = UNKNOWN

    def _pass(self, flight: Flight, at: int) -> None:
        """Send a step that is launched at ``at`` through all stages."""
        free, busy = self.free, self.busy
        for stage, took in enumerate(flight.took):
            at = free[stage] = (at if at > free[stage] else free[stage]) + took
            busy[stage] += took
        flight.end = at

    def due(self) -> int:
        """The next end of a step that needs a decision, or, with several stages, a look."""
        flight = self.flights[0]
        if self.hidden and self.single:
            return flight.end + self.cost.run(flight.later(1), self.hidden)
        return flight.end

    def sync(self, until: int) -> None:
        """Take the hidden steps that have ended by ``until``, where they are not taken one by one."""
        if self.single:
            flight = self.flights[0]
            if flight.end <= until:
                self.jump(1 + self.cost.steps_within(flight.later(1), until - flight.end))

    def jump(self, count: int) -> None:
        """Take hidden steps of an instance with one stage, in closed form."""
        flight = self.flights[0]
        took = self.cost.run(flight.later(1), count)
        flight.end += took
        flight.step_id += count
        flight.context += count * flight.seqs
        self.free[0] += took
        self.busy[0] += took
        self._count(count, flight.seqs)

    def roll(self, before: tuple[int, int], arrival: int) -> None:
        """Take hidden steps one by one, those that end before the event at ``before`` and not after ``arrival``."""
        flights, index, cost = self.flights, self.index, self.cost
        turns = len(flights)
        while self.hidden:
            flight = flights[0]
            end = flight.end
            if end > arrival or (end, index) >= before:
                break
            flights.rotate(-1)
            flight.step_id += turns
            flight.context += flight.seqs
            if flight.slopes is not None:
                flight.took = tuple(map(int.__add__, flight.took, flight.slopes))
            else:
                work = flight.later(0)
                flight.took, flight.slopes = cost.stages(work), cost.slopes(work)
            self._pass(flight, end)
            self._count(1, flight.seqs)

    def _count(self, steps: int, seqs: int) -> None:
        self.steps += steps
        self.tokens += steps * seqs
        self.hidden -= steps
        self.untold += steps
