"""``Profile``: measured step times of one model on one kind of device, what the planner fits its coefficients to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jdserve.core import jsonio
from jdserve.core.errors import InvalidPlan
from jdserve.core.spec import DType, ModelSpec

PROFILE_VERSION = 1

Count = Annotated[int, Meta(ge=0)]


class ProfileRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured step.

    Attributes:
        role: what the instance ran.
        tp, pp: its parallel degrees.
        batch: sequences in the step.
        tokens: new tokens of all of them together.
        context: tokens whose KV was read, of all of them together.
        seconds: median time from launch to token.
    """

    role: Literal["prefill", "decode", "mixed"]
    tp: Annotated[int, Meta(ge=1)]
    pp: Annotated[int, Meta(ge=1)]
    batch: Annotated[int, Meta(ge=1)]
    tokens: Count
    context: Count
    seconds: Annotated[float, Meta(gt=0)]


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measurements of one model on one device.

    Attributes:
        version: of this format.
        device: name of the device, for example ``NVIDIA H100 80GB HBM3``.
        model: shape of the measured model.
        dtype: of weights, activations and KV.
        rows: the measurements.
        transfer_bytes_per_s: measured bandwidth of a KV pull, None where there was no second device.
    """

    version: Literal[1] = PROFILE_VERSION
    device: str
    model: ModelSpec
    dtype: DType
    rows: Annotated[tuple[ProfileRow, ...], Meta(min_length=1)]
    transfer_bytes_per_s: Annotated[float, Meta(gt=0)] | None = None

    @classmethod
    def from_json(cls, data: bytes | str) -> Profile:
        """Parse and check a profile.

        Raises:
            InvalidPlan: with the JSON path and the bound.
        """
        profile = jsonio.decode(data, cls)
        profile.check()
        return profile

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read and check the profile at ``path``.

        Raises:
            InvalidPlan: the file cannot be read, or is refused.
        """
        profile = jsonio.read(path, cls)
        profile.check()
        return profile

    def to_json(self) -> bytes:
        """The profile as indented JSON."""
        return jsonio.encode(self)

    def check(self) -> None:
        """Check each row's degrees against the model.

        Raises:
            InvalidPlan: with the JSON path and the valid values.
        """
        for index, row in enumerate(self.rows):
            self.model.check_parallel(row.tp, row.pp, f"$.rows[{index}]")
            if row.role != "decode" and row.tokens < 1:
                raise InvalidPlan(f"$.rows[{index}].tokens", f"a {row.role} step has at least 1 new token, got 0")
