"""From what a step left on the device to one row per request."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from jdserve.core.request import Request
from jdserve.ops.sampling import TopLogprobs
from jdserve.policy.commands import Chunk
from jdserve.runtime.buckets import Launch
from jdserve.runtime.guides import Guided
from jdserve.runtime.outputs import TokenLogprobs
from jdserve.runtime.steps import StepOutputs

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class RowResult:
    """What a step computed for one request whose prompt is complete.

    Attributes:
        token: chosen.
        finite: False where the logits held no number; the token means nothing then.
        error: what is wrong with the request alone; empty where nothing is.
        logprobs: of the token, where the request wants them.
        prompt_logprobs: of every prompt token but the first, where the request wants them.
    """

    token: int
    finite: bool = True
    error: str = ""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> dict[str, RowResult]:
        """Wait for the step; one row per request that got a token. Raises whatever broke the step."""
        ...


@dataclass
class AdmittedSeq:
    """A request that an executor keeps state of.

    Attributes:
        request: as admitted.
        slot: row of the device state.
        pages: entries of its block table that the device knows.
        token: last one that was read back from the device, -1 before the first.
        scored: log-probabilities of its prompt so far.
        guided: what its text must look like, where it must.
    """

    request: Request
    slot: int
    pages: int
    token: int = -1
    scored: list[TokenLogprobs] = field(default_factory=list)
    guided: Guided | None = None


class Outcome(Protocol[T_co]):
    """What comes of work that a stage was given; a :class:`concurrent.futures.Future` is one."""

    def result(self) -> T_co:
        """Wait for it. Raises whatever broke the work."""
        ...


class LaunchedStep:
    """The launches of one step and what they will give.

    Args:
        parts: in the order of launching.
        seqs: the requests in them, and perhaps more.
    """

    def __init__(self, parts: Seq[tuple[Launch, Outcome[StepOutputs]]], seqs: Mapping[str, AdmittedSeq]) -> None:
        self._parts = parts
        names = {chunk.request_id for launch, _ in parts for chunk in launch.chunks}
        names |= {seq.request_id for launch, _ in parts for seq in launch.decodes}
        # By value: a request may be forgotten before the step has ended.
        self._seqs = {name: seqs[name] for name in names}

    def result(self) -> dict[str, RowResult]:
        """Wait for the tokens and read them back."""
        rows: dict[str, RowResult] = {}
        for launch, outcome in self._parts:
            outputs = outcome.result()
            tokens, finite = np.asarray(outputs.sampled.tokens), np.asarray(outputs.sampled.finite)
            self._score(outputs.prompt, launch.chunks)
            asked = [(index, chunk.request_id) for index, chunk in enumerate(launch.chunks) if chunk.last]
            asked += [(launch.shape.segments + index, seq.request_id) for index, seq in enumerate(launch.decodes)]
            top = _host(outputs.sampled.logprobs) if any(self._wants(name) is not None for _, name in asked) else None
            for row, name in asked:
                wanted = self._wants(name)
                seq = self._seqs[name]
                seq.token = int(tokens[row])
                if seq.guided is not None:
                    seq.guided.take((seq.token,))
                scored = row < launch.shape.segments and seq.request.params.prompt_logprobs is not None
                rows[name] = RowResult(
                    token=int(tokens[row]),
                    finite=bool(finite[row]),
                    error="" if seq.guided is None else seq.guided.error,
                    logprobs=None if wanted is None or top is None else _entry(top, row, int(tokens[row]), wanted),
                    prompt_logprobs=tuple(seq.scored) if scored else None,
                )
        return rows

    def _wants(self, name: str) -> int | None:
        return self._seqs[name].request.params.logprobs

    def _score(self, prompt: TopLogprobs, chunks: tuple[Chunk, ...]) -> None:
        """Collect the log-probabilities of the prompt tokens that follow those of the launch."""
        if all(self._seqs[chunk.request_id].request.params.prompt_logprobs is None for chunk in chunks):
            return
        top, at = _host(prompt), 0
        for chunk in chunks:
            seq = self._seqs[chunk.request_id]
            wanted = seq.request.params.prompt_logprobs
            if wanted is not None:
                following = seq.request.prompt[chunk.start + 1 : chunk.start + chunk.count + 1]
                seq.scored += [_entry(top, at + index, token, wanted) for index, token in enumerate(following)]
            at += chunk.count


def _host(top: TopLogprobs) -> TopLogprobs:
    return TopLogprobs(*(np.asarray(leaf) for leaf in top))


def _entry(top: TopLogprobs, row: int, token: int, wanted: int) -> TokenLogprobs:
    likeliest = zip(top.top_ids[row, :wanted].tolist(), top.top[row, :wanted].tolist(), strict=True)
    return TokenLogprobs(token, float(top.logprob[row]), int(top.rank[row]), tuple(likeliest))
