"""The transport between processes of one host on the CPU back end: one copy, into shared memory.

The life of an offer: the launcher thread cuts the pieces and takes a segment; the copier thread waits for the pieces
and copies them there; a consumer maps the segment, and its arrays *are* that memory, since jax borrows aligned host
buffers on CPU. The consumer holds the segment until :attr:`~jdserve.transfer.base.Landed.done`; until then it is not
reused, whatever the producer does. See ``segments.py``.

Both processes need one user and one process namespace.
"""

from __future__ import annotations

import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, SingleDeviceSharding

from jdserve.transfer.base import KVCopy, Landed, never
from jdserve.transfer.layout import KV_DTYPE_BYTES, KVHandle, KVLayout, TransportKind
from jdserve.transfer.offers import Offers, Wait, are_ready, check_handle, gone, land, make_handle, raw
from jdserve.transfer.pieces import cut, flat, flat_devices, flat_shapes
from jdserve.transfer.reshard import plan_pieces
from jdserve.transfer.segments import Mappings, Reading, Segment, SegmentPool, State, place

logger = logging.getLogger(__name__)

KEEP_BYTES = 1 << 30
"""Free shared memory that a producer keeps for its next offers."""

COPIER_POLL_S = 5e-4
"""How often the copier looks whether pieces are computed."""


class _Parked:
    """Pieces on their way into a segment. Offer and copier both hold it; whoever ends last frees the segment."""

    def __init__(self, id: int, segment: Segment, arrays: Seq[Array], free: Callable[[Segment], None]) -> None:
        self.arrays = arrays
        self.over = False
        self._id = id
        self._segment = segment
        self._free = free
        self._lock = threading.Lock()
        self._copied = False
        segment.mark(id, State.WRITING)

    def ready(self) -> bool:
        """Whether the copier can go on without waiting."""
        return self.over or are_ready(self.arrays)

    def copy(self) -> None:
        """Fill the segment; on the copier thread, once."""
        state = State.FAILED
        try:
            memory = self._segment.memory()
            for array, offset in zip(self.arrays, place([array.nbytes for array in self.arrays])[0], strict=True):
                if self.over:
                    break
                np.copyto(memory[offset : offset + array.nbytes], raw(array))
            else:
                state = State.READY
        except Exception:
            logger.exception("KV could not be copied into shared memory")
        self.arrays = ()
        with self._lock:
            self._segment.mark(self._id, state)
            self._copied = True
            free = self.over
        if free:
            self._free(self._segment)

    def end(self) -> None:
        """The offer is over."""
        with self._lock:
            self.over = True
            free = self._copied
        if free:
            self._free(self._segment)


class ShmTransport:
    """Between processes of one host; see :class:`~jdserve.transfer.base.Transport`, and the module.

    Args:
        clock: nanoseconds, the same one that the instances of this process use.
        checksums: have offers carry them.
        keep_bytes: most bytes of free segments that are kept for reuse.
    """

    kind: TransportKind = "shm"

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        checksums: bool = False,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        if sys.platform != "linux":
            raise OSError(f"shm: KV in shared memory needs Linux, this is {sys.platform}")
        self._checksums = checksums
        self.segments = SegmentPool(keep_bytes)
        self.mappings = Mappings()
        self._offers: Offers[_Parked] = Offers(clock, _Parked.end)
        self._to_copy: queue.SimpleQueue[_Parked | None] = queue.SimpleQueue()
        self._copier = threading.Thread(target=self._copy, name="kv-copier", daemon=True)
        self._copier.start()

    def offer(self, request_id: str, source: str, copy: KVCopy, destination: KVLayout, lease_s: float) -> KVHandle:
        """Cut the pieces that ``destination`` wants and have them copied into a segment.

        Raises:
            TransferError: the layouts do not fit.
            OSError: the system gives no more memory files.
        """
        self.expire()
        pieces = cut(copy, plan_pieces(copy.layout, destination))
        arrays = flat(pieces)
        segment = self.segments.take(place([array.nbytes for array in arrays])[1])
        handle = make_handle(
            self.kind,
            request_id,
            source,
            copy,
            destination,
            pieces,
            self._offers.deadline(lease_s),
            address=segment.address,
            with_checksums=self._checksums,
        )
        parked = _Parked(handle.id, segment, arrays, self.segments.give)
        self._offers.add(handle, parked)
        self._to_copy.put(parked)
        return handle

    def pull(
        self,
        handle: KVHandle,
        layout: KVLayout,
        meshes: Seq[Mesh],
        timeout_s: float,
        abandoned: Callable[[], bool] = never,
    ) -> Landed:
        """Map the segment, wait until it is filled, and let every destination device borrow its pieces.

        Raises:
            TransferError: the offer is unknown, released or expired, its process has died, the layouts do not fit, the
                source failed, the pieces were not there within ``timeout_s``, or nobody wants them.
        """
        wait = Wait(handle, timeout_s, abandoned)
        self.expire()
        check_handle(self.kind, handle, layout)
        try:
            reading = Reading(handle.address)
        except OSError as error:
            raise gone(handle) from error
        try:
            return self._read(handle, layout, meshes, wait, reading)
        except BaseException:
            reading.close()
            raise

    def _read(self, handle: KVHandle, layout: KVLayout, meshes: Seq[Mesh], wait: Wait, reading: Reading) -> Landed:
        pieces = plan_pieces(handle.layout, layout)
        shapes = flat_shapes(pieces, layout, handle.pages)
        sizes = [math.prod(shape) * KV_DTYPE_BYTES[layout.dtype] for shape in shapes]
        offsets, end = place(sizes)
        if reading.header()[0] != handle.id or reading.size < end:
            raise gone(handle)
        memory = self.mappings.memory(reading)
        wait.until(lambda: reading.header()[1] != State.WRITING or not reading.alive())
        if reading.header()[1] != State.READY:
            raise gone(handle)
        views = [
            memory[offset : offset + size].view(jnp.dtype(layout.dtype)).reshape(shape)
            for offset, size, shape in zip(offsets, sizes, shapes, strict=True)
        ]
        moved = jax.device_put(views, [SingleDeviceSharding(device) for device in flat_devices(pieces, meshes)])
        return land(handle, moved, wait, reading.close)

    def release(self, handle: KVHandle) -> None:
        """Drop the copy; unknown handles are ignored."""
        self.expire()
        self._offers.drop(handle.id)

    def expire(self) -> None:
        """Free what offers hold whose lease has ended, and what nobody reads any more."""
        self._offers.expire()
        self.segments.settle()
        self.mappings.sweep()

    def close(self) -> None:
        """Free everything; what has landed elsewhere stays readable there."""
        self._offers.clear()
        self._to_copy.put(None)
        self._copier.join()
        self.segments.close()
        self.mappings.clear()

    @property
    def offers(self) -> int:
        """Copies that wait for their pull or their release."""
        return len(self._offers)

    def _copy(self) -> None:
        waiting: list[_Parked] = []
        stop = False
        while waiting or not stop:
            try:
                parked = self._to_copy.get(timeout=COPIER_POLL_S if waiting else None)
                if parked is None:
                    stop = True  # what still waits is over, so this does not take long
                else:
                    waiting.append(parked)
            except queue.Empty:
                pass
            ready = [parked for parked in waiting if parked.ready()]
            waiting = [parked for parked in waiting if parked not in ready]
            for parked in ready:
                parked.copy()
