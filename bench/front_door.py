"""What the front door costs: HTTP, tokenizer, detokenizer and server-sent events, without a model.

    python bench/front_door.py [--quick] [--check]

Behind the front door an engine gives each of 200 streams a token every 50 ms, the streams spread evenly over the 50 ms.
Beside it, in the same run, a plain FastAPI application sends the same words on the same schedule as server-sent
events. Each is a process on the first core; the client is one on the last core. Per token: CPU time of the server's
process (user and system, everything in it), and *added latency*: from the moment at which the engine gave the token
until the client had read the line. Streams begin one after another, 100 a second. 1,000 streams are reported too; there
the client is the slower one.

*Health*: how long ``/health`` takes while somebody posts 100 MB, 100,000 prompts, or a regular expression that explodes
when it is compiled carelessly. Looked at every 10 ms while the request is open, and for a moment after it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import uvicorn
from conclusion import HOLDS, BenchFailed, conclude, save, show_checks
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from machine import describe
from rich.console import Console
from rich.table import Table
from servers import pin

from jdserve.core.plan import DecodeInstance, HostedStage, Plan, PrefillInstance, Worker
from jdserve.core.request import Request as EngineRequest
from jdserve.core.spec import ModelSpec
from jdserve.models.load import resolve
from jdserve.runtime.outputs import EngineStats, InstanceStats, TokenOutput
from jdserve.runtime.progress import Progress
from jdserve.server.app import create_app
from jdserve.server.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "results" / "front_door.json"

MODEL = "smollm2-135m-instruct"
PERIOD_S = 0.05
STREAMS, MANY = 200, 1000
STARTS_PER_S = 100
CPU_RATIO, LATENCY_MS, HEALTH_MS = 2.0, 20.0, 100.0
"""Bounds: CPU per token over the echo's, added latency p99, slowest answer of ``/health``."""

PROMPT = "The capital of France is"
WAIT_S = 120.0

ABUSES: dict[str, dict[str, Any]] = {
    "100 MB": {"prompt": "a" * (100 << 20)},
    "100,000 prompts": {"prompt": ["a"] * 100_000},
    "hostile regex": {"prompt": "a", "guided_regex": "(((a{1,200}){1,200}){1,200}){1,200}b"},
}


class Schedule:
    """Gives stream ``n`` its tokens at ``n / streams`` of the period and every period from then on.

    Attributes:
        given: moments at which the tokens of a stream were given, by its key.
    """

    def __init__(self) -> None:
        self.given: dict[str, list[float]] = {}

    async def tokens(self, key: str, share: float, count: int) -> AsyncIterator[int]:
        """Indices of the tokens, each at its time; ``share`` of a period is the stream's place in it."""
        loop = asyncio.get_running_loop()
        given = self.given.setdefault(key, [])
        now = loop.time()
        due = (now // PERIOD_S + 1 + share) * PERIOD_S
        for index in range(count):
            await asyncio.sleep(due + index * PERIOD_S - loop.time())
            given.append(time.monotonic())
            yield index


class ScheduledEngine:
    """An engine that says a fixed text on schedule; see :class:`jdserve.server.engine_api.TextEngine`."""

    def __init__(self, spec: ModelSpec, words: list[int], schedule: Schedule) -> None:
        self.spec, self.max_model_len = spec, 2048
        instances = (
            PrefillInstance(name="p0", pages=64, lm_tokens=64, max_batch=8),
            DecodeInstance(name="d0", pages=64, max_num_seqs=8),
        )
        worker = Worker("w0", (HostedStage("p0", (0,)), HostedStage("d0", (1,))))
        self.plan = Plan(model=MODEL, max_model_len=2048, instances=instances, workers=(worker,))
        self.started, self.ready, self.draining, self.progress = True, True, False, Progress()
        self._words, self._schedule = words, schedule

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """A token each period."""
        share = (request.params.seed or 0) % 1_000_000 / 1e6  # the client says the place in the period by the seed
        count = request.params.max_tokens
        async for index in self._schedule.tokens(str(request.params.seed), share, count):
            finish = "length" if index + 1 == count else None
            yield TokenOutput(request.id, (self._words[index % len(self._words)],), finish=finish)

    def stats(self) -> EngineStats:
        """Of two idle instances."""
        return EngineStats((InstanceStats("p0", "prefill"), InstanceStats("d0", "decode")))

    async def drain_instance(self, name: str) -> None:
        """Nothing is there to drain."""

    async def add_instance(self, instance: Any, worker: Any) -> None:
        """Nothing can be added."""

    async def drain(self, timeout_s: float) -> None:
        """Nothing is there to wait for."""

    async def close(self) -> None:
        """Nothing is open."""


def echo_app(words: list[str], schedule: Schedule) -> FastAPI:
    """The plain application to compare with."""
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(http: Request) -> StreamingResponse:
        body = await http.json()
        seed, count = body["seed"], body["max_tokens"]

        async def lines() -> AsyncIterator[str]:
            async for index in schedule.tokens(str(seed), seed / 1e6, count):
                yield "data: " + json.dumps({"choices": [{"index": 0, "text": words[index % len(words)]}]}) + "\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    return app


def serve(pipe: Connection, kind: str, core: int) -> None:
    """Child: serve ``kind`` ("jdserve" or "echo") on ``core``, and answer questions about time."""
    pin([core])
    model = resolve(MODEL)
    tokenizer = Tokenizer.read(model.folder)
    text = Path(__file__).with_name("front_door.py").read_text()
    ids = list(tokenizer.backend.encode(text).ids)[:400]
    schedule = Schedule()
    if kind == "echo":
        app = echo_app([tokenizer.decode([id]) for id in ids], schedule)
    else:
        app = create_app(ScheduledEngine(model.spec, ids, schedule), tokenizer, MODEL)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False))

    async def main() -> None:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        loop = asyncio.get_running_loop()
        pipe.send(listener.getsockname()[1])
        while (question := await loop.run_in_executor(None, pipe.recv)) is not None:
            pipe.send(time.process_time() if question == "cpu" else schedule.given)
            if question == "given":
                schedule.given = {}
        server.should_exit = True
        await serving

    asyncio.run(main())


