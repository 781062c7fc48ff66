"""Moving KV: seconds and GiB/s of each transport, beside what the machine can do.

    python bench/transfer.py [--quick] [--check]

*Wire*: random float32 KV of 1, 16 and 128 MiB, one device to one device. What is timed:

- ``memcpy``: numpy, between two buffers whose pages are there already
- ``bare``: ``device_put`` of keys and values to another device of the process, and a donated scatter into a pool
- ``local``: offer, pull, assemble and the same scatter
- ``socket``: plain TCP over loopback between two processes, into a buffer whose pages are there already
- ``shm``, ``device_put``: from the offer in one process until the pieces have landed in the other
- ``pull``: the same, without the pass that copies the pieces out of the pool: the socket's data are in order too

*Hand-off*: a request's KV through the real server, see ``handoff.py``.

The two processes run on a core each where there are two; what is in one process may use all. All are measured turn and
turn about. A figure is the median over the repetitions, after one that counts for nothing; a ratio is the rate over
that of the reference.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

# No jax up here: a process is pinned before it loads it.
import handoff
import msgspec
import numpy as np
from conclusion import HOLDS, BenchFailed, conclude, save, show_checks
from machine import describe
from rich.console import Console
from rich.table import Table
from servers import ServerFailed

from jdserve.runtime.processes import allocator
from jdserve.transfer.layout import KVHandle, KVLayout

RESULTS = Path(__file__).parent / "results" / "transfer.json"

HOST = "127.0.0.1"
MIB = 1 << 20
LAYOUT = KVLayout(layers=4, kv_heads=4, head_dim=64, page_size=16, dtype="float32", tp=1)
WAIT_S = 60.0

REFERENCES = {"local": "bare", "shm": "memcpy", "pull": "socket", "device_put": "socket"}
BOUNDS = {"local": 0.9, "shm": 0.6, "pull": 0.9}
"""Least ratio to the reference, from ``BOUND_MIB`` on: below, what counts is how soon a thread wakes up."""

BOUND_MIB = 16


@dataclass(frozen=True)
class Work:
    """How much is done.

    Attributes:
        repetitions: by MiB.
        handoffs: by transport.
    """

    repetitions: Mapping[int, int]
    handoffs: Mapping[str, int]


FULL = Work({1: 51, 16: 51, 128: 15}, {"shm": 60, "pull": 60})
QUICK = Work({1: 15, 16: 9, 128: 5}, {"shm": 10})


def model(mib: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values, ``[layers, pages, KV heads, page size, head dim]``: finite, never the same twice."""
    pages = mib * MIB // LAYOUT.page_bytes()
    shape = (LAYOUT.layers, pages, LAYOUT.kv_heads, LAYOUT.page_size, LAYOUT.head_dim)
    keys, values = np.random.default_rng(mib).random((2, *shape), np.float32)
    return keys, values


class Finished:
    """Pages that were copied out already; whoever reads them, on a thread as a stage has one, finds them in order."""

    def __init__(self, stage: Any, reader: Executor) -> None:
        self.layout = LAYOUT
        self.stage = stage
        self.pages: int = stage[0].shape[1]
        self._reader = reader
        self.reading: Future[None] | None = None

    def copy(self) -> Any:
        """As a :class:`~jdserve.transfer.base.KVCopy`."""
        from jdserve.transfer.base import KVCopy

        return KVCopy(LAYOUT, [self.stage], self.pages)

    def read(self, take: Callable[..., None], failed: Callable[[], None]) -> None:
        """As a stage does."""
        self.reading = self._reader.submit(self._read, take)
        self.reading.add_done_callback(lambda done: failed() if done.exception() else None)

    def _read(self, take: Callable[..., None]) -> None:
        from jdserve.ops.host import host_memory

        take(0, [tuple(host_memory(array) for array in self.stage)], range(self.pages))


