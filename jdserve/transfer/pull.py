"""The transport between any processes and hosts: ``jax.experimental.transfer``.

Its wire checks nothing, knows no deadline and no lease, and keeps an offered array until somebody pulls it. So the
layouts are checked here, a pull polls against its own deadline, and an offer that is over has its arrays deleted, after
which a late pull fails. An id that the source does not know is answered by nothing at all: such a pull ends at its
deadline. There is no authentication either: the port belongs on a private network.

Where an instance spans processes each of them has a transport of its own. Every process of the source keeps its parts
of an offer under ids that one of them chose, and every process of the destination pulls those that are meant for it;
a pull that comes before its offer waits for it.
"""

from __future__ import annotations

import functools
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import Array
from jax.experimental import transfer
from jax.sharding import Mesh, SingleDeviceSharding

from jdserve.compat import Device
from jdserve.core.errors import TransferError
from jdserve.ops.host import aligned
from jdserve.transfer.base import KVCopy, KVPages, Landed, Shards, never
from jdserve.transfer.layout import KVHandle, KVLayout, KVPart, TransportKind
from jdserve.transfer.offers import Offers, Wait, check_handle, check_host, checksums_of, land, make_handle
from jdserve.transfer.pieces import cut, flat, flat_devices, flat_shapes, pieces_here
from jdserve.transfer.reading import read_piece
from jdserve.transfer.reshard import Piece, plan_pieces, shipments

PARALLEL_COPIES = 4
COPY_BYTES = 2 << 20
STREAMS = 3
"""Twice as fast as the defaults: 1.4 instead of 0.6 GiB/s over loopback."""

CONNECT_S = 5.0
"""Longest wait for a peer to accept a connection."""


