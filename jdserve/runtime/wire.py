"""What the front door and its workers say to each other: typed messages, one ZeroMQ frame each, never pickle.

A message of a type, size or shape that is not listed here is refused by the decoder; nothing of it is looked at.
"""

from __future__ import annotations

import msgspec

from jdserve.core.plan import Instance, Plan, Worker
from jdserve.core.request import Request
from jdserve.runtime.outputs import InstanceStats, Report
from jdserve.transfer.layout import KVHandle


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class World(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``jax.distributed`` world that a worker belongs to, where an instance or a pair of them spans processes.

    Attributes:
        coordinator: host:port of rank 0.
        size, rank: processes in it, and which one this is.
        ports: a free port per rank on its host, for ``device_put`` across the processes.
        steps: host:port at which rank 0 tells the others what to launch.
    """

    coordinator: str
    size: int
    rank: int
    ports: tuple[int, ...] = ()
    steps: str = ""


class Hello(_Message, frozen=True):
    """A worker is there. First message of every connection.

    Attributes:
        worker: its name in the plan.
        pid: of its process.
        version: of jdserve.
    """

    worker: str
    pid: int
    version: str


class Starting(_Message, frozen=True):
    """How far a worker has come; see :class:`~jdserve.runtime.progress.Progress`."""

    stage: str
    done: float | None


class Up(_Message, frozen=True):
    """Every instance of the worker is loaded and compiled, and takes work."""


class News(_Message, frozen=True):
    """All news of a step, and the state after it.

    Attributes:
        report: of the instance.
        stats: of the same instance.
    """

    report: Report
    stats: InstanceStats


class Beat(_Message, frozen=True):
    """Sign of life of a worker.

    Attributes:
        stats: of its instances; empty before it is up.
        recompilations: programs compiled since it was up.
        busy_s: seconds since the step in flight was launched, the longest of all instances.
    """

    stats: tuple[InstanceStats, ...] = ()
    recompilations: int = 0
    busy_s: float = 0.0


class Broken(_Message, frozen=True):
    """The worker ends itself, and why.

    Attributes:
        reason: for people.
        final: another try would end the same way: the plan or the model is at fault.
    """

    reason: str
    final: bool = False


class Stopped(_Message, frozen=True):
    """The worker was told to stop and has stopped; nothing follows."""


class Welcome(_Message, frozen=True):
    """Answer to Hello: what the worker is to run.

    Attributes:
        plan: in force.
        world: that the worker belongs to, if any.
        record: folder for event logs, if any.
        generation: how often this worker was started, from 1.
    """

    plan: Plan
    world: World | None = None
    record: str | None = None
    generation: int = 1


class Refused(_Message, frozen=True):
    """Answer to Hello or to an operator: no, and why."""

    reason: str


class Submit(_Message, frozen=True):
    """See :meth:`~jdserve.runtime.client.EngineClient.submit`."""

    instance: str
    request: Request
    prefix: tuple[bytes, ...]


class HandOff(_Message, frozen=True):
    """See :meth:`~jdserve.runtime.client.EngineClient.hand_off`."""

    instance: str
    request: Request
    source: str
    handles: tuple[KVHandle, ...]


class Cancel(_Message, frozen=True):
    """See :meth:`~jdserve.runtime.client.EngineClient.cancel`."""

    instance: str
    request_id: str


class Landed(_Message, frozen=True):
    """See :meth:`~jdserve.runtime.client.EngineClient.landed`."""

    instance: str
    request_id: str


class PlanChanged(_Message, frozen=True):
    """Instances were added or removed."""

    plan: Plan


class Alive(_Message, frozen=True):
    """Sign of life of the front door."""


class Stop(_Message, frozen=True):
    """End the process."""


class Drain(_Message, frozen=True):
    """An operator: empty an instance, then end its worker when that hosts nothing else."""

    instance: str


class Add(_Message, frozen=True):
    """An operator: start one more instance.

    Attributes:
        instance: its plan.
        worker: hosts it, and nothing else.
    """

    instance: Instance
    worker: Worker


class Done(_Message, frozen=True):
    """Answer to an operator: it is done."""


FromWorker = Hello | Starting | Up | News | Beat | Broken | Stopped
FromOperator = Drain | Add
ToWorker = Welcome | Refused | Submit | HandOff | Cancel | Landed | PlanChanged | Alive | Stop
ToOperator = Done | Refused

_encoder = msgspec.msgpack.Encoder()


def encode(message: FromWorker | FromOperator | ToWorker | ToOperator) -> bytes:
    """One frame."""
    return _encoder.encode(message)


to_front = msgspec.msgpack.Decoder(FromWorker | FromOperator)
"""Decodes what reaches the front door; raises ``msgspec.ValidationError`` or ``msgspec.DecodeError``."""

to_worker = msgspec.msgpack.Decoder(ToWorker)
"""Decodes what reaches a worker."""

to_operator = msgspec.msgpack.Decoder(ToOperator)
"""Decodes what reaches an operator."""
