"""The transport between instances of one process: pieces move by one batched ``device_put``."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import jax
from jax import Array
from jax.sharding import Mesh, SingleDeviceSharding

from jdserve.core.errors import TransferError
from jdserve.transfer.base import KVCopy, Landed
from jdserve.transfer.layout import KVHandle, KVLayout
from jdserve.transfer.pieces import cut, destination_device
from jdserve.transfer.reshard import plan_pieces

POLL_S = 0.0005
"""How often a waiting pull looks whether its pieces are there."""


@dataclass
class _Offer:
    pieces: Seq[tuple[Array, Array]]
    pages: int
    deadline: int


class LocalTransport:
    """``offer``, ``pull`` and ``release`` inside one process; see :class:`~jdserve.transfer.base.Transport`.

    Args:
        clock: nanoseconds, the same one that the instances use.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._offers: dict[int, _Offer] = {}

    def offer(self, request_id: str, source: str, copy: KVCopy, destination: KVLayout, lease_s: float) -> KVHandle:
        """Cut the pieces that ``destination`` wants out of the copy and keep them until pulled, released or expired.

        Raises:
            TransferError: the layouts do not fit.
        """
        pieces = cut(copy, plan_pieces(copy.layout, destination))
        now = self._clock()
        handle = KVHandle(
            id=secrets.randbits(64),
            request_id=request_id,
            source=source,
            layout=copy.layout,
            destination=destination,
            pages=copy.pages,
            bytes=sum(keys.nbytes + values.nbytes for keys, values in pieces),
            deadline=now + int(lease_s * 1e9),
        )
        with self._lock:
            self._offers = {id: offer for id, offer in self._offers.items() if offer.deadline > now}
            self._offers[handle.id] = _Offer(pieces, copy.pages, handle.deadline)
        return handle

    def pull(self, handle: KVHandle, layout: KVLayout, meshes: Seq[Mesh], timeout_s: float) -> Landed:
        """Put every piece onto its destination device and wait until all are there.

        Raises:
            TransferError: the handle is unknown or its lease has ended, the layouts do not fit, or the pieces did not
                arrive within ``timeout_s``.
        """
        with self._lock:
            offer = self._offers.get(handle.id)
        if offer is None or offer.deadline <= self._clock():
            raise TransferError(f"request {handle.request_id}: the KV offered by {handle.source} is gone")
        layout.check_same(handle.destination)
        pieces = plan_pieces(handle.layout, layout)
        targets = [SingleDeviceSharding(destination_device(piece, meshes)) for piece in pieces]
        flat = [array for pair in offer.pieces for array in pair]
        moved = jax.device_put(flat, [target for target in targets for _ in range(2)])
        # block_until_ready has no deadline, and a producer that hangs must not take the consumer with it.
        deadline = time.monotonic() + timeout_s
        while not all(array.is_ready() for array in moved):
            if time.monotonic() > deadline:
                raise TransferError(f"request {handle.request_id}: KV did not arrive within {timeout_s} s")
            time.sleep(POLL_S)
        return Landed(list(zip(moved[::2], moved[1::2], strict=True)), offer.pages, handle.bytes)

    def release(self, handle: KVHandle) -> None:
        """Drop the copy; unknown handles are ignored."""
        with self._lock:
            self._offers.pop(handle.id, None)

    @property
    def offers(self) -> int:
        """Copies that wait for their pull."""
        with self._lock:
            return len(self._offers)
