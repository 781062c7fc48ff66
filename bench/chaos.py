"""Chaos: workers die, hang and are abandoned under load, and no client may notice more than a pause.

    python bench/chaos.py [--quick] [--check] [--seeds N] [--streams N]

Two prefill and two decode instances of a tiny random model, each in a worker of its own, serve a constant number of
concurrent streams for a while. Meanwhile, at moments drawn from a seed, a random worker is killed (SIGKILL) or stopped
(SIGSTOP, until the heartbeat finds it), and clients leave in the middle of a stream, so that prefills, pulls and
decodes are abandoned in every state. The last instance of a role that is up is spared: where a start of all workers on
two cores takes longer than the 30 s for which requests wait, their loss would only show that (what happens when a role
is gone is in the tests). Every stream that its client did not leave must end with the text that a single
colocated instance gives; afterwards no page may be owned, and every instance must be back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from conclusion import save
from machine import describe
from rich.console import Console
from rich.table import Table
from servers import Server, ServerFailed, running, write_plan

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "chaos.json"
sys.path.insert(0, str(HERE.parent / "tests"))

PROMPTS = 60
LONGEST = 192
HEARTBEAT_S = 4.0
OUTAGE_S = 30.0
"""A role that was gone for so long may cost its requests an error."""

STREAM_S = 120.0
"""A stream that takes longer hangs."""

SETTLE_S = 90.0


@dataclass(frozen=True)
class Size:
    """How much is done per seed.

    Attributes:
        streams: open at a time.
        seconds: of load.
        faults: moments at which a worker is killed or stopped, if one may be.
    """

    streams: int
    seconds: float
    faults: int


FULL = Size(200, 60.0, 6)
QUICK = Size(40, 15.0, 2)


@dataclass
class Outcome:
    """What one seed gave.

    Attributes:
        ends: streams by how they ended: right, left (by the client), wrong, error, hung.
        errors: messages, by how often.
        faults: workers killed or stopped.
        recovery_s: from each fault until every instance was up again.
        leaked: pages owned after all.
        restarts, retries: as the server counts them.
        pause_s: longest gap between two tokens of a stream that ended right.
        exit_code: of the server.
    """

    seed: int
    ends: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: int = 0
    recovery_s: list[float] = field(default_factory=list)
    leaked: int = 0
    missing: list[str] = field(default_factory=list)
    restarts: int = 0
    retries: int = 0
    pause_s: float = 0.0
    exit_code: int | None = None

    @property
    def complete(self) -> float:
        """Share of the streams whose client stayed that ended with the right text."""
        stayed = sum(self.ends.values()) - self.ends["left"]
        return self.ends["right"] / stayed if stayed else 0.0


def plan_for(model: str, *, colocated: bool = False) -> dict[str, object]:
    """2 prefill + 2 decode instances in four workers, or one colocated instance."""
    roles: list[dict[str, Any]] = [
        {"role": "prefill", "name": "p0", "pages": 160, "lm_tokens": 128, "max_batch": 8, "lease_s": 20.0},
        {"role": "prefill", "name": "p1", "pages": 160, "lm_tokens": 128, "max_batch": 8, "lease_s": 20.0},
        {"role": "decode", "name": "d0", "pages": 400, "max_num_seqs": 32},
        {"role": "decode", "name": "d1", "pages": 400, "max_num_seqs": 32},
    ]
    if colocated:
        roles = [{"role": "colocated", "name": "c0", "pages": 400, "token_budget": 128, "max_num_seqs": 16}]
    workers = [
        {"name": one["name"], "stages": [{"instance": one["name"], "devices": [index]}]}
        for index, one in enumerate(roles)
    ]
    return {
        "version": 1,
        "model": model,
        "max_model_len": LONGEST,
        "transfer_checksums": not colocated,
        "instances": roles,
        "workers": workers,
    }


def prompts() -> list[tuple[list[int], int]]:
    """(prompt, tokens to generate) of every request, the same for all seeds."""
    draw = random.Random(7)
    return [
        ([draw.randrange(3, 1000) for _ in range(draw.randrange(4, 100))], draw.randrange(8, 80))
        for _ in range(PROMPTS)
    ]


async def complete(
    client: httpx.AsyncClient, prompt: list[int], tokens: int, leave_at: int | None
) -> tuple[str, str, float]:
    """Stream one completion: how it ended, its text or error, and the longest pause between its tokens.

    Args:
        client: of the server.
        prompt: token ids.
        tokens: to generate.
        leave_at: chunk at which the client leaves; 0 before any; None for never.
    """
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, seen, pause, last, finish = "", 0, 0.0, time.monotonic(), None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return "error", f"{answer.status_code}: {(await answer.aread()).decode()[:200]}", pause
        if leave_at == 0:
            return "left", "", pause
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.monotonic()
            pause, last, seen = max(pause, now - last), now, seen + 1
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return "error", chunk["error"]["message"][:200], pause
            text += chunk["choices"][0]["text"]
            finish = chunk["choices"][0]["finish_reason"] or finish
            if leave_at is not None and seen >= leave_at:
                return "left", "", pause
    return ("done" if finish == "length" else "error"), text if finish == "length" else f"finish {finish}", pause


async def load(server: Server, size: Size, seed: int, expected: list[str], outcome: Outcome) -> None:
    """Keep ``size.streams`` streams open while faults happen, then wait for the last one."""
    draw = random.Random(seed)
    work = prompts()
    end = time.monotonic() + size.seconds
    # A kept connection may be closed by the server in the moment in which it is used again: that is no lost stream.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=STREAM_S, limits=limits) as client:

        async def slot() -> None:
            while time.monotonic() < end:
                index = draw.randrange(PROMPTS)
                leave_at = draw.randrange(0, 12) if draw.random() < 0.15 else None
                try:
                    async with asyncio.timeout(STREAM_S):
                        how, said, pause = await complete(client, *work[index], leave_at)
                except TimeoutError:
                    how, said, pause = "hung", "", 0.0
                except httpx.HTTPError as error:
                    how, said, pause = "error", f"{type(error).__name__}: {error}", 0.0
                if how == "done":
                    how = "right" if said == expected[index] else "wrong"
                    outcome.pause_s = max(outcome.pause_s, pause)
                if how == "error":
                    outcome.errors[said] += 1
                outcome.ends[how] += 1

        faults = asyncio.create_task(harm(server, size, seed, outcome))
        await asyncio.gather(*(slot() for _ in range(size.streams)))
        await faults


async def harm(server: Server, size: Size, seed: int, outcome: Outcome) -> None:
    """Kill or stop a random worker now and then; note how long it takes until all are back."""
    draw = random.Random(1000 + seed)
    moments = sorted(draw.uniform(1.0, size.seconds) for _ in range(size.faults))
    started = time.monotonic()
    waits: dict[str, asyncio.Task[None]] = {}
    for moment in moments:
        await asyncio.sleep(max(0.0, moment - (time.monotonic() - started)))
        workers = server.workers()
        numbers = await asyncio.to_thread(server.metrics)
        up = [
            name
            for name in sorted(workers)
            if numbers.get(("instance_up", name)) == 1.0 and (name not in waits or waits[name].done())
        ]
        victims = [name for name in up if any(other != name and other[0] == name[0] for other in up)]
        how = draw.choice((signal.SIGKILL, signal.SIGSTOP))
        if victims:
            name = draw.choice(victims)
            os.kill(workers[name], how)
            outcome.faults += 1
            waits[name] = asyncio.create_task(recovered(server, name, workers[name], outcome))
    await asyncio.gather(*waits.values())


async def recovered(server: Server, name: str, old: int, outcome: Outcome) -> None:
    """Note the seconds until ``name`` runs in another process and takes work."""
    started = time.monotonic()
    while time.monotonic() - started < SETTLE_S:
        await asyncio.sleep(0.1)
        if server.workers().get(name, old) != old:
            up = (await asyncio.to_thread(server.metrics)).get(("instance_up", name))
            if up == 1.0:
                outcome.recovery_s.append(time.monotonic() - started)
                return
    outcome.missing.append(name)


def settle(server: Server, outcome: Outcome) -> None:
    """Wait until everything is idle and back, and note what is not."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        numbers = server.metrics()
        outcome.leaked = int(sum(value for (name, _), value in numbers.items() if name == "pages_owned"))
        down = [instance for (name, instance), value in numbers.items() if name == "instance_up" and not value]
        if (not outcome.leaked and not down) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    outcome.missing += down
    outcome.restarts = int(numbers.get(("restarts_total", ""), 0))
    outcome.retries = int(numbers.get(("retries_total", ""), 0))