class Source:
    """Makes copies that are offered, on one device; a new one for each offer, because a transport may delete it."""

    def __init__(self, device: Any) -> None:
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        from jdserve.sharding.rules import instance_mesh

        self.mesh = instance_mesh([device])
        self.sharding = NamedSharding(self.mesh, PartitionSpec())
        self._reader = ThreadPoolExecutor(1)
        self._pools: dict[int, Any] = {}
        self._gather = jax.jit(lambda pool: jax.tree.map(lambda array: array + 0, pool))

    def copy(self, mib: int) -> Any:
        """Finished pages, as :class:`~jdserve.transfer.base.KVPages`."""
        import jax

        if mib not in self._pools:
            self._pools[mib] = jax.device_put(model(mib), self.sharding)
        stage = jax.block_until_ready(self._gather(self._pools[mib]))
        return Finished(stage, self._reader)


def in_process(pipe: Connection) -> None:
    """Child: ``bare`` and ``local`` between two devices of this process."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    from jdserve.transfer.local import LocalTransport
    from jdserve.transfer.pieces import assemble

    source, destination = (Source(device) for device in jax.devices())
    transport = LocalTransport()
    pools: dict[int, Any] = {}
    insert = jax.jit(
        lambda pool, pages, new: jax.tree.map(lambda old, part: old.at[:, pages].set(part), pool, new), donate_argnums=0
    )

    def moved(kind: str, copy: Any) -> Any:
        if kind == "bare":
            return jax.device_put(copy.stage, destination.sharding)
        handle = transport.offer("r", "p0", copy, LAYOUT, WAIT_S)
        landed = transport.pull(handle, LAYOUT, [destination.mesh], WAIT_S)
        transport.release(handle)
        return assemble(landed, LAYOUT, LAYOUT, [destination.sharding])[0]

    def measure(kind: str, mib: int, check: bool) -> float:
        copy = source.copy(mib)
        pool = pools.pop(mib, None) or destination.copy(mib).stage
        pages = np.arange(copy.pages, dtype=np.int32)
        started = time.perf_counter()
        pools[mib] = jax.block_until_ready(insert(pool, pages, moved(kind, copy)))
        seconds = time.perf_counter() - started
        if check:
            check_bits(kind, mib, pools[mib])
        return seconds

    serve(pipe, measure)


def transports(rank: int, world: tuple[str, str, str], core: int) -> dict[str, Any]:
    """Child: pin this process, start jax, and make an end of each transport between processes."""
    os.sched_setaffinity(0, {core})
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    from jdserve.transfer.device_put import DevicePutTransport, join_world
    from jdserve.transfer.pull import PullTransport
    from jdserve.transfer.shm import ShmTransport

    join_world(world[0], rank, world[1 + rank])
    pull = PullTransport(HOST, jax.local_devices()[0])
    return {"shm": ShmTransport(), "pull": pull, "device_put": DevicePutTransport(HOST)}


def producer(consumer: Connection, stream: socket.socket, world: tuple[str, str, str], core: int) -> None:
    """Child: offers what the consumer asks for."""
    ends = transports(0, world, core)
    import jax

    source = Source(jax.local_devices()[0])
    buffers: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def answer(kind: str, mib: int) -> float | tuple[float, Any]:
        if mib not in buffers:
            filled = np.concatenate([part.reshape(-1) for part in model(mib)])
            buffers[mib] = (filled, np.ones_like(filled))
        filled, other = buffers[mib]
        if kind in ends:
            copy = source.copy(mib)
            started = time.monotonic()
            handle = ends[kind].offer("r", "p0", copy, LAYOUT, WAIT_S)
            if kind == "pull":
                copy.reading.result()
                started = time.monotonic()
            return started, msgspec.msgpack.encode(handle)
        started = time.monotonic()
        if kind == "memcpy":
            np.copyto(other, filled)
            return time.monotonic() - started
        stream.sendall(filled.data.cast("B"))
        return started

    while (command := consumer.recv()) is not None:
        kind, argument = command
        if kind == "release":
            ends[argument.transport].release(argument)
        else:
            consumer.send(answer(kind, argument))


def consumer(
    pipe: Connection, source: Connection, stream: socket.socket, world: tuple[str, str, str], core: int
) -> None:
    """Child: asks the producer, and pulls."""
    ends = transports(1, world, core)
    import jax

    from jdserve.sharding.rules import instance_mesh

    meshes = [instance_mesh(jax.local_devices())]
    buffers: dict[int, np.ndarray] = {}

    def over_socket(mib: int, check: bool) -> float:
        if mib not in buffers:
            buffers[mib] = np.ones(mib * MIB, np.uint8)
        source.send(("socket", mib))
        rest = buffers[mib].data
        while rest:
            rest = rest[stream.recv_into(rest) :]
        ended = time.monotonic()
        if check:
            check_bits("socket", mib, buffers[mib].view(np.float32).reshape(2, *model(mib)[0].shape))
        return ended - source.recv()

    def measure(kind: str, mib: int, check: bool) -> float:
        if kind == "socket":
            return over_socket(mib, check)
        source.send((kind, mib))
        if kind == "memcpy":
            return source.recv()
        started, encoded = source.recv()
        handle = msgspec.msgpack.decode(encoded, type=KVHandle)  # as the control channel does
        landed = ends[kind].pull(handle, LAYOUT, meshes, WAIT_S)
        seconds = time.monotonic() - started
        if check:
            check_bits(kind, mib, landed.pieces[0])
        landed.done()
        source.send(("release", handle))
        return seconds

    serve(pipe, measure)
    source.send(None)


def check_bits(kind: str, mib: int, found: Any) -> None:
    """Check that keys and values are what was sent.

    Raises:
        BenchFailed: they are not.
    """
    import jax.numpy as jnp

    if not all(bool(jnp.array_equal(array, sent)) for array, sent in zip(found, model(mib), strict=True)):
        raise BenchFailed(f"bits does not hold: {kind} changed KV of {mib} MiB")


def serve(pipe: Connection, measure: Callable[[str, int, bool], float]) -> None:
    """Answer ``(kind, MiB, check)`` with seconds, or with what went wrong, until None comes."""
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        try:
            pipe.send(measure(*command))
        except Exception as error:
            pipe.send(str(error) or type(error).__name__)


def ask(pipe: Connection, command: Any = None) -> Any:
    """The answer of a child to ``command``, or to having been started.

    Raises:
        BenchFailed: it has ended or hangs.
    """
    try:
        if command is not None:
            pipe.send(command)
        if pipe.poll(2 * WAIT_S):
            return pipe.recv()
    except (EOFError, OSError) as error:
        raise BenchFailed(f"a child ended while it was asked for {command}") from error
    raise BenchFailed(f"a child hangs while it was asked for {command}")


def free_addresses(count: int) -> tuple[str, ...]:
    """Addresses that nothing listens on."""
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return tuple(f"{HOST}:{one.getsockname()[1]}" for one in found)


def wire(work: Work) -> dict[int, dict[str, Any]]:
    """Seconds and rates of everything in the list of the module, by MiB.

    Raises:
        BenchFailed: something did not move what it should, or a child died.
    """
    os.environ.update(allocator(os.environ))  # as workers have it
    spawn = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    world = free_addresses(3)
    alone, alone_end = spawn.Pipe()
    together, together_end = spawn.Pipe()
    asking, answering = spawn.Pipe()
    with socket.create_server((HOST, 0)) as listener:
        receiving = socket.create_connection(listener.getsockname())
        sending, _ = listener.accept()
    for stream in (sending, receiving):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    children = [
        spawn.Process(target=in_process, args=(alone_end,), daemon=True),
        spawn.Process(target=producer, args=(answering, sending, world, cores[0]), daemon=True),
        spawn.Process(target=consumer, args=(together_end, asking, receiving, world, cores[-1]), daemon=True),
    ]
    kinds = {"memcpy": together, "bare": alone, "local": alone}
    kinds |= dict.fromkeys(("socket", "shm", "pull", "device_put"), together)
    try:
        for child in children:
            child.start()
        for pipe in (alone, together):
            ask(pipe)
        figures = {mib: measure(kinds, mib, count) for mib, count in work.repetitions.items()}
        for pipe in (alone, together):
            pipe.send(None)
        for child in children:
            child.join(WAIT_S)
        return figures
    finally:
        for child in children:
            child.kill()


def measure(kinds: Mapping[str, Connection], mib: int, count: int) -> dict[str, Any]:
    """Median seconds, GiB/s and ratio of each kind at one size.

    Raises:
        BenchFailed: something did not move what it should, or a child died.
    """
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repetition in range(count + 1):
        for kind, pipe in kinds.items():
            took = ask(pipe, (kind, mib, repetition == 0))
            if isinstance(took, str):
                raise BenchFailed(f"{kind} of {mib} MiB: {took}")
            if repetition:
                seconds[kind].append(took)
    medians = {kind: median(took) for kind, took in seconds.items()}
    return {
        kind: {
            "seconds": took,
            "gib_per_s": mib / 1024 / took,
            "ratio": medians[REFERENCES[kind]] / took if kind in REFERENCES else None,
        }
        for kind, took in medians.items()
    }


def check(figures: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
    """Whether each bound holds: ``HOLDS``, or why it does not."""
    checks = {"bits": HOLDS}  # KV that changes on its way raises
    for kind, bound in BOUNDS.items():
        broken = [
            f"{rows[kind]['ratio']:.2f} of {REFERENCES[kind]} at {mib} MiB, less than {bound}"
            for mib, rows in figures.items()
            if mib >= BOUND_MIB and rows[kind]["ratio"] < bound
        ]
        checks[kind] = "; ".join(broken) or HOLDS
    return checks


def bench(work: Work) -> dict[str, Any]:
    """Everything that is reported: one entry per part.

    Raises:
        BenchFailed: there is nothing to report figures of.
    """
    figures = wire(work)
    handed = {kind: handoff.measure(kind, count) for kind, count in work.handoffs.items()}
    packages = ("jax", "jaxlib", "numpy", "pyzmq")
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}
    return {
        "bench": "transfer",
        "setting": {"machine": describe(), "versions": versions, "layout": LAYOUT},
        "work": {"repetitions": work.repetitions, "handoffs": work.handoffs},
        "wire": figures,
        "handoff": handed,
        "checks": check(figures) | {f"hand-off by {kind}": handoff.check(kind, one) for kind, one in handed.items()},
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print the figures and the checks."""
    for mib, rows in report["wire"].items():
        table = Table(title=f"{mib} MiB, median of {report['work']['repetitions'][mib]}")
        for column in ("", "ms", "GiB/s", "ratio"):
            table.add_column(column, justify="right" if column else "left")
        for kind, row in rows.items():
            ratio = f"{row['ratio']:.2f} of {REFERENCES[kind]}" if kind in REFERENCES else "-"
            table.add_row(kind, f"{row['seconds'] * 1e3:,.2f}", f"{row['gib_per_s']:.2f}", ratio)
        console.print(table)
    table = Table(title="hand-off of 512 tokens of the built-in model, ms")
    for column in ("", "idle p50", "idle p95", "loaded p50", "loaded p95", "decode step"):
        table.add_column(column, justify="right" if column else "left")
    for kind, one in report["handoff"].items():
        keys = ("idle_p50_ms", "idle_p95_ms", "loaded_p50_ms", "loaded_p95_ms", "decode_step_ms")
        table.add_row(kind, *(f"{one[key]:.1f}" for key in keys))
    console.print(table)
    show_checks(report["checks"], console)


def main() -> int:
    parser = argparse.ArgumentParser(description="Moving KV, beside what the machine can do.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every bound holds")
    options = parser.parse_args()
    try:
        report = bench(QUICK if options.quick else FULL)
    except (BenchFailed, ServerFailed) as error:
        print(error, file=sys.stderr)
        return 1
    save(report, RESULTS, options.quick)
    show(report, Console())
    return conclude(report, options.check)


if __name__ == "__main__":
    sys.exit(main())
