"""The event loop: a heap of completions, and the machines that they are told to.

Events at the same femtosecond happen in this order: ends of steps (by the order of the instances in the plan), landed
pulls, arrivals, leases. So the run does not depend on which of them were looked at one by one and which were skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Any

from jdserve.core.plan import Plan
from jdserve.cost.stepcost import StepCost
from jdserve.policy.build import router_for
from jdserve.policy.commands import BriefStep, Command, Dispatch, Emit, Preempt, Pull, Reject, Release
from jdserve.policy.events import (
    Arrived,
    Cancelled,
    Event,
    Finished,
    KVLanded,
    KVReady,
    LeaseExpired,
    Preempted,
    PullFailed,
    StepDone,
)
from jdserve.sim.links import Links, Network
from jdserve.sim.prefixes import Prefixes
from jdserve.sim.result import NEVER, SimResult, Usage
from jdserve.sim.site import UNKNOWN, Site
from jdserve.sim.verdict import Verdict, Watch
from jdserve.sim.workload import FS, Workload

FS_PER_NS = 1_000_000


class Loop:
    """One run; see :func:`jdserve.sim.simulate.simulate` for the arguments."""

    def __init__(
        self,
        plan: Plan,
        workload: Workload,
        costs: Mapping[str, StepCost],
        network: Network,
        verdict: Verdict | None,
        jump: bool,
    ) -> None:
        self._workload = workload
        self._router = router_for(plan)
        self._sites = {
            instance.name: Site(
                index, instance, plan.page_size, costs[instance.name], prefixes=bool(workload.blocks), jump=jump
            )
            for index, instance in enumerate(plan.instances)
        }
        self._landing, self._arriving, self._leasing = (len(self._sites) + place for place in range(3))
        self._links = Links(network)
        self._prefixes = Prefixes(workload, plan.page_size)
        self._watch = None if verdict is None else Watch(verdict, workload)
        self._heap: list[tuple[int, int, int, Any]] = []
        self._posted = 0
        self._now = 0
        self._ns = 0
        self._rank = 0  # the highest of the events that have happened at this moment
        self._asked: set[Site] = set()  # decoders that were asked at this moment, whose horizon is not looked at yet
        self._events = 0
        self._inbox: deque[tuple[Site | None, Event]] = deque()
        count = len(workload)
        self._open = count
        self._started = [NEVER] * count
        self._first = [NEVER] * count
        self._pulled = [NEVER] * count
        self._landings = [NEVER] * count
        self._ends = [NEVER] * count
        self._generated = [0] * count
        self._rejected: dict[int, str] = {}

    def run(self) -> SimResult:
        """The whole run."""
        heap, inbox, watch, landing, asked = self._heap, self._inbox, self._watch, self._landing, self._asked
        heappush(heap, (self._workload.arrivals[0], self._arriving, 0, None))
        while self._open and not (watch and watch.certain):
            if asked and (not heap or heap[0][0] > self._now):
                self._look_ahead()
            now, rank, version, what = heappop(heap)
            if rank < landing and version != what.version:
                continue
            if now > self._now:
                self._now, self._ns, self._rank = now, now // FS_PER_NS, rank
            elif rank > self._rank:
                self._rank = rank
            if rank < landing:
                self._step_done(what)
            elif rank == landing:
                self._landed(*what)
            elif what is None:
                self._arrive(version)
            else:
                self._expire(what)
            while inbox:
                site, event = inbox.popleft()
                if site is None:
                    self._ask_router(event)
                else:
                    self._ask(site, event)
            if watch:
                watch.passed(now)
        return self._result()

    def _result(self) -> SimResult:
        for site in self._sites.values():
            self._sync(site)
        return SimResult(
            arrivals=self._workload.arrivals,
            started=tuple(self._started),
            first=tuple(self._first),
            pulled=tuple(self._pulled),
            landed=tuple(self._landings),
            ends=tuple(self._ends),
            outputs=self._workload.outputs,
            generated=tuple(self._generated),
            rejected=self._rejected,
            complete=not self._open,
            duration=self._now,
            instances=tuple(
                Usage(
                    site.name,
                    site.steps,
                    tuple(busy / FS for busy in site.busy),
                    site.machine.preemptions,
                    site.tokens,
                )
                for site in self._sites.values()
            ),
            links={name: busy / FS for name, busy in sorted(self._links.busy.items())},
            events=self._events,
        )

    # what happens

    def _arrive(self, index: int) -> None:
        work = self._workload
        later = index + 1
        if later < len(work.arrivals):
            # the heap holds the next arrival only
            heappush(self._heap, (work.arrivals[later], self._arriving, later, None))
        prefix = self._prefixes.of(index) if work.blocks else ()
        self._ask_router(Arrived(str(index), work.inputs[index], work.outputs[index], prefix))

    def _step_done(self, site: Site) -> None:
        if site.hidden:
            site.sync(self._now)
        if site.flights[0].end > self._now:  # it was too early to look
            self._expect(site)
            return
        if site.untold:
            self._tell(site)
        site.hidden = UNKNOWN
        self._ask(site, StepDone(site.end()))

    def _landed(self, site: Site, source: Site, request_id: str) -> None:
        self._landings[int(request_id)] = self._now
        event = KVLanded(request_id)
        self._ask(site, event)
        self._ask(source, event)
        self._ask_router(event)

    def _expire(self, site: Site) -> None:
        site.timer = False
        for request_id, since in list(site.parked.items()):
            if since + site.lease > self._now:
                break
            self._inbox.append((site, LeaseExpired(request_id)))
        self._watch_leases(site)

    def _watch_leases(self, site: Site) -> None:
        # one timer for the oldest is enough: leases of one instance are equally long
        later = next((since for since in site.parked.values() if since + site.lease > self._now), None)
        if later is not None:
            site.timer = True
            self._post(later + site.lease, self._leasing, site)

    # whom to ask

    def _ask_router(self, event: Event) -> None:
        self._events += 1
        for command in self._router.handle(event, self._ns):
            # asked by type: isinstance takes several times as long where the class of a message is another one
            if type(command) is Dispatch:
                # what the router hears of a request is what the instance must know, unless the request comes back
                heard = event if type(event) is Arrived or type(event) is KVReady else self._again(command)
                self._inbox.append((self._sites[command.instance], heard))
            elif type(command) is Release:
                assert command.instance is not None
                self._inbox.append((self._sites[command.instance], Cancelled(command.request_id)))
            elif type(command) is Reject:
                self._reject(int(command.request_id), command.reason)
            else:
                raise AssertionError(command)

    def _again(self, command: Dispatch) -> Arrived:
        """What an instance hears of a request that is prefilled again."""
        assert command.source is None
        index, work = int(command.request_id), self._workload
        got = self._generated[index]
        prefix = self._prefixes.of(index) if work.blocks else ()
        return Arrived(command.request_id, work.inputs[index] + got, work.outputs[index] - got, prefix)

    def _ask(self, site: Site, event: Event) -> None:
        self._events += 1
        if site.hidden > 0 or site.untold:
            self._sync(site)
        for command in site.machine.handle(event, self._ns):
            if type(command) is BriefStep:
                if command.prompts:
                    self._prompts_start(command.prompts)
                site.launch(command.work, self._now)
            elif type(command) is Emit:
                self._emit(site, command)
            elif type(command) is Release:
                if site.parked:
                    site.parked.pop(command.request_id, None)
            elif type(command) is Pull:
                self._pull(site, self._sites[command.source], command.request_id, command.tokens)
            else:
                self._obey(site, command)
        if site.flights:
            if site.decoder and site.flights[0].end > self._now:
                self._asked.add(site)
            elif site.hidden:
                site.hidden = 0
                self._expect(site)

    def _look_ahead(self) -> None:
        """See how long the decoders that were asked can go on; more was to be heard before time passes."""
        for site in self._asked:
            if site.decoder and site.flights:
                hidden = site.decoder.horizon()
                if hidden != site.hidden:
                    site.hidden = hidden
                    self._expect(site)
        self._asked.clear()

    def _obey(self, site: Site, command: Command) -> None:
        match command:
            case Preempt(request_id):
                if site.preempted:
                    index = int(request_id)
                    got = self._generated[index]
                    tokens, left = self._workload.inputs[index] + got, self._workload.outputs[index] - got
                    self._inbox.append((None, Preempted(request_id, tokens, left)))
            case Reject(request_id, reason):
                self._reject(int(request_id), reason)
                self._inbox.append((None, Finished(request_id)))
            case _:
                raise AssertionError(command)

    def _emit(self, site: Site, emit: Emit) -> None:
        request_id, now = emit.request_id, self._now
        index = int(request_id)
        if self._first[index] == NEVER:
            self._first[index] = now
            if self._watch:
                self._watch.first(index, now)
        self._generated[index] = got = self._generated[index] + emit.count
        if emit.finish is not None:
            self._end(index)
            self._inbox.append((None, Finished(request_id)))
        elif emit.parked:
            site.parked[request_id] = now
            if not site.timer:
                self._watch_leases(site)
            work = self._workload
            tokens, left = work.inputs[index] + got - 1, work.outputs[index] - got
            self._inbox.append((None, KVReady(request_id, site.name, tokens, left)))

    def _end(self, index: int) -> None:
        self._ends[index] = self._now
        self._open -= 1
        if self._watch:
            self._watch.ended(index, self._first[index], self._now)

    def _reject(self, index: int, reason: str) -> None:
        self._rejected[index] = reason
        self._open -= 1
        if self._watch:
            self._watch.lost(index)

    def _pull(self, site: Site, source: Site, request_id: str, tokens: int) -> None:
        if request_id not in source.parked:
            # its lease ran out
            for target in (site, None):
                self._inbox.append((target, PullFailed(request_id, "its KV is not parked any more")))
            return
        self._pulled[int(request_id)] = self._now
        self._post(
            self._links.transfer(source.name, site.name, tokens, self._now), self._landing, (site, source, request_id)
        )

    # steps

    def _prompts_start(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            index = int(request_id)
            if self._started[index] == NEVER:
                self._started[index] = self._now

    def _expect(self, site: Site) -> None:
        """Put the next moment on the heap at which a step of ``site`` may end that needs a decision."""
        site.version = version = site.version + 1
        heappush(self._heap, (site.due() if site.hidden else site.flights[0].end, site.index, version, site))

    def _sync(self, site: Site) -> None:
        """Tell the machine of the hidden steps that have ended; it then is where single steps would have led it."""
        if site.hidden > 0 and site.flights[0].end <= self._now:
            # whether what ends just now has ended, is a matter of the order of this moment
            site.sync(self._now if self._rank > site.index else self._now - 1)
        if site.untold:
            self._tell(site)

    def _tell(self, site: Site) -> None:
        assert site.decoder is not None
        site.decoder.advance(site.untold, self._ns)
        self._events += site.untold
        site.untold = 0

    def _post(self, at: int, rank: int, what: object) -> None:
        self._posted += 1
        heappush(self._heap, (at, rank, self._posted, what))
