"""One end of a transfer in a process of its own: reads commands, a line of JSON each, and answers each with a line.

python peer.py KIND [COORDINATOR PROCESS_ID TRANSFER_ADDRESS]
"""

from __future__ import annotations

import json
import sys

import jax
import msgspec

from jdserve.core.errors import TransferError
from jdserve.transfer.device_put import DevicePutTransport, join_world
from jdserve.transfer.layout import KVHandle, KVLayout
from jdserve.transfer.pull import PullTransport
from jdserve.transfer.shm import ShmTransport
from transfer.cases import HOST, WAIT_S, Gate, assert_landed, meshes, small_copy


def make(kind):
    if kind == "shm":
        return ShmTransport()
    return PullTransport(HOST, jax.local_devices()[0]) if kind == "pull" else DevicePutTransport(HOST)


class Peer:
    def __init__(self, transport):
        self.transport = transport
        self.gate = Gate()
        self.held = []

    def offer(self, source, destination, seed, gated):
        source, destination = (msgspec.convert(one, KVLayout) for one in (source, destination))
        copy = self.gate.copy(source, seed) if gated else small_copy(source, seed)
        return msgspec.to_builtins(self.transport.offer("r", "p0", copy, destination, WAIT_S))

    def open_gate(self):
        self.gate.event.set()

    def pull(self, handle, seed, hold, timeout_s):
        handle = msgspec.convert(handle, KVHandle, strict=False)
        here = meshes(handle.destination, 0)
        landed = self.transport.pull(handle, handle.destination, here, timeout_s)
        if hold:
            self.held.append(landed)
        else:
            assert_landed(landed, handle.layout, handle.destination, here, seed)

    def release(self, handle):
        self.transport.release(msgspec.convert(handle, KVHandle, strict=False))
        return self.transport.offers


def main(kind, *world):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    if world:
        join_world(world[0], int(world[1]), world[2])
    peer = Peer(make(kind))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"result": getattr(peer, command.pop("op"))(**command)}
        except TransferError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
