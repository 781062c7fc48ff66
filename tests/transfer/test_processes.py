"""Transfers between real processes, and what is left when one of them is killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import jax
import msgspec
import pytest

from jdserve.core.errors import TransferError
from jdserve.transfer.layout import KVHandle
from jdserve.transfer.pull import PullTransport
from jdserve.transfer.shm import ShmTransport
from transfer.cases import DEGREES, HOST, WAIT_S, assert_landed, layout, meshes, small_copy

HERE = Path(__file__).parent


class Child:
    """A process that runs ``peer.py``."""

    def __init__(self, *arguments):
        path = os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)])
        command = [sys.executable, str(HERE / "peer.py"), *map(str, arguments)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=os.environ | {"PYTHONPATH": path}
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        self.process.kill()
        self.process.wait(WAIT_S)
        self.process.stdin.close()
        self.process.stdout.close()

    def started(self):
        assert self._answer() == {"ready": True}
        return self

    def do(self, op, **arguments):
        self.process.stdin.write(json.dumps({"op": op} | arguments) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise TransferError(answer["error"])
        return answer["result"]

    def offer(self, source, destination, seed=0, gated=False):
        source, destination = (msgspec.to_builtins(one) for one in (source, destination))
        handle = self.do("offer", source=source, destination=destination, seed=seed, gated=gated)
        return msgspec.convert(handle, KVHandle)

    def pull(self, handle, seed=0, hold=False, timeout_s=WAIT_S):
        self.do("pull", handle=msgspec.to_builtins(handle), seed=seed, hold=hold, timeout_s=timeout_s)

    def release(self, handle):
        return self.do("release", handle=msgspec.to_builtins(handle))

    def _answer(self):
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait(WAIT_S)}"
        return json.loads(line)


@pytest.fixture
def shm():
    transport = ShmTransport()
    yield transport
    transport.close()


@pytest.fixture
def pull():
    transport = PullTransport(HOST, jax.local_devices()[0])
    yield transport
    transport.close()


def lands(transport, handle, seed=0):
    here = meshes(handle.destination, 1)
    landed = transport.pull(handle, handle.destination, here, WAIT_S)
    assert_landed(landed, handle.layout, handle.destination, here, seed)


@pytest.mark.parametrize("kind", ["shm", "pull"])
def test_a_killed_producer(kind, request):
    """Before and during a pull: an error at once, and the next process is pulled from as if nothing had happened."""
    transport = request.getfixturevalue(kind)
    with Child(kind) as first, Child(kind) as second, Child(kind) as third:
        first.started()
        for seed, degrees in enumerate([(1, 1), (2, 2), (4, 1)]):
            handle = first.offer(layout(tp=2), layout(*degrees), seed)
            lands(transport, handle, seed)
            assert first.release(handle) == 0
        handle = first.offer(layout(tp=2), layout())
        first.kill()
        with pytest.raises(TransferError, match="request r: "):
            transport.pull(handle, layout(), meshes(layout(), 1), WAIT_S / 2)

        handle = second.started().offer(layout(), layout(), seed=3, gated=True)
        waits = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            here = meshes(layout(), 1)
            pulling = threads.submit(transport.pull, handle, layout(), here, WAIT_S, lambda: bool(waits.set()))
            assert waits.wait(WAIT_S)
            second.kill()
            with pytest.raises(TransferError, match="request r: "):
                pulling.result(WAIT_S / 2)

        lands(transport, third.started().offer(layout(), layout(tp=2), seed=4), seed=4)
    if kind == "shm":
        assert len(transport.mappings) == 1
        transport.expire()
        assert len(transport.mappings) == 0, "the memory of a dead process is not kept"


class Relay:
    """One address that leads to wherever it is pointed."""

    def __init__(self):
        self.target = ""
        self.listener = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            host, _, port = self.target.rpartition(":")
            far = socket.create_connection((host, int(port)))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    @staticmethod
    def _forward(source, sink):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def test_a_producer_that_is_back_at_its_old_address(pull):
    relay = Relay()
    with Child("pull") as first, Child("pull") as second:
        for seed, child in enumerate((first, second)):
            handle = child.started().offer(layout(), layout(), seed)
            relay.target = handle.address
            lands(pull, msgspec.structs.replace(handle, address=relay.address), seed)
            if child is first:
                handle = msgspec.structs.replace(child.offer(layout(), layout()), address=relay.address)
                child.kill()
                with pytest.raises(TransferError, match="request r: "):
                    pull.pull(handle, layout(), meshes(layout(), 1), WAIT_S / 2)
    relay.listener.close()


def test_a_consumer_killed_while_it_reads(shm):
    with Child("shm") as child:
        handle = shm.offer("r", "p0", small_copy(layout(tp=2)), layout(), WAIT_S)
        child.started().pull(handle, hold=True)
        shm.release(handle)
        other = shm.offer("s", "p0", small_copy(layout(tp=2)), layout(), WAIT_S)
        assert shm.segments.limbo == 1
        assert other.address != handle.address
        child.kill()
        shm.expire()
        assert shm.segments.limbo == 0
        assert shm.offer("t", "p0", small_copy(layout(tp=2)), layout(), WAIT_S).address == handle.address


def free_ports(count):
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def test_two_processes_of_one_world():
    """``device_put``: all pairs of degrees, and that what was refused leaves the two in step."""
    coordinator, *transfers = free_ports(3)
    addresses = [(f"{HOST}:{coordinator}", rank, f"{HOST}:{port}") for rank, port in enumerate(transfers)]
    with Child("device_put", *addresses[0]) as producer, Child("device_put", *addresses[1]) as consumer:
        producer.started()
        consumer.started()
        cases = [
            *((4, "float32", source, destination) for source in DEGREES for destination in DEGREES),
            *((2, dtype, (1, 2), (4, 1)) for dtype in ("bfloat16", "float16", "int8")),
        ]
        for seed, (kv_heads, dtype, *degrees) in enumerate(cases):
            source, destination = (layout(*one, kv_heads, dtype) for one in degrees)
            handle = producer.offer(source, destination, seed)
            consumer.pull(handle, seed)
            assert producer.release(handle) == 0

        with pytest.raises(TransferError, match="is gone"):
            consumer.pull(handle)
        gated = producer.offer(layout(), layout(), seed=1, gated=True)
        with pytest.raises(TransferError, match=r"did not arrive within 0\.1 s"):
            consumer.pull(gated, timeout_s=0.1)
        producer.do("open_gate")
        consumer.pull(gated, seed=1)
        consumer.pull(gated, seed=1)
