"""Where the lengths of prompts and answers come from."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import msgspec

from jdserve.core.errors import InvalidWorkload
from jdserve.sim.traces import Trace


class Drawn(NamedTuple):
    """Lengths of as many requests as were asked for; ``blocks`` as in a workload."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...] = ()
    block_tokens: int = 512


class Uniform(msgspec.Struct, frozen=True, tag="uniform"):
    """All requests alike.

    Raises:
        InvalidWorkload: ``input`` is below 1 or ``output`` below 0.
    """

    input: int
    output: int

    def __post_init__(self) -> None:
        _check("input", self.input, 1)
        _check("output", self.output, 0)

    def draw(self, count: int, source: random.Random) -> Drawn:
        """The lengths of ``count`` requests."""
        return Drawn((self.input,) * count, (self.output,) * count)


class FromTrace(msgspec.Struct, frozen=True, tag="trace"):
    """Lengths (and shared blocks) of the rows of a trace.

    Attributes:
        trace: the rows.
        resample: draw rows at random, with replacement; otherwise take them in their order, again and again.
    """

    trace: Trace
    resample: bool = True

    def draw(self, count: int, source: random.Random) -> Drawn:
        """The lengths of ``count`` requests."""
        trace, rows = self.trace, len(self.trace.inputs)
        order = source.choices(range(rows), k=count) if self.resample else [index % rows for index in range(count)]
        return Drawn(
            tuple(trace.inputs[index] for index in order),
            tuple(trace.outputs[index] for index in order),
            tuple(trace.blocks[index] for index in order) if trace.blocks else (),
            trace.block_tokens,
        )


class LogNormal(msgspec.Struct, frozen=True, tag="lognormal"):
    """Prompt and answer lengths whose logarithms are normal and correlated.

    Attributes:
        input_mean, output_mean: of the logarithm.
        input_sigma, output_sigma: deviation of the logarithm.
        correlation: of the two logarithms.
        input_max, output_max: longer draws are cut to this.
    """

    input_mean: float
    input_sigma: float
    output_mean: float
    output_sigma: float
    correlation: float = 0.0
    input_max: int = 1 << 20
    output_max: int = 1 << 20

    def __post_init__(self) -> None:
        _check("input_sigma", self.input_sigma, 0)
        _check("output_sigma", self.output_sigma, 0)
        if not -1 <= self.correlation <= 1:
            raise InvalidWorkload(f"correlation: must be between -1 and 1, got {self.correlation}")

    @classmethod
    def fit(cls, trace: Trace) -> LogNormal:
        """The distribution that is likeliest to have given the lengths of ``trace``, cut at its longest ones."""
        inputs = [math.log(length) for length in trace.inputs]
        outputs = [math.log(max(length, 1)) for length in trace.outputs]
        rows = len(inputs)
        input_mean, output_mean = math.fsum(inputs) / rows, math.fsum(outputs) / rows
        input_sigma = math.sqrt(math.fsum((x - input_mean) ** 2 for x in inputs) / rows)
        output_sigma = math.sqrt(math.fsum((y - output_mean) ** 2 for y in outputs) / rows)
        both = math.fsum((x - input_mean) * (y - output_mean) for x, y in zip(inputs, outputs, strict=True)) / rows
        spread = input_sigma * output_sigma
        return cls(
            input_mean,
            input_sigma,
            output_mean,
            output_sigma,
            max(-1.0, min(1.0, both / spread)) if spread else 0.0,
            max(trace.inputs),
            max(*trace.outputs, 1),
        )

    def draw(self, count: int, source: random.Random) -> Drawn:
        """The lengths of ``count`` requests."""
        inputs: list[int] = []
        outputs: list[int] = []
        rest = math.sqrt(1 - self.correlation**2)
        for _ in range(count):
            x, y = source.gauss(0, 1), source.gauss(0, 1)
            y = self.correlation * x + rest * y
            inputs.append(_whole(self.input_mean + self.input_sigma * x, self.input_max))
            outputs.append(_whole(self.output_mean + self.output_sigma * y, self.output_max))
        return Drawn(tuple(inputs), tuple(outputs))


class SharedPrefix(msgspec.Struct, frozen=True, tag="prefix"):
    """Requests that begin with one of a few common prefixes, such as system prompts.

    Attributes:
        lengths: of what follows the prefix, and of the answers.
        groups: number of prefixes; each request draws one.
        blocks: length of a prefix, in blocks.
        block_tokens: tokens of a block.
    """

    lengths: Uniform | FromTrace | LogNormal
    groups: int
    blocks: int
    block_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("groups", "blocks", "block_tokens"):
            _check(name, getattr(self, name), 1)

    def draw(self, count: int, source: random.Random) -> Drawn:
        """The lengths and blocks of ``count`` requests."""
        rows = self.lengths.draw(count, source)
        prefixes = [tuple(range(group * self.blocks, (group + 1) * self.blocks)) for group in range(self.groups)]
        return Drawn(
            tuple(length + self.blocks * self.block_tokens for length in rows.inputs),
            rows.outputs,
            tuple(source.choices(prefixes, k=count)),
            self.block_tokens,
        )


Lengths = Uniform | FromTrace | LogNormal | SharedPrefix


def _whole(log: float, most: int) -> int:
    return most if log > math.log(most) else max(1, round(math.exp(log)))


def _check(name: str, value: float, least: int) -> None:
    if not (math.isfinite(value) and value >= least):
        raise InvalidWorkload(f"{name}: must be at least {least}, got {value}")