class PullTransport:
    """Between any processes; see :class:`~jdserve.transfer.base.Transport`, and the module.

    Attributes:
        address: that it listens on.

    Args:
        host: IPv4 address of the private interface to listen on; the system chooses the port.
        device: any of the process's own devices.
        clock: nanoseconds, the same one that the instances of this process use.
        checksums: have offers carry them.

    Raises:
        ValueError: ``host`` is not one private address.
    """

    kind: TransportKind = "pull"

    def __init__(
        self,
        host: str,
        device: Device,
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        checksums: bool = False,
    ) -> None:
        check_host(host)
        self._device = device
        self._checksums = checksums
        # Checksums travel with the handle, so they are computed before there is one.
        self.reads = device.platform == "cpu" and not checksums
        # One address per stream of data; with none at all, the source of the first pull would abort.
        self._server: Any = transfer.start_transfer_server(
            device.client,
            f"{host}:0",
            [f"{host}:0"] * STREAMS,
            max_num_parallel_copies=PARALLEL_COPIES,
            transfer_size=COPY_BYTES,
        )
        self.address: str = self._server.address()
        self._lock = threading.Lock()
        self._connections: dict[str, Any] = {}
        self._holders: Counter[int] = Counter()
        self._offers: Offers[Callable[[], None]] = Offers(clock, lambda end: end())

    def offer(self, request_id: str, source: str, pages: KVPages, destination: KVLayout, lease_s: float) -> KVHandle:
        """Have the server wait for the pull of the pieces that ``destination`` wants.

        They are cut out of the copy, or read out of the pools: a stage's as soon as it has computed.

        Raises:
            TransferError: the layouts do not fit.
        """
        self.expire()
        pieces = plan_pieces(pages.layout, destination)
        parts = make_parts(pages.layout, destination, [self.address])
        copied = None if self.reads else cut(pages.copy(), pieces)
        handle = make_handle(
            self.kind,
            request_id,
            source,
            pages.layout,
            destination,
            pages.pages,
            self._offers.deadline(lease_s),
            address=self.address,
            parts=parts if len(parts) > 1 or destination.processes else (),
            checksums=checksums_of(copied) if copied and self._checksums else (),
        )
        if copied is not None:
            self._keep(handle, dict(enumerate(copied)))
            return handle
        leaving = _Leaving(handle, pieces, self._device, self._server.await_pull)
        self._offers.add(handle, leaving.end)
        pages.read(leaving.take, leaving.end)
        return handle

    def keep(self, handle: KVHandle, copy: KVCopy, process: int) -> None:
        """Offer what this process has of the copy that ``handle`` stands for.

        Args:
            handle: with the deadline by the clock of this process.
            copy: of which this process has some devices.
            process: number of this process in the instance.
        """
        self.expire()
        plan = plan_pieces(copy.layout, handle.destination)
        here = {index: piece for index, piece in enumerate(plan) if copy.layout.process(*piece.source) == process}
        self._keep(handle, dict(zip(here, cut(copy, list(here.values())), strict=True)))

    def _keep(self, handle: KVHandle, pieces: dict[int, tuple[Array, Array]]) -> None:
        arrays = flat(list(pieces.values()))
        with self._lock:
            # A piece that is a whole shard is in every offer of the copy that wants it whole.
            self._holders.update({id(array) for array in arrays})
        self._offers.add(handle, functools.partial(self._end, arrays))
        for part in _parts(handle, len(pieces)):
            if part.pieces[0] in pieces:
                self._server.await_pull(part.id, flat([pieces[index] for index in part.pieces]))

    def pull(
        self,
        handle: KVHandle,
        layout: KVLayout,
        meshes: Seq[Mesh],
        timeout_s: float,
        abandoned: Callable[[], bool] = never,
    ) -> Landed:
        """Pull every piece whose destination is in this process onto its device and wait until all are there.

        Raises:
            TransferError: the source is dead, has deleted the pieces or does not send them within ``timeout_s`` (it may
                not know the handle), the layouts do not fit, or nobody wants them.
        """
        wait = Wait(handle, timeout_s, abandoned)
        self.expire()
        check_handle(self.kind, handle, layout)
        pieces = plan_pieces(handle.layout, layout)
        here = pieces_here(pieces, meshes)
        parts = [part for part in _parts(handle, len(pieces)) if part.pieces[0] in here]
        connections = {part.address: self._connect(handle, part.address, timeout_s) for part in parts}
        moving: dict[int, Seq[Array]] = {}
        try:
            for part in parts:
                mine = [here[index] for index in part.pieces]
                shapes, devices = flat_shapes(mine, layout, handle.pages), flat_devices(mine, meshes)
                wanted = [
                    jax.ShapeDtypeStruct(shape, jnp.dtype(layout.dtype), sharding=SingleDeviceSharding(device))
                    for shape, device in zip(shapes, devices, strict=True)
                ]
                try:
                    arrays = connections[part.address].pull(part.id, wanted)
                except (RuntimeError, ValueError) as error:
                    raise TransferError(
                        f"request {handle.request_id}: pulling from {handle.source}: {error}"
                    ) from error
                moving |= {index: arrays[2 * at : 2 * at + 2] for at, index in enumerate(part.pieces)}
            sums = tuple(handle.checksums[index] for index in sorted(moving)) if handle.checksums else ()
            in_order = [array for index in sorted(moving) for array in moving[index]]
            return land(msgspec.structs.replace(handle, checksums=sums), in_order, wait)
        except TransferError:
            # A connection whose peer died stays dead, also when the peer is back; a new one costs little.
            with self._lock:
                for address, connection in connections.items():
                    if self._connections.get(address) is connection:
                        del self._connections[address]
            raise

    def release(self, handle: KVHandle) -> None:
        """Drop the copy; unknown handles are ignored."""
        self.expire()
        self._offers.drop(handle.id)

    def expire(self) -> None:
        """Free what offers hold whose lease has ended."""
        self._offers.expire()

    def close(self) -> None:
        """Free everything and close the port."""
        self._offers.clear()
        with self._lock:
            self._connections.clear()
        self._server = None

    @property
    def offers(self) -> int:
        """Copies that wait for their pull or their release."""
        return len(self._offers)

    def _connect(self, handle: KVHandle, address: str, timeout_s: float) -> Any:
        with self._lock:
            connection = self._connections.get(address)
        if connection is not None:
            return connection
        host, _, port = address.rpartition(":")
        try:
            # The library would wait for a dead address for ever.
            socket.create_connection((host, int(port)), min(timeout_s, CONNECT_S)).close()
        except (OSError, ValueError) as error:
            raise TransferError(
                f"request {handle.request_id}: {handle.source} does not listen on {address}: {error}"
            ) from error
        connection = self._server.connect(address)
        with self._lock:
            return self._connections.setdefault(address, connection)

    def _end(self, arrays: list[Array]) -> None:
        """Delete the arrays that no other offer needs: the server keeps a reference to what nobody has pulled."""
        for array in {id(array): array for array in arrays}.values():
            with self._lock:
                self._holders[id(array)] -= 1
                last = not self._holders[id(array)]
                if last:
                    del self._holders[id(array)]
            if last:
                array.delete()


