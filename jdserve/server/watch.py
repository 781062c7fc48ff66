"""One sample of an answer, timed from its arrival to its end, and what is told of it then."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from jdserve.core.request import Request
from jdserve.runtime.outputs import Phases, TokenOutput
from jdserve.server.text import TextDelta

SERVED = "jdserve.served"
"""Where a request's scope collects its samples that have ended."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One sample, after its end. Times are seconds of the monotonic clock.

    Attributes:
        id: of the engine's request.
        arrival, end: of the sample; ``first`` is that of its first token, None where none came.
        prompt_tokens, cached_tokens, output_tokens, max_tokens: how many there were, and could have been.
        finish: ``stop``, ``length``, ``abort`` (the client left), ``error`` or ``rejected``.
        phases: where the time went, None where the engine never took it.
    """

    id: str
    arrival: float
    end: float
    first: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    finish: str
    phases: Phases | None

    @property
    def whole(self) -> bool:
        """Whether the client got all of it."""
        return self.finish in ("stop", "length")

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None where none came."""
        return None if self.first is None else self.first - self.arrival

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None where there was no second."""
        if self.first is None or self.output_tokens < 2:
            return None
        return (self.end - self.first) / (self.output_tokens - 1)

    def times(self) -> dict[str, tuple[float, float]]:
        """Begin and end of each phase that it went through: queue, prefill, transfer, decode."""
        phases, found = self.phases, dict[str, tuple[float, float]]()
        if phases is None or not phases.dispatched:
            return found
        found["queue"] = (phases.arrived, phases.launched or self.end)
        if phases.launched:
            found["prefill"] = (phases.launched, phases.prefilled)
            begun = phases.landed or (phases.prefilled if not phases.handed_off else 0.0)
            if phases.handed_off:
                found["transfer"] = (phases.handed_off, phases.landed or self.end)
            if begun and self.output_tokens > 1:
                found["decode"] = (begun, self.end)
        return found


class Watch:
    """Times one sample.

    Args:
        request: that the engine gets.
        on_begin: told once that it runs, with the prompt tokens that the prefix cache had.
        on_tokens: told of the tokens of each delta, and of the seconds since the one before, None for the first.
        on_end: told once, of the whole.
    """

    def __init__(
        self,
        request: Request,
        *,
        on_begin: Callable[[int], None],
        on_tokens: Callable[[int, float | None], None],
        on_end: Callable[[Served], None],
    ) -> None:
        self._request = request
        self._on_begin, self._on_tokens, self._on_end = on_begin, on_tokens, on_end
        self.arrival = time.monotonic()
        self._first: float | None = None
        self._last = 0.0
        self._tokens = 0
        self._begun = False
        self._cached = 0
        self._phases: Phases | None = None
        self._ended = False

    def heard(self, output: TokenOutput) -> None:
        """Take note of what the engine says."""
        self._phases = output.phases or self._phases
        self._cached = max(self._cached, output.cached_tokens)
        if not self._begun:
            self._begun = True
            self._on_begin(self._cached)

    def saw(self, delta: TextDelta) -> None:
        """Take note of a delta; its ``finish`` ends the watch."""
        now, tokens = time.monotonic(), delta.produced
        if tokens > self._tokens:
            self._on_tokens(tokens - self._tokens, None if self._first is None else now - self._last)
            self._tokens, self._last = tokens, now
            self._first = now if self._first is None else self._first
        if delta.finish is not None:
            self.end(delta.finish)

    def end(self, finish: str) -> None:
        """The sample is over; only the first call counts."""
        if self._ended:
            return
        self._ended = True
        self._on_end(
            Served(
                id=self._request.id,
                arrival=self.arrival,
                end=time.monotonic(),
                first=self._first,
                prompt_tokens=len(self._request.prompt),
                cached_tokens=self._cached,
                output_tokens=self._tokens,
                max_tokens=self._request.params.max_tokens,
                finish=finish,
                phases=self._phases,
            )
        )
