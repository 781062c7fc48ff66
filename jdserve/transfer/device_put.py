"""The transport across the two processes of one ``jax.distributed`` world: ``device_put`` over NCCL, ICI or sockets.

A world is a lockstep unit of one prefill process and one decode process: each of the two takes part in each put, in
the same order. So the consumer pulls one request at a time. It asks the source, over a socket of their own, whether the
pieces are computed, and only when they are it says "go", and both put piece after piece.

Limits:

- Two processes exactly. With a third one that takes no part, the next put of all would wait for ever.
- The death of one takes the other with it; start both again on another port.
- A deadline, or a consumer that abandons its pull, ends it until "go" is said; after that the puts are made to their
  end in the background, because a skipped one would break the order.
- One put per piece: a batched put between several devices exchanges the arrays of a batch at random.
- Devices are paired one to one, so the degrees of the two instances are free.
- On CPU both processes need a fixed socket address before jax starts; see :func:`join_world`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal

import jax
import jax.numpy as jnp
import msgspec
import zmq
from jax import Array
from jax.sharding import Mesh, SingleDeviceSharding

from jdserve.compat import Device
from jdserve.transfer.base import KVPages, Landed, never
from jdserve.transfer.layout import KVHandle, KVLayout, TransportKind
from jdserve.transfer.offers import (
    Offers,
    Wait,
    are_ready,
    check_handle,
    check_host,
    checksums_of,
    gone,
    land,
    make_handle,
)
from jdserve.transfer.pieces import cut, flat, flat_devices, flat_shapes
from jdserve.transfer.reshard import plan_pieces

logger = logging.getLogger(__name__)

STOP_POLL_MS = 50
"""How often the thread that puts looks whether the transport is being closed."""

RETRY_S = 0.001
"""How often the consumer asks for pieces that are not computed yet."""


class _Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ask"):
    """Can the pieces of an offer be put onto these devices (ids, one per array)?"""

    id: int
    devices: tuple[int, ...]


class _Go(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="go"):
    """Put what was asked for last."""


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of a message; ``devices`` (ids, one per array) is where ready pieces are."""

    state: Literal["ready", "computing", "gone", "putting"]
    devices: tuple[int, ...] = ()


_decode_request = msgspec.msgpack.Decoder(_Ask | _Go).decode
_decode_answer = msgspec.msgpack.Decoder(_Answer).decode


def join_world(coordinator: str, process_id: int, transfer: str | None = None, *, num_processes: int = 2) -> None:
    """Start this process's part of a world, and its devices; waits for the other processes.

    Call it before anything else touches jax's devices.

    Args:
        coordinator: ``host:port`` that process 0 listens on.
        process_id: from 0.
        transfer: ``host:port`` of this process for data between CPU devices, None on other platforms.
        num_processes: in the world.

    Raises:
        ValueError: ``transfer`` has no fixed port, or a host that is not one private address.
        RuntimeError: jax's devices are in use already.
    """
    if transfer is not None:
        host, _, port = transfer.rpartition(":")
        check_host(host)
        if not port.isdecimal() or int(port) == 0:
            raise ValueError(f"transfer: needs a fixed port, got {transfer!r}")
        jax.config.update("jax_cross_host_transfer_socket_address", transfer)
    # With its preemption service jax would take over SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(coordinator, num_processes=num_processes, process_id=process_id)
    jax.devices()  # exchanges what each process has, so it must not be left to the first use


