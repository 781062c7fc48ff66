"""The transport between instances of one process: pieces move by one batched ``device_put``."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import jax
from jax import Array
from jax.sharding import Mesh, SingleDeviceSharding

from jdserve.transfer.base import KVPages, Landed, never
from jdserve.transfer.layout import KVHandle, KVLayout, TransportKind
from jdserve.transfer.offers import Offers, Wait, check_handle, checksums_of, gone, land, make_handle
from jdserve.transfer.pieces import cut, flat, flat_devices
from jdserve.transfer.reshard import plan_pieces


class LocalTransport:
    """Inside one process; see :class:`~jdserve.transfer.base.Transport`.

    Args:
        clock: nanoseconds, the same one that the instances use.
        checksums: have offers carry them.
    """

    kind: TransportKind = "local"
    reads = False

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns, *, checksums: bool = False) -> None:
        self._checksums = checksums
        self._offers: Offers[list[Array]] = Offers(clock, lambda _: None)

    def offer(self, request_id: str, source: str, pages: KVPages, destination: KVLayout, lease_s: float) -> KVHandle:
        """Cut the pieces that ``destination`` wants out of the copy and keep them until released or expired.

        Raises:
            TransferError: the layouts do not fit.
        """
        self.expire()
        copy = pages.copy()
        pieces = cut(copy, plan_pieces(copy.layout, destination))
        handle = make_handle(
            self.kind,
            request_id,
            source,
            copy.layout,
            destination,
            copy.pages,
            self._offers.deadline(lease_s),
            checksums=checksums_of(pieces) if self._checksums else (),
        )
        self._offers.add(handle, flat(pieces))
        return handle

    def pull(
        self,
        handle: KVHandle,
        layout: KVLayout,
        meshes: Seq[Mesh],
        timeout_s: float,
        abandoned: Callable[[], bool] = never,
    ) -> Landed:
        """Put every piece onto its destination device and wait until all are there.

        Raises:
            TransferError: the handle is unknown or its lease has ended, the layouts do not fit, the pieces did not
                arrive within ``timeout_s``, or nobody wants them.
        """
        wait = Wait(handle, timeout_s, abandoned)
        self.expire()
        check_handle(self.kind, handle, layout)
        arrays = self._offers.find(handle.id)
        if arrays is None:
            raise gone(handle)
        devices = flat_devices(plan_pieces(handle.layout, layout), meshes)
        moved = jax.device_put(arrays, [SingleDeviceSharding(device) for device in devices])
        return land(handle, moved, wait)

    def release(self, handle: KVHandle) -> None:
        """Drop the copy; unknown handles are ignored."""
        self.expire()
        self._offers.drop(handle.id)

    def expire(self) -> None:
        """Free what offers hold whose lease has ended."""
        self._offers.expire()

    def close(self) -> None:
        """Free everything."""
        self._offers.clear()

    @property
    def offers(self) -> int:
        """Copies that wait for their pull or their release."""
        return len(self._offers)