async def stream(client: httpx.AsyncClient, seed: int, count: int, after_s: float) -> list[float]:
    """When each token of one stream was read; it begins ``after_s`` from now.

    Raises:
        BenchFailed: the server said something else.
    """
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": count, "seed": seed, "stream": True, "temperature": 0.5}
    read: list[float] = []
    await asyncio.sleep(after_s)
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise BenchFailed(f"status {answer.status_code}: {(await answer.aread())[:300]!r}")
        async for chunk in answer.aiter_raw():
            read += [time.monotonic()] * chunk.count(b'"text"')
    return read


async def load(url: str, pipe: Connection, streams: int, count: int) -> dict[str, float]:
    """Microseconds of CPU per token, and added latency, of ``streams`` streams of ``count`` tokens."""
    # A kept connection may be closed by the server in the moment in which it is used again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits) as client:
        seeds = [int(1e6 * n / streams) for n in range(streams)]
        before = await ask(pipe, "cpu")
        read = await asyncio.gather(*(stream(client, seed, count, n / STARTS_PER_S) for n, seed in enumerate(seeds)))
        spent = await ask(pipe, "cpu") - before
        given = await ask(pipe, "given")
    if any(len(times) != count for times in read):
        raise BenchFailed(f"a stream of {count} tokens ended after {min(map(len, read))} lines")
    added = [
        1e3 * (came - left)
        for seed, times in zip(seeds, read, strict=True)
        for left, came in zip(given[str(seed)], times, strict=True)
    ]
    return {
        "cpu_us_per_token": 1e6 * spent / (streams * count),
        "latency_p50_ms": float(np.percentile(added, 50)),
        "latency_p99_ms": float(np.percentile(added, 99)),
    }


async def ask(pipe: Connection, question: str) -> Any:
    """The answer of a child, without holding up the streams."""
    pipe.send(question)
    return await asyncio.get_running_loop().run_in_executor(None, pipe.recv)


async def health(url: str) -> dict[str, dict[str, Any]]:
    """For each abuse: what it was answered, and milliseconds of the slowest ``/health``."""
    found: dict[str, dict[str, Any]] = {}
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        for name, body in ABUSES.items():
            encoded = json.dumps({"model": MODEL, "max_tokens": 4} | body).encode()
            watching = asyncio.Event()
            watcher = asyncio.get_running_loop().run_in_executor(None, watch, url, watching)
            try:
                answer = await client.post(
                    "/v1/completions", content=sent(encoded), headers={"Content-Type": "application/json"}
                )
                status: int | str = answer.status_code
            except httpx.HTTPError as error:  # a server may close on whoever sends too much
                status = type(error).__name__
            await asyncio.sleep(0.3)
            watching.set()
            found[name] = {"answer": status, "health_ms": await watcher}
    return found


