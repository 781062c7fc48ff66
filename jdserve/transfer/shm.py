"""The transport between processes of one host on the CPU back end: one copy, from the pool into shared memory.

The life of an offer: the launcher thread takes a segment and asks the stages of the instance for its pieces; each of
them, on its own thread, copies them there as soon as its pool is computed, while later stages still compute theirs; a
consumer maps the segment, and its arrays *are* that memory, since jax borrows aligned host buffers on CPU. The consumer
holds the segment until :attr:`~jdserve.transfer.base.Landed.done`; until then it is not reused, whatever the producer
does. See ``segments.py``.

Both processes need one user and one process namespace.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jdserve.transfer.base import KVPages, Landed, Shards, never
from jdserve.transfer.layout import KV_DTYPE_BYTES, KVHandle, KVLayout, TransportKind
from jdserve.transfer.offers import Offers, Wait, check_handle, gone, land, make_handle
from jdserve.transfer.pieces import flat_devices, flat_shapes
from jdserve.transfer.reading import pool_checksum, read_piece
from jdserve.transfer.reshard import Piece, plan_pieces
from jdserve.transfer.segments import Mappings, Reading, Segment, SegmentPool, State, place

KEEP_BYTES = 1 << 30
"""Free shared memory that a producer keeps for its next offers."""


class _Parked:
    """Pieces on their way into a segment. The offer and each stage hold it; whoever ends last frees the segment.

    Args:
        id: of the offer.
        segment: to fill.
        pieces: all of them, with the views of keys and values in the segment that they go to.
        sums: view of the checksums in the segment, one per piece; None where there are none.
        free: takes the segment.
    """

    def __init__(
        self,
        id: int,
        segment: Segment,
        pieces: Seq[tuple[Piece, np.ndarray, np.ndarray]],
        sums: np.ndarray | None,
        free: Callable[[Segment], None],
    ) -> None:
        self._id = id
        self._segment = segment
        self._pieces = pieces
        self._sums = sums
        self._free = free
        self._lock = threading.Lock()
        self._stages = len({piece.source[0] for piece, _, _ in pieces})
        self._state = State.READY
        self._over = False
        segment.mark(id, State.WRITING)

    def take(self, stage: int, shards: Shards, pages: Seq[int]) -> None:
        """Copy the pieces of one stage; see :data:`~jdserve.transfer.base.Take`."""
        for index, (piece, *views) in enumerate(self._pieces):
            if piece.source[0] != stage:
                continue
            read_piece(piece, shards, pages, views, lambda: self._over)
            if self._sums is not None:
                self._sums[index] = pool_checksum(piece, shards, pages)
        self._stage_ended(State.READY)

    def failed(self) -> None:
        """A stage cannot give its pieces."""
        self._stage_ended(State.FAILED)

    def end(self) -> None:
        """The offer is over."""
        with self._lock:
            self._over = True
            free = not self._stages
        if free:
            self._free(self._segment)

    def _stage_ended(self, state: State) -> None:
        with self._lock:
            self._state = max(self._state, state)
            self._stages -= 1
            if self._stages:
                return
            self._pieces, self._sums = (), None
            self._segment.mark(self._id, State.FAILED if self._over else self._state)
            free = self._over
        if free:
            self._free(self._segment)


class ShmTransport:
    """Between processes of one host; see :class:`~jdserve.transfer.base.Transport`, and the module.

    Args:
        clock: nanoseconds, the same one that the instances of this process use.
        checksums: have pieces carry them in the segment; both ends need the same.
        keep_bytes: most bytes of free segments that are kept for reuse.
    """

    kind: TransportKind = "shm"
    reads = True

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

    def offer(self, request_id: str, source: str, pages: KVPages, destination: KVLayout, lease_s: float) -> KVHandle:
        """Have the pieces that ``destination`` wants copied into a segment.

        Raises:
            TransferError: the layouts do not fit.
            OSError: the system gives no more memory files.
        """
        self._settle()
        pieces = plan_pieces(pages.layout, destination)
        shapes, offsets, end = self._arrange(pieces, destination, pages.pages)
        segment = self.segments.take(end)
        memory = segment.memory()
        views = _views(memory, shapes, offsets, destination)
        handle = make_handle(
            self.kind,
            request_id,
            source,
            pages.layout,
            destination,
            pages.pages,
            self._offers.deadline(lease_s),
            address=segment.address,
        )
        sums = self._sums(memory, offsets, len(pieces))
        into = list(zip(pieces, views[::2], views[1::2], strict=True))
        parked = _Parked(handle.id, segment, into, sums, self.segments.give)
        self._offers.add(handle, parked)
        pages.read(parked.take, parked.failed)
        return handle

    def _arrange(self, pieces: Seq[Piece], layout: KVLayout, pages: int) -> tuple[Seq[tuple[int, ...]], Seq[int], int]:
        """Shapes of the arrays of the pieces, their offsets in a segment, checksums at the end, and its bytes."""
        shapes = flat_shapes(pieces, layout, pages)
        sizes = [math.prod(shape) * KV_DTYPE_BYTES[layout.dtype] for shape in shapes]
        offsets, end = place([*sizes, 4 * len(pieces)] if self._checksums else sizes)
        return shapes, offsets, end

    def _sums(self, memory: np.ndarray, offsets: Seq[int], pieces: int) -> np.ndarray | None:
        return memory[offsets[-1] : offsets[-1] + 4 * pieces].view(np.uint32) if self._checksums else None

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
        self._settle()
        check_handle(self.kind, handle, layout)
        try:
            reading = Reading(handle.address)
        except OSError as error:
            raise gone(handle) from error
        try:
            return self._read(handle, layout, meshes, wait, reading)
        except BaseException:
            self._end(reading)
            raise

    def _read(self, handle: KVHandle, layout: KVLayout, meshes: Seq[Mesh], wait: Wait, reading: Reading) -> Landed:
        pieces = plan_pieces(handle.layout, layout)
        shapes, offsets, end = self._arrange(pieces, layout, handle.pages)
        if reading.header()[0] != handle.id or reading.size < end:
            raise gone(handle)
        memory = self.mappings.memory(reading)
        views = _views(memory, shapes, offsets, layout)
        places = [SingleDeviceSharding(device) for device in flat_devices(pieces, meshes)]
        moved = jax.device_put(views, places)  # costs as much as a MiB: better while the pieces are on their way
        wait.until(lambda: reading.header()[1] != State.WRITING or not reading.alive())
        if reading.header()[1] != State.READY:
            raise gone(handle)
        if any(array.unsafe_buffer_pointer() != view.ctypes.data for array, view in zip(moved, views, strict=True)):
            moved = jax.device_put(views, places)  # it was a copy, of what was there before
        sums = self._sums(memory, offsets, len(pieces))
        if sums is not None:
            handle = msgspec.structs.replace(handle, checksums=tuple(sums.tolist()))
        return land(handle, moved, wait, functools.partial(self._end, reading))

    def _end(self, reading: Reading) -> None:
        """Nothing is read any more. To look for dead producers takes as long as to copy a MiB: nobody waits here."""
        reading.close()
        self.mappings.sweep()

    def release(self, handle: KVHandle) -> None:
        """Drop the copy; unknown handles are ignored."""
        self.expire()
        self._offers.drop(handle.id)

    def expire(self) -> None:
        """Free what offers hold whose lease has ended, and what nobody reads any more."""
        self._settle()
        self.mappings.sweep()

    def _settle(self) -> None:
        self._offers.expire()
        self.segments.settle()

    def close(self) -> None:
        """Free everything; what has landed elsewhere stays readable there."""
        self._offers.clear()
        self.segments.close()
        self.mappings.clear()

    @property
    def offers(self) -> int:
        """Copies that wait for their pull or their release."""
        return len(self._offers)


def _views(memory: np.ndarray, shapes: Seq[tuple[int, ...]], offsets: Seq[int], layout: KVLayout) -> list[np.ndarray]:
    """The arrays of the pieces, in a segment."""
    dtype = jnp.dtype(layout.dtype)
    return [
        memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        for shape, offset in zip(shapes, offsets, strict=False)
    ]