async def reference(server: Server) -> list[str]:
    """The right text of every prompt."""
    async with httpx.AsyncClient(base_url=server.url, timeout=STREAM_S) as client:
        answers = await asyncio.gather(*(complete(client, *one, None) for one in prompts()))
    assert all(how == "done" for how, _, _ in answers), answers
    return [text for _, text, _ in answers]


def failures(outcomes: list[Outcome]) -> list[str]:
    """Every bound that does not hold."""
    found: list[str] = []
    for one in outcomes:
        where = f"seed {one.seed}"
        found += [f"{where}: {one.ends[how]} streams {how}" for how in ("wrong", "hung") if one.ends[how]]
        found += [f"{where}: {count} x {what}" for what, count in one.errors.items()]
        found += [f"{where}: only {one.complete:.2%} complete"] if one.complete < 0.99 else []
        found += [f"{where}: {one.leaked} pages leaked"] if one.leaked else []
        found += [f"{where}: {', '.join(one.missing)} did not come back"] if one.missing else []
        found += [f"{where}: the server ended with code {one.exit_code}"] if one.exit_code != 0 else []
    return found


def main() -> int:
    """Run the bench; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, fewer streams, under a minute of load")
    parser.add_argument("--check", action="store_true", help="exit 1 naming each bound that does not hold")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--streams", type=int, help="open at a time")
    args = parser.parse_args()
    size = QUICK if args.quick else FULL
    if args.streams:
        size = Size(args.streams, size.seconds, size.faults)
    outcomes = run(size, range(args.first_seed, args.first_seed + (1 if args.quick else args.seeds)))
    result = {
        "machine": describe(),
        "streams": size.streams,
        "seconds": size.seconds,
        "faults": size.faults,
        "recovery_p50_s": median([s for one in outcomes for s in one.recovery_s] or [0.0]),
        "recovery_max_s": max([s for one in outcomes for s in one.recovery_s] or [0.0]),
        "seeds": [{**vars(one), "complete": one.complete} for one in outcomes],
        "failures": failures(outcomes),
    }
    show(outcomes)
    save(result, RESULTS, args.quick)
    for failure in result["failures"]:
        print(f"does not hold: {failure}", file=sys.stderr)
    print(json.dumps(result))
    return int(args.check and bool(result["failures"]))


def run(size: Size, seeds: range) -> list[Outcome]:
    """One server per seed, after one that gives the right texts."""
    from tiny import write_tiny_checkpoint

    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="jdserve-chaos-") as name:
        folder = Path(name)
        model = str(write_tiny_checkpoint(folder / "tiny"))
        plan = write_plan(folder, plan_for(model, colocated=True))
        with running(plan, ["--served-model-name", "tiny"], folder / "reference.log") as server:
            expected = asyncio.run(reference(server))
        plan = write_plan(folder, plan_for(model))
        flags = ["--served-model-name", "tiny", "--oversubscribe", "--heartbeat-timeout", str(HEARTBEAT_S)]
        for seed in seeds:
            outcome = Outcome(seed)
            log = folder / f"seed{seed}.log"
            try:
                with running(plan, flags, log) as server:
                    asyncio.run(load(server, size, seed, expected, outcome))
                    settle(server, outcome)
                    outcome.exit_code = server.stop()
            except ServerFailed as error:
                outcome.errors[str(error)] += 1
            outcomes.append(outcome)
            print(
                f"seed {seed}: {dict(outcome.ends)}, {outcome.restarts} restarts, {outcome.retries} retries",
                file=sys.stderr,
            )
            if failures([outcome]):
                print("\n".join(failures([outcome])), file=sys.stderr)
                print(log.read_text()[-3000:], file=sys.stderr)
    return outcomes


def show(outcomes: list[Outcome]) -> None:
    """A table for people."""
    table = Table(title="2 prefill + 2 decode workers under fire")
    for column in (
        "seed",
        "faults",
        "right",
        "left",
        "wrong",
        "error",
        "hung",
        "restarts",
        "retries",
        "recovery s",
        "pause s",
        "leaked",
    ):
        table.add_column(column, justify="right")
    for one in outcomes:
        recovery = f"{median(one.recovery_s):.1f}" if one.recovery_s else "-"
        ends = [str(one.ends[how]) for how in ("right", "left", "wrong", "error", "hung")]
        rest = [str(one.restarts), str(one.retries), recovery, f"{one.pause_s:.1f}", str(one.leaked)]
        table.add_row(str(one.seed), str(one.faults), *ends, *rest)
    Console(stderr=True, width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
