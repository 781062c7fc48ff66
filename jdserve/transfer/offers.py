"""What every transport does alike: offers with leases, waits with deadlines, checks of what has landed."""

from __future__ import annotations

import ipaddress
import math
import secrets
import threading
import time
import zlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax import Array

from jdserve.core.errors import TransferError
from jdserve.transfer.base import Landed, nothing
from jdserve.transfer.layout import KV_DTYPE_BYTES, KVHandle, KVLayout, KVPart, TransportKind
from jdserve.transfer.pieces import flat_shapes
from jdserve.transfer.reshard import plan_pieces

FIRST_POLL_S = 50e-6
LAST_POLL_S = 5e-4
"""A wait looks again after a sixtieth of what it has waited so far, within these bounds."""

Kept = TypeVar("Kept")


class Offers(Generic[Kept]):
    """What is kept for each offer until it is dropped or its lease ends.

    Args:
        clock: nanoseconds.
        end: frees what was kept; called once per offer, by the thread that found it to be over.
    """

    def __init__(self, clock: Callable[[], int], end: Callable[[Kept], None]) -> None:
        self._clock = clock
        self._end = end
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[int, Kept]] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    def deadline(self, lease_s: float) -> int:
        """Clock nanoseconds at which a lease that begins now ends."""
        return self._clock() + int(lease_s * 1e9)

    def add(self, handle: KVHandle, kept: Kept) -> None:
        """Keep something for ``handle`` until its deadline."""
        with self._lock:
            self._kept[handle.id] = (handle.deadline, kept)

    def find(self, id: int) -> Kept | None:
        """What is kept for an offer, None once it is over."""
        with self._lock:
            deadline, kept = self._kept.get(id, (0, None))
        return kept if deadline > self._clock() else None

    def drop(self, id: int) -> None:
        """End an offer; unknown ones are ignored."""
        with self._lock:
            over = self._kept.pop(id, None)
        if over is not None:
            self._end(over[1])

    def expire(self) -> None:
        """End the offers whose lease has ended."""
        now = self._clock()
        with self._lock:
            over = [id for id, (deadline, _) in self._kept.items() if deadline <= now]
        for id in over:
            self.drop(id)

    def clear(self) -> None:
        """End all offers."""
        with self._lock:
            over = list(self._kept)
        for id in over:
            self.drop(id)


def make_handle(
    kind: TransportKind,
    request_id: str,
    source: str,
    layout: KVLayout,
    destination: KVLayout,
    pages: int,
    deadline: int,
    *,
    address: str = "",
    parts: tuple[KVPart, ...] = (),
    checksums: tuple[int, ...] = (),
) -> KVHandle:
    """A handle with a fresh id; see there for the fields.

    Raises:
        TransferError: the layouts do not fit.
    """
    shapes = flat_shapes(plan_pieces(layout, destination), destination, pages)
    return KVHandle(
        id=secrets.randbits(64),
        request_id=request_id,
        source=source,
        layout=layout,
        destination=destination,
        pages=pages,
        bytes=sum(math.prod(shape) for shape in shapes) * KV_DTYPE_BYTES[destination.dtype],
        deadline=deadline,
        transport=kind,
        address=address,
        checksums=checksums,
        parts=parts,
    )


def checksums_of(pieces: Seq[tuple[Array, Array]]) -> tuple[int, ...]:
    """CRC-32 of each piece, keys then values; waits for them."""
    return tuple(zlib.crc32(raw(values).data, zlib.crc32(raw(keys).data)) for keys, values in pieces)


def check_handle(kind: TransportKind, handle: KVHandle, layout: KVLayout) -> None:
    """Check that ``handle`` is for this transport and layout; that the source fits is checked by the plan of pieces.

    Raises:
        TransferError: it is not.
    """
    if handle.transport != kind:
        raise TransferError(f"request {handle.request_id}: the KV is offered by {handle.transport}, not by {kind}")
    layout.check_same(handle.destination)


def gone(handle: KVHandle) -> TransferError:
    """The error of a pull that comes too late, or for nothing."""
    return TransferError(f"request {handle.request_id}: the KV offered by {handle.source} is gone")


class Wait:
    """The patience of one pull.

    Args:
        handle: that is pulled.
        timeout_s: from now.
        abandoned: whether nobody wants the KV any more.
    """

    def __init__(self, handle: KVHandle, timeout_s: float, abandoned: Callable[[], bool]) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        self._abandoned = abandoned
        self._deadline = time.monotonic() + timeout_s

    def check(self) -> None:
        """Raise if the wait is over.

        Raises:
            TransferError: the deadline has passed, or the pull is abandoned.
        """
        if self._abandoned():
            raise TransferError(f"request {self._handle.request_id}: the pull was abandoned")
        if time.monotonic() > self._deadline:
            raise TransferError(f"request {self._handle.request_id}: KV did not arrive within {self._timeout_s} s")

    def until(self, ready: Callable[[], bool]) -> None:
        """Poll ``ready``: nothing else has a deadline, and a producer that hangs must not take the consumer with it.

        Raises:
            TransferError: the deadline has passed, or the pull is abandoned.
        """
        started = time.monotonic()
        while not ready():
            self.check()
            waited = time.monotonic() - started
            time.sleep(min(max(waited / 60, FIRST_POLL_S), LAST_POLL_S))


def are_ready(arrays: Seq[Any]) -> bool:
    """Whether nothing computes or moves these arrays any more; they may have failed."""
    return all(array.is_ready() for array in arrays)


def land(handle: KVHandle, arrays: Seq[Array], wait: Wait, done: Callable[[], None] = nothing) -> Landed:
    """Wait for arrays that are on their way, keys and values of each piece in turn, and check what has come.

    Raises:
        TransferError: they did not come in time, the source or the link failed, or a checksum differs.
    """
    wait.until(lambda: are_ready(arrays))
    try:
        jax.block_until_ready(arrays)
    except jax.errors.JaxRuntimeError as error:
        raise TransferError(f"request {handle.request_id}: KV of {handle.source} was lost: {error}") from error
    pieces = list(zip(arrays[::2], arrays[1::2], strict=True))
    found = checksums_of(pieces) if handle.checksums else ()
    for index, (ours, sent) in enumerate(zip(found, handle.checksums, strict=True)):
        if ours != sent:
            raise TransferError(
                f"request {handle.request_id}: piece {index} of {len(pieces)} from {handle.source} changed on its way"
            )
    return Landed(pieces, handle.pages, handle.bytes, done)


def raw(array: Array) -> np.ndarray:
    """The bytes of an array on one device, without a copy where that is the host's memory; waits until it is ready."""
    return np.asarray(array).reshape(-1).view(np.uint8)


def check_host(host: str) -> None:
    """Check that a port without authentication may be bound to ``host``.

    Raises:
        ValueError: it is not the IPv4 address of one private interface.
    """
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        raise ValueError(f"host: must be an IPv4 address, got {host!r}") from None
    if address.is_unspecified or address.is_global or address.is_multicast:
        raise ValueError(f"host: KV has no authentication and binds to one private address only, not to {host}")