async def sent(body: bytes) -> AsyncIterator[bytes]:
    """The body in parts, so that the client's own loop goes on."""
    for start in range(0, len(body), 1 << 20):
        yield body[start : start + (1 << 20)]


def watch(url: str, done: asyncio.Event) -> float:
    """Milliseconds of the slowest ``/health`` until ``done``, on a thread and a connection of its own."""
    slowest = 0.0
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        while not done.is_set():
            started = time.perf_counter()
            client.get("/health")
            slowest = max(slowest, time.perf_counter() - started)
            time.sleep(0.01)
    return 1e3 * slowest


@asynccontextmanager
async def child(kind: str, core: int) -> AsyncIterator[tuple[str, Connection]]:
    """A served application: its URL and the pipe for questions."""
    pipe, end = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(end, kind, core), daemon=True)
    process.start()
    try:
        if not await asyncio.get_running_loop().run_in_executor(None, pipe.poll, WAIT_S):
            raise BenchFailed(f"the process of {kind} did not start")
        yield f"http://127.0.0.1:{pipe.recv()}", pipe
        pipe.send(None)
        process.join(10)
    finally:
        process.kill()


async def bench(repetitions: int, count: int) -> dict[str, Any]:
    """Everything that is reported."""
    cores = sorted(os.sched_getaffinity(0))
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    async with child("jdserve", cores[0]) as ours, child("echo", cores[0]) as echo:
        pin(cores[-1:])
        for repetition in range(repetitions + 1):
            for kind, (url, pipe) in {"jdserve": ours, "echo": echo}.items():
                for streams in (STREAMS, MANY) if repetition == repetitions else (STREAMS,):
                    figures = await load(url, pipe, streams, count)
                    if repetition:
                        runs.setdefault((kind, streams), []).append(figures)
        answers = await health(ours[0])
        pin(cores)
    rows = {
        f"{kind} {streams}": {name: median(one[name] for one in figures) for name in figures[0]}
        for (kind, streams), figures in runs.items()
    }
    ratio = rows[f"jdserve {STREAMS}"]["cpu_us_per_token"] / rows[f"echo {STREAMS}"]["cpu_us_per_token"]
    return {
        "bench": "front_door",
        "setting": {"machine": describe(), "period_s": PERIOD_S, "tokens": count, "repetitions": repetitions},
        "streams": rows,
        "cpu_ratio": ratio,
        "health": answers,
        "checks": check(ratio, rows[f"jdserve {STREAMS}"], answers),
    }


def check(ratio: float, ours: Mapping[str, float], answers: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Whether each bound holds."""
    late = ours["latency_p99_ms"]
    slow = [f"{one['health_ms']:.0f} ms beside {name}" for name, one in answers.items() if one["health_ms"] > HEALTH_MS]
    failed = [f"{name} was answered {one['answer']}" for name, one in answers.items() if one["answer"] == 500]
    return {
        "CPU per token": HOLDS if ratio <= CPU_RATIO else f"{ratio:.2f} of the echo's, more than {CPU_RATIO}",
        "added latency": HOLDS if late <= LATENCY_MS else f"p99 {late:.1f} ms, more than {LATENCY_MS}",
        "health": "; ".join(slow) or HOLDS,
        "abuse": "; ".join(failed) or HOLDS,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print the figures and the checks."""
    table = Table(title=f"streams at {1 / PERIOD_S:.0f} tokens/s each")
    for column in ("", "CPU us per token", "added p50 ms", "added p99 ms"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in report["streams"].items():
        table.add_row(name, *(f"{value:.1f}" for value in row.values()))
    console.print(table)
    table = Table(title="/health beside")
    for column in ("", "answered", "slowest /health, ms"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in report["health"].items():
        table.add_row(name, str(row["answer"]), f"{row['health_ms']:.1f}")
    console.print(table)
    console.print(f"CPU per token over the echo's: {report['cpu_ratio']:.2f}")
    show_checks(report["checks"], console)


def main() -> int:
    parser = argparse.ArgumentParser(description="What the front door costs per token.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions of shorter streams")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every bound holds")
    options = parser.parse_args()
    try:
        report = asyncio.run(bench(1 if options.quick else 5, 60 if options.quick else 200))
    except BenchFailed as error:
        print(error, file=sys.stderr)
        return 1
    save(report, RESULTS, options.quick)
    show(report, Console())
    return conclude(report, options.check)


if __name__ == "__main__":
    sys.exit(main())
