"""OPT models on A100-80G SXM as measured by the authors of DistServe, with the overheads of their engine.

The coefficients and KV capacities ship in ``data/`` (see ``data/DATA.md``).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import msgspec

from jdserve.core.plan import Role
from jdserve.core.steptime import StepTime
from jdserve.cost.latency import Unmeasured, both, linearised
from jdserve.cost.stepcost import Coefficients, Linear, Phased, StepCost, Switched

Engine = Literal["distserve", "vllm"]

A100_MODELS = ("opt-13b", "opt-66b", "opt-175b")


class Overhead(msgspec.Struct, frozen=True):
    """What an engine adds to the measured steps; by default, what the simulator of the reference engine adds.

    Attributes:
        stage_s: seconds in each stage, times the number of stages.
        first_s: seconds in the first stage: the driver's calls.
        new_token_s, context_s, seq_s: seconds in the first stage per prompt token, per token of context that decoding
            reads, and per decoding sequence.
        prefill_s: more seconds in the first stage of steps that prefill.
        prefill, decode: factors on the measured times.
    """

    stage_s: float = 1e-3
    first_s: float = 2e-3
    new_token_s: float = 1e-7
    context_s: float = 1e-7
    seq_s: float = 0.0
    prefill_s: float = 0.0
    prefill: float = 1.0
    decode: float = 1.0


REFERENCE = Overhead()

NO_OVERHEAD = Overhead(stage_s=0.0, first_s=0.0, new_token_s=0.0, context_s=0.0)


@cache
def _table() -> Mapping[str, Any]:
    return json.loads(files("jdserve.cost").joinpath("data/distserve_profile_a100.json").read_text())


@cache
def a100_kv_tokens(model: str) -> Mapping[tuple[int, int], int]:
    """KV capacity in tokens of an instance by (tp, pp), as the reference engine found it on A100-80G.

    Raises:
        Unmeasured: ``model`` is not in the table.
    """
    text = files("jdserve.cost").joinpath("data/opt_max_num_tokens_a100.csv").read_text()
    rows = [row for row in csv.DictReader(text.splitlines()) if row["model"] == f"facebook/{model}"]
    if not rows:
        raise Unmeasured(f"no KV capacities of {model!r}; known: {', '.join(A100_MODELS)}")
    return {(int(row["tp"]), int(row["pp"])): int(row["max_num_tokens"]) for row in rows}


class A100Profile:
    """Step times of an OPT model on A100s.

    Prefill T = a + b sum(l) + c sum(l^2), decode T = a + b sum(context) + c batch with one fit below and one from a
    batch size on. Stages share T evenly; the engine adds its overhead. Tensor-parallel degrees between measured ones
    are interpolated linearly in 1 / tp.

    Args:
        model: one of :data:`A100_MODELS`.
        engine: whose measurements.
        calibrated: with the factors that its authors put on their raw measurements; not there for opt-175b.
        overhead: what the engine adds.

    Raises:
        Unmeasured: no such model.
    """

    def __init__(
        self,
        model: str,
        engine: Engine = "distserve",
        *,
        calibrated: bool | None = None,
        overhead: Overhead = REFERENCE,
    ) -> None:
        head, raw = f"{engine}_head_calibrated", f"{engine}_raw_fit_incl_175b"
        name = f"facebook/{model}"
        table = _table()
        if calibrated is None:
            calibrated = name in table[head]
        chosen = table[head if calibrated else raw]
        if name not in chosen:
            raise Unmeasured(f"no measurements of {model!r}; known: {', '.join(A100_MODELS)}")
        self._model, self._engine, self._overhead = model, engine, overhead
        self._rows: dict[int, Mapping[str, Any]] = {int(tp): row for tp, row in chosen[name].items()}

    @property
    def name(self) -> str:
        """See :class:`~jdserve.cost.latency.LatencyModel`."""
        return f"{self._model} on A100-80G as measured for {self._engine}"

    def threshold(self, tp: int) -> int:
        """Decode batch from which the second fit holds."""
        key = "decoding_large_small_bs_threshold"
        return self._rows[min(self._rows, key=lambda known: abs(known - tp))][key]

    def _coefficients(self, kind: str, tp: int) -> tuple[float, float, float]:
        """a, b, c in seconds."""
        if tp in self._rows:
            a, b, c = self._rows[tp][kind]
            return a / 1e3, b / 1e3, c / 1e3
        below = [known for known in self._rows if known < tp]
        above = [known for known in self._rows if known > tp]
        if not below or not above:
            raise Unmeasured(f"{self._model} on A100 was measured with tp {sorted(self._rows)}, not {tp}")
        low, high = max(below), min(above)
        weight = (1 / tp - 1 / high) / (1 / low - 1 / high)
        pairs = zip(self._rows[low][kind], self._rows[high][kind], strict=True)
        a, b, c = ((weight * x + (1 - weight) * y) / 1e3 for x, y in pairs)
        return a, b, c

    def _prefill(self, tp: int) -> StepTime:
        a, b, c = (value * self._overhead.prefill for value in self._coefficients("prefill", tp))
        return StepTime(a, b, c, 2 * c)  # the pairs of a chunk and its prefix, in what a whole prompt would take

    def _decode(self, tp: int, kind: str) -> StepTime:
        a, b, c = (value * self._overhead.decode for value in self._coefficients(kind, tp))
        return StepTime(a, per_decode_seq=c, per_context_token=b)

    def _linear(self, time: StepTime, pp: int) -> Linear:
        added = self._overhead
        prefills, decodes = time.per_new_token > 0, time.per_context_token > 0
        stage = Coefficients.of(time, 1 / pp).plus(Coefficients.of(StepTime(added.stage_s * pp)))
        first = StepTime(
            added.first_s + (added.prefill_s if prefills else 0.0),
            added.new_token_s if prefills else 0.0,
            per_decode_seq=added.seq_s if decodes else 0.0,
            per_context_token=added.context_s if decodes else 0.0,
        )
        driver = Coefficients.of(first)
        # the context without the token that is fed in
        driver = driver._replace(decode_seq=driver.decode_seq - driver.context_token)
        return Linear(stage, pp, driver)

    def cost(self, role: Role, tp: int, pp: int) -> StepCost:
        """See :class:`~jdserve.cost.latency.LatencyModel`."""
        if role == "prefill":
            return self._linear(self._prefill(tp), pp)
        small, large = (self._decode(tp, kind) for kind in ("decoding_smallbs", "decoding_largebs"))
        at = self.threshold(tp)
        decode = Switched(self._linear(small, pp), self._linear(large, pp), at)
        if role == "decode":
            return decode
        prefill = self._prefill(tp)
        mixed = Switched(self._linear(both(prefill, small), pp), self._linear(both(prefill, large), pp), at)
        return Phased(self._linear(prefill, pp), decode, mixed)

    def steptime(self, role: Role, tp: int, pp: int) -> StepTime:
        """See :class:`~jdserve.cost.latency.LatencyModel`; one line through both decode fits."""
        return linearised(self.cost(role, tp, pp), role, tokens=2048, batch=128, context=1024).time
