"""What the front door keeps of a worker and of an instance in it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from jdserve.core.logs import LogFormat
from jdserve.core.plan import Worker
from jdserve.core.request import Request
from jdserve.runtime import wire
from jdserve.runtime.outputs import InstanceStats
from jdserve.runtime.processes import Process
from jdserve.transfer.layout import KVHandle


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a server runs its workers.

    Attributes:
        host, port: where workers connect; port 0 takes a free one.
        secret: shared with them.
        oversubscribe: workers of one machine may share cores; none is pinned.
        heartbeat_timeout_s: silence after which a worker is taken for dead.
        join_timeout_s: how long the start waits for a worker on another host.
        patience_s: how long requests wait for a role of which every instance is gone, before they are refused.
        record: folder for event logs.
        log_format: of what the workers write to stderr.
    """

    host: str = "127.0.0.1"
    port: int = 0
    secret: str
    oversubscribe: bool = False
    heartbeat_timeout_s: float = 10.0
    join_timeout_s: float = 60.0
    patience_s: float = 30.0
    record: str | None = None
    log_format: LogFormat = "text"

    def flags(self) -> list[str]:
        """What a worker of this machine is started with, besides its place."""
        return [*(["--oversubscribe"] if self.oversubscribe else []), "--log-format", self.log_format]


@dataclass
class Link:
    """What is known of one worker.

    Attributes:
        worker: its part of the plan.
        process: of this machine; None for a worker that joins from elsewhere.
        identity: of its connection, None while there is none.
        up: it takes work.
        awaited: its first start, which somebody waits for.
        heard: monotonic seconds of its last message, or of the start of the wait for the first.
        progress: stage and share of its start.
        final: why another start is useless.
        leaving: it is retired.
    """

    worker: Worker
    process: Process | None
    identity: bytes | None = None
    up: bool = False
    awaited: bool = True
    heard: float = 0.0
    progress: tuple[str, float | None] = ("start", None)
    reason: str = ""
    final: bool = False
    leaving: bool = False
    recompilations: int = 0


class RemoteInstance:
    """The client of an instance in another process; see :class:`~jdserve.runtime.client.EngineClient`.

    Args:
        name, role: of the instance.
        post: sends to the worker that leads it.
    """

    def __init__(self, name: str, role: str, post: Callable[[wire.ToWorker], None]) -> None:
        self.name = name
        self.last = InstanceStats(name, role)
        self._post = post

    def submit(self, request: Request, prefix: tuple[bytes, ...]) -> None:
        """Have a prompt computed."""
        self._post(wire.Submit(self.name, request, prefix))

    def hand_off(self, request: Request, source: str, handles: Seq[KVHandle]) -> None:
        """Have a request decoded whose KV is parked on ``source``."""
        self._post(wire.HandOff(self.name, request, source, tuple(handles)))

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        self._post(wire.Cancel(self.name, request_id))

    def landed(self, request_id: str) -> None:
        """Say that parked KV has arrived where it was pulled to."""
        self._post(wire.Landed(self.name, request_id))

    def stats(self) -> InstanceStats:
        """As last heard."""
        return self.last

    def stop(self) -> None:
        """Its worker is stopped by the fleet."""
