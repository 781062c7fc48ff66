"""The transports of one worker, made when they are first needed."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jdserve.core.errors import TransferError
from jdserve.core.plan import Plan, TransportKind, Worker
from jdserve.runtime.hosts import address_of
from jdserve.runtime.spanning import TeamTransport
from jdserve.runtime.team import Team
from jdserve.runtime.wire import World
from jdserve.transfer.base import Transport
from jdserve.transfer.device_put import DevicePutTransport
from jdserve.transfer.local import LocalTransport
from jdserve.transfer.pull import PullTransport
from jdserve.transfer.shm import ShmTransport


def transport_maker(
    plan: Plan, worker: Worker, world: World | None, team: Team | None = None
) -> Callable[[TransportKind], Transport]:
    """Makes the transport of a kind for ``worker``; ``team`` where it leads an instance that spans processes."""
    checksums = plan.transfer_checksums

    def make(kind: TransportKind) -> Transport:
        match kind:
            case "local":
                return LocalTransport(checksums=checksums)
            case "shm":
                return ShmTransport(checksums=checksums)
            case "pull":
                pull = PullTransport(address_of(worker.host), jax.local_devices()[0], checksums=checksums)
                return pull if team is None else TeamTransport(pull, team)
            case "device_put":
                if world is None:
                    raise TransferError("device_put needs both workers in one world")
                return DevicePutTransport(address_of(worker.host), checksums=checksums)

    return make
