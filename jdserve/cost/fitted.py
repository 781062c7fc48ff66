"""A latency model fitted to a measured :class:`~jdserve.core.profile.Profile`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from jdserve.core.plan import Role
from jdserve.core.profile import Profile, ProfileRow
from jdserve.core.steptime import StepFeatures, StepTime
from jdserve.cost.fit import Fit, FitError, fit_steps
from jdserve.cost.latency import Unmeasured, both, linear_cost
from jdserve.cost.stepcost import Linear, Phased, StepCost

_Key = tuple[str, int, int]


def features_of(row: ProfileRow) -> StepFeatures:
    """What a measured step did.

    A prefill row has ``batch`` equal prompts, with the context as their prefixes. In a mixed row one sequence is a
    chunk without a prefix and the others decode: ``tokens`` counts both, ``context`` is what the decoding ones read.
    """
    if row.role == "decode":
        return StepFeatures(decode_seqs=row.batch, decode_context=row.context)
    if row.role == "prefill":
        return StepFeatures(row.tokens, row.tokens**2 // row.batch, row.tokens * row.context // row.batch)
    chunk = max(row.tokens - (row.batch - 1), 1)
    return StepFeatures(chunk, chunk * chunk, 0, row.batch - 1, row.context)


class FittedModel:
    """Non-negative least squares over the rows of each role and pair of degrees.

    Degrees with pipeline stages that were not measured take those of the same tensor-parallel degree without stages,
    shared evenly, and a hand-off per stage.

    Attributes:
        fits: coefficients and error by (role, tp, pp), as measured.

    Args:
        profile: the measurements.
        hand_off_s: seconds per stage that a pipeline adds, where it was not measured.
    """

    def __init__(self, profile: Profile, hand_off_s: float = 0.0) -> None:
        groups: dict[_Key, list[ProfileRow]] = defaultdict(list)
        for row in profile.rows:
            groups[row.role, row.tp, row.pp].append(row)
        for (role, tp, pp), rows in list(groups.items()):
            if role == "mixed":  # a mixed step does what the others do: their rows tell its coefficients too
                rows.extend(groups.get(("prefill", tp, pp), []) + groups.get(("decode", tp, pp), []))
        self._device = profile.device
        self._hand_off = hand_off_s
        self.fits: Mapping[_Key, Fit] = {
            key: fit_steps([features_of(row) for row in rows], [row.seconds for row in rows])
            for key, rows in sorted(groups.items())
        }

    @property
    def name(self) -> str:
        """See :class:`~jdserve.cost.latency.LatencyModel`."""
        return f"fitted to a profile of {self._device}, mean error {self.error.mean:.1%}, worst {self.error.worst:.1%}"

    @property
    def error(self) -> FitError:
        """Over all rows."""
        errors = [fit.error for fit in self.fits.values()]
        rows = sum(error.rows for error in errors)
        return FitError(rows, sum(e.mean * e.rows for e in errors) / rows, max(e.worst for e in errors))

    def _fit(self, role: str, tp: int, pp: int) -> StepTime | None:
        fit = self.fits.get((role, tp, pp))
        if fit is None and pp > 1 and (whole := self.fits.get((role, tp, 1))) is not None:
            time = whole.time
            return StepTime(time.base + pp * self._hand_off, *_tail(time))
        return None if fit is None else fit.time

    def _known(self, role: str, tp: int, pp: int) -> StepTime:
        time = self._fit(role, tp, pp)
        if time is None:
            measured = ", ".join(f"{t}x{p}" for r, t, p in self.fits if r == role) or "none"
            raise Unmeasured(f"the profile has no {role} rows for tp {tp} pp {pp}; measured (tp x pp): {measured}")
        return time

    def _mixed(self, tp: int, pp: int) -> StepTime:
        mixed = self._fit("mixed", tp, pp)
        return mixed or both(self._known("prefill", tp, pp), self._known("decode", tp, pp))

    def steptime(self, role: Role, tp: int, pp: int) -> StepTime:
        """See :class:`~jdserve.cost.latency.LatencyModel`."""
        return self._mixed(tp, pp) if role == "colocated" else self._known(role, tp, pp)

    def cost(self, role: Role, tp: int, pp: int) -> StepCost:
        """See :class:`~jdserve.cost.latency.LatencyModel`; a colocated instance takes each kind of step as measured."""
        if role != "colocated":
            return linear_cost(self._known(role, tp, pp), pp)
        prefill, decode = (linear_cost(self._known(one, tp, pp), pp) for one in ("prefill", "decode"))
        return Phased(prefill, decode, Linear.of(self._mixed(tp, pp), pp))


def _tail(time: StepTime) -> tuple[float, ...]:
    return (
        time.per_new_token,
        time.per_new_pair,
        time.per_prefix_pair,
        time.per_decode_seq,
        time.per_context_token,
    )