class _Leaving:
    """Pieces of one offer that are read out of the pools: those of a stage go to the server as soon as it has computed.

    Attributes:
        sent: arrays that the server has.

    Args:
        handle: of the offer.
        pieces: all of them.
        device: that the arrays are on.
        send: has the server wait for the pull of a part.
    """

    def __init__(
        self, handle: KVHandle, pieces: Seq[Piece], device: Device, send: Callable[[int, list[Array]], None]
    ) -> None:
        self._handle = handle
        self._pieces = pieces
        self._device = device
        self._send: Callable[[int, list[Array]], None] | None = send  # None once the offer is over
        self._lock = threading.Lock()
        self._waiting = list(_parts(handle, len(pieces)))
        self.sent: list[Array] = []

    def take(self, stage: int, shards: Shards, pages: Seq[int]) -> None:
        """Send the pieces of one stage; see :data:`~jdserve.transfer.base.Take`."""
        for part in [part for part in self._waiting if self._pieces[part.pieces[0]].source[0] == stage]:
            memory = self._memory(part)
            for index, *into in zip(part.pieces, memory[::2], memory[1::2], strict=True):
                read_piece(self._pieces[index], shards, pages, into, lambda: self._send is None)
            with self._lock:
                if self._send is not None:
                    self._waiting.remove(part)
                    arrays = jax.device_put(memory, self._device)
                    self._send(part.id, arrays)
                    self.sent += arrays

    def end(self) -> None:
        """The offer is over, or a stage cannot give its pieces: whoever pulls what has not been sent gets an error."""
        with self._lock:
            send, self._send = self._send, None  # a thread that still reads must not keep a closed server alive
            if send is not None:
                for part in self._waiting:
                    send(part.id, [])
            for array in self.sent:
                array.delete()

    def _memory(self, part: KVPart) -> list[np.ndarray]:
        shapes = flat_shapes(
            [self._pieces[index] for index in part.pieces], self._handle.destination, self._handle.pages
        )
        return [aligned(shape, jnp.dtype(self._handle.destination.dtype)) for shape in shapes]


def make_parts(source: KVLayout, destination: KVLayout, addresses: Seq[str]) -> tuple[KVPart, ...]:
    """The parts of an offer, with fresh ids; ``addresses`` are those of the source's processes.

    Raises:
        TransferError: the layouts do not fit.
    """
    return tuple(
        KVPart(secrets.randbits(64), addresses[process], pieces)
        for (process, _, _), pieces in shipments(source, destination).items()
    )


def _parts(handle: KVHandle, pieces: int) -> tuple[KVPart, ...]:
    return handle.parts or (KVPart(handle.id, handle.address, tuple(range(pieces))),)
