"""How the front door talks to one instance, wherever it runs.

:class:`~jdserve.runtime.instance.Instance` is the client of an instance in this process. News comes back as
:class:`~jdserve.runtime.outputs.Report` through the callback that the instance was made with.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from jdserve.core.plan import Instance, Plan, Worker
from jdserve.core.request import Request
from jdserve.runtime.outputs import InstanceStats
from jdserve.transfer.layout import KVHandle


class Fleet(Protocol):
    """The instances of a plan, wherever they run."""

    @property
    def clients(self) -> Mapping[str, EngineClient]:
        """The client of each instance, by name; grows and shrinks as instances come and go."""
        ...

    def recompilations(self) -> int:
        """Programs compiled after the start, in all processes; anything but 0 is a fault."""
        ...

    def retire(self, instance: str) -> None:
        """End an instance that holds nothing any more, for good. Does not wait."""
        ...

    def add(self, instance: Instance, worker: Worker) -> Plan:
        """Start one more instance; waits until it takes work, and gives the plan that is in force then.

        Raises:
            InvalidPlan: it does not fit the plan or the machine.
            JdserveError: it could not be started.
        """
        ...

    def stop(self) -> None:
        """End all instances and free what they hold; waits until they are gone."""
        ...


class EngineClient(Protocol):
    """One instance. No method waits for a step; each may be called from any thread."""

    @property
    def name(self) -> str:
        """Its name in the plan."""
        ...

    def submit(self, request: Request, prefix: tuple[bytes, ...]) -> None:
        """Have a prompt computed; ``prefix`` holds the hashes of its leading full pages that may be shared."""
        ...

    def hand_off(self, request: Request, source: str, handles: Seq[KVHandle]) -> None:
        """Have a request decoded whose KV is parked on ``source``; its last prompt token has no KV yet."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request, in whatever state it is."""
        ...

    def landed(self, request_id: str) -> None:
        """Say that the parked KV of a request has arrived where it was pulled to."""
        ...

    def stats(self) -> InstanceStats:
        """State of the instance now."""
        ...

    def stop(self) -> None:
        """End the instance and free what it holds; waits until it is gone."""
        ...