class DevicePutTransport:
    """Between the two processes of a world; see :class:`~jdserve.transfer.base.Transport`, and the module.

    Args:
        host: IPv4 address of the private interface to listen on for the other process; the system chooses the port.
        clock: nanoseconds, the same one that the instances of this process use.
        checksums: have offers carry them.

    Raises:
        ValueError: ``host`` is not one private address.
    """

    kind: TransportKind = "device_put"
    reads = False

    def __init__(self, host: str, clock: Callable[[], int] = time.monotonic_ns, *, checksums: bool = False) -> None:
        check_host(host)
        self._checksums = checksums
        self._offers: Offers[list[Array]] = Offers(clock, lambda _: None)
        self._pulling = threading.Lock()
        self._context = zmq.Context()
        self._listener = self._context.socket(zmq.REP)
        self._address = f"tcp://{host}:{self._listener.bind_to_random_port(f'tcp://{host}')}"
        self._stop = threading.Event()
        self._putter = threading.Thread(target=self._serve, name="kv-putter", daemon=True)
        self._putter.start()

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
            address=self._address,
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
        """Take part in the puts of every piece onto its destination device and wait until all are there.

        Raises:
            TransferError: the source does not know the offer or does not answer, the layouts do not fit, the pieces did
                not arrive within ``timeout_s``, or nobody wants them.
        """
        wait = Wait(handle, timeout_s, abandoned)
        self.expire()
        check_handle(self.kind, handle, layout)
        pieces = plan_pieces(handle.layout, layout)
        devices = flat_devices(pieces, meshes)
        shapes = flat_shapes(pieces, layout, handle.pages)
        wait.until(lambda: self._pulling.acquire(blocking=False))
        try:
            moving = self._take_part(handle, shapes, devices, wait)
        finally:
            self._pulling.release()
        return land(handle, moving, wait)

    def _take_part(
        self, handle: KVHandle, shapes: Seq[tuple[int, ...]], devices: Seq[Device], wait: Wait
    ) -> list[Array]:
        with self._context.socket(zmq.REQ) as peer:
            peer.linger = 0
            peer.connect(handle.address)
            ask = _Ask(handle.id, tuple(device.id for device in devices))
            while (answer := _call(peer, ask, wait)).state == "computing":
                wait.check()
                time.sleep(RETRY_S)
            if answer.state != "ready" or len(answer.devices) != len(devices):
                raise gone(handle)
            by_id = {device.id: device for device in jax.devices()}
            here = [
                jax.make_array_from_single_device_arrays(
                    shape, SingleDeviceSharding(by_id[source]), [], dtype=jnp.dtype(handle.layout.dtype)
                )
                for shape, source in zip(shapes, answer.devices, strict=True)
            ]
            wait.check()
            # From here on the other side puts, so this one has to, whatever happens.
            peer.send(msgspec.msgpack.encode(_Go()))
            moving = [
                jax.device_put(array, SingleDeviceSharding(device)) for array, device in zip(here, devices, strict=True)
            ]
            wait.until(lambda: bool(peer.poll(0)))
            return moving

    def release(self, handle: KVHandle) -> None:
        """Drop the copy; unknown handles are ignored."""
        self.expire()
        self._offers.drop(handle.id)

    def expire(self) -> None:
        """Free what offers hold whose lease has ended, except for what the consumer was told to be ready."""
        self._offers.expire()

    def close(self) -> None:
        """Free everything and close the port; the caller sees to it that no pull is under way."""
        self._stop.set()
        self._putter.join()
        self._offers.clear()
        self._context.destroy(linger=0)

    @property
    def offers(self) -> int:
        """Copies that wait for their pull or their release."""
        return len(self._offers)

    def _serve(self) -> None:
        """Answer the other process, and make the puts: all of them on this thread, so in order."""
        # Kept until "go", even if it is released meanwhile: the other process may be putting already.
        promised: list[tuple[Array, Device]] = []
        while not self._stop.is_set():
            if not self._listener.poll(STOP_POLL_MS):
                continue
            try:
                request = _decode_request(self._listener.recv())
            except msgspec.MsgspecError as error:
                logger.warning("bad message from the other process: %s", error)
                self._say("gone")
                continue
            if isinstance(request, _Go):
                for array, device in promised:
                    jax.device_put(array, SingleDeviceSharding(device))
                promised = []
                self._say("putting")
                continue
            promised = self._promise(request)

    def _promise(self, ask: _Ask) -> list[tuple[Array, Device]]:
        """Answer a question: what has to be put, and where, when "go" comes."""
        arrays = self._offers.find(ask.id)
        by_id = {device.id: device for device in jax.devices()}
        if arrays is None or len(arrays) != len(ask.devices) or not by_id.keys() >= set(ask.devices):
            self._say("gone")
            return []
        if not are_ready(arrays):
            self._say("computing")
            return []
        try:
            jax.block_until_ready(arrays)
        except jax.errors.JaxRuntimeError:
            logger.exception("KV could not be computed")
            self._say("gone")
            return []
        self._say("ready", tuple(_device(array).id for array in arrays))
        return [(array, by_id[id]) for array, id in zip(arrays, ask.devices, strict=True)]

    def _say(self, state: Literal["ready", "computing", "gone", "putting"], devices: tuple[int, ...] = ()) -> None:
        self._listener.send(msgspec.msgpack.encode(_Answer(state, devices)))


def _call(peer: zmq.Socket[bytes], request: _Ask, wait: Wait) -> _Answer:
    peer.send(msgspec.msgpack.encode(request))
    wait.until(lambda: bool(peer.poll(0)))
    return _decode_answer(peer.recv())


def _device(array: Array) -> Device:
    (device,) = array.devices()
    return device
