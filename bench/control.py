"""What the control channel costs per decode step: one message with all tokens of the step, worker to front door.

    python bench/control.py [--quick] [--check]

Two processes over loopback, encrypted as in production. For batches of 1, 16 and 64 sequences: microseconds that the
launcher thread spends to hand a step's news over (building and encoding the message), microseconds of the front door's
thread to receive and decode it, and the time of flight there and back (a News out, a Cancel back). Beside it a bare
ZeroMQ round trip of the same bytes without keys. Medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import zmq
from conclusion import save
from machine import describe
from rich.console import Console
from rich.table import Table

from jdserve.runtime import wire
from jdserve.runtime.channel import Channel, Frames, Keys
from jdserve.runtime.outputs import InstanceStats, Report, TokenOutput

RESULTS = Path(__file__).parent / "results" / "control.json"
SECRET = "of the control bench"
BATCHES = (1, 16, 64)
STEP_SHARE = 0.05
"""Most of a decode step that the launcher thread may spend on its message; a step here takes 10 ms or more."""
STEP_S = 0.010


def news(batch: int, step: int) -> wire.News:
    """News of a decode step."""
    outputs = tuple(TokenOutput(f"cmpl-{index:032x}~1", (step + index,)) for index in range(batch))
    return wire.News(Report("d0", outputs), InstanceStats("d0", "decode", steps=step))


def worker(address: str, count: int, result: Any) -> None:
    """The worker's side: posts news, waits for the answer, and times both."""
    channel = Channel.connect(address, Keys(SECRET))
    back = threading.Event()
    threading.Thread(target=channel.run, args=(lambda _: back.set(), lambda: None, 0.05), daemon=True).start()
    figures: dict[int, tuple[float, float]] = {}
    for batch in BATCHES:
        posts, trips = [], []
        for step in range(count):
            back.clear()
            started = time.perf_counter()
            channel.post((wire.encode(news(batch, step)),))
            posts.append(time.perf_counter() - started)
            assert back.wait(10)
            trips.append(time.perf_counter() - started)
        figures[batch] = (median(posts), median(trips))
    channel.close()
    result.put(figures)


def ours(count: int) -> dict[str, dict[str, float]]:
    """Microseconds by batch."""
    decodes: dict[int, list[float]] = {}
    cancel = wire.encode(wire.Cancel("d0", "cmpl-0~1"))

    def take(frames: Frames) -> None:
        started = time.perf_counter()
        message = wire.to_front.decode(frames[1])
        assert isinstance(message, wire.News)
        decodes.setdefault(len(message.report.outputs), []).append(time.perf_counter() - started)
        front.post((frames[0], cancel))

    front = Channel.listen("127.0.0.1", 0, Keys(SECRET))
    thread = threading.Thread(target=front.run, args=(take, lambda: None, 0.05))
    thread.start()
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    process = context.Process(target=worker, args=(front.address, count, result))
    process.start()
    figures = result.get(timeout=120)
    process.join()
    front.close()
    thread.join()
    return {
        str(batch): {
            "post_us": 1e6 * post,
            "decode_us": 1e6 * median(decodes[batch]),
            "round_trip_us": 1e6 * trip,
            "bytes": len(wire.encode(news(batch, 0))),
        }
        for batch, (post, trip) in figures.items()
    }


def echo(address: str) -> None:
    """Sends back what it gets."""
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.connect(address)
        while (message := socket.recv()) != b"end":
            socket.send(message)
        socket.send(b"")


def bare(sizes: list[int], count: int) -> list[float]:
    """Microseconds of a plain ZeroMQ round trip for each size."""
    trips: list[float] = []
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        process = multiprocessing.get_context("spawn").Process(target=echo, args=(f"tcp://127.0.0.1:{port}",))
        process.start()
        for size in sizes:
            times = []
            for _ in range(count):
                started = time.perf_counter()
                socket.send(bytes(size))
                socket.recv()
                times.append(time.perf_counter() - started)
            trips.append(1e6 * median(times))
        socket.send(b"end")
        socket.recv()
        process.join()
    return trips


def main() -> int:
    """Run the bench; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--check", action="store_true", help="exit 1 naming each bound that does not hold")
    args = parser.parse_args()
    count = 300 if args.quick else 3000
    figures = ours(count)
    for one, trip in zip(figures.values(), bare([int(one["bytes"]) for one in figures.values()], count), strict=True):
        one["bare_round_trip_us"] = trip
    failures = [
        f"batch {batch}: {one['post_us']:.0f} us to post, above {STEP_SHARE:.0%} of a step of {STEP_S * 1e3:.0f} ms"
        for batch, one in figures.items()
        if one["post_us"] > STEP_SHARE * STEP_S * 1e6
    ]
    result = {"machine": describe(), "batches": figures, "failures": failures}
    table = Table(title="control channel, per decode step")
    for column in ("batch", "bytes", "post us", "decode us", "round trip us", "bare zmq us"):
        table.add_column(column, justify="right")
    for batch, one in figures.items():
        keys = ("bytes", "post_us", "decode_us", "round_trip_us", "bare_round_trip_us")
        table.add_row(batch, *(f"{one[key]:.0f}" for key in keys))
    Console(stderr=True).print(table)
    save(result, RESULTS, args.quick)
    for failure in failures:
        print(f"does not hold: {failure}", file=sys.stderr)
    print(json.dumps(result))
    return int(args.check and bool(failures))


if __name__ == "__main__":
    sys.exit(main())
