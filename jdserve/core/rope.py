"""Rotary scaling: how a model stretches its rotary positions beyond the context it was first trained for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jdserve.core import jsonio
from jdserve.core.errors import InvalidPlan

Size = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Factor = Annotated[float, Meta(ge=1)]

RopeKind = Literal["linear", "dynamic", "llama3", "yarn"]


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to scale rotary frequencies, with every default filled in.

    ``dynamic`` needs a length for each token. A token of the prompt goes by the length of the prompt as the client sent
    it, a generated token by its own position + 1, and no other request matters: that is what transformers computes for
    one request in a fresh model with a cache. It holds in whatever chunks and on whichever instance a prompt is
    computed, and again after a preemption. Keys are not rotated anew when the sequence grows.

    Attributes:
        kind: ``linear`` divides all frequencies by ``factor``; ``dynamic`` raises the base with the length of a
            sequence that is longer than ``original_context`` (NTK); ``llama3`` divides the low frequencies and blends
            in between; ``yarn`` blends by rotations within the original context (Peng et al., arXiv:2309.00071) and
            multiplies cosines and sines by ``attention_factor``.
        factor: how much longer.
        original_context: positions before scaling.
        low_freq_factor, high_freq_factor: of ``llama3``: wavelengths above original_context / low are divided, those
            below original_context / high are kept.
        beta_fast, beta_slow: of ``yarn``: rotations above the first are kept, below the second divided.
        attention_factor: of ``yarn``.
        truncate: of ``yarn``: the borders of the blend are whole dimensions.
    """

    kind: RopeKind
    factor: Factor
    original_context: Size
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    attention_factor: PositiveFloat = 1.0
    truncate: bool = True

    def context(self, positions: int) -> int:
        """Most positions of a model whose configuration says ``max_position_embeddings: positions``.

        For ``linear`` and ``dynamic`` that key is the context before scaling; for ``llama3`` it is the context after
        it, and for ``yarn`` either.
        """
        stretched = int(self.original_context * self.factor)
        if self.kind == "llama3":
            return positions
        return max(positions, stretched) if self.kind == "yarn" else stretched

    def config(self) -> dict[str, Any]:
        """The ``rope_scaling`` of a ``config.json`` that :func:`read_rope` reads back to this."""
        written: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind in ("llama3", "yarn"):
            written["original_max_position_embeddings"] = self.original_context
        for key in _KEYS[self.kind]:
            written[key] = getattr(self, key)
        return written


_KEYS: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
}
"""What each kind has beside factor and original context."""


class _Kind(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None


class _Default(_Kind, forbid_unknown_fields=True, kw_only=True):
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: Annotated[float, Meta(ge=1, le=1)] = 1.0


class _Linear(_Default, kw_only=True):
    factor: Factor


class _Llama3(_Linear, kw_only=True):
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: Size | None = None


class _Yarn(_Linear, kw_only=True):
    original_max_position_embeddings: Size | None = None
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    finetuned: bool = True  # says how the weights came to be; nothing is computed from it


_READERS: Mapping[str, type[_Default]] = {
    "default": _Default,
    "linear": _Linear,
    "dynamic": _Linear,
    "llama3": _Llama3,
    "yarn": _Yarn,
}


def read_rope(
    path: str, value: Mapping[str, Any] | None, positions: int, original: int | None = None
) -> tuple[float | None, RopeScaling | None]:
    """Read a ``rope_scaling`` or ``rope_parameters`` object.

    Args:
        path: where it stands, for errors.
        value: the object; its kind is under ``rope_type`` or, in older files, ``type``.
        positions: ``max_position_embeddings``.
        original: ``original_max_position_embeddings`` of the file itself, which wins over that of the object.

    Returns:
        The base frequency if it is given in there, and the scaling, None where there is none.

    Raises:
        InvalidPlan: the kind is unknown, or a key is absent, unknown or out of bounds.
    """
    if value is None:
        return None, None
    try:
        return _read(value, positions, original)
    except InvalidPlan as error:
        raise InvalidPlan(path + error.path.removeprefix("$"), str(error).removeprefix(f"{error.path}: ")) from None


def _read(value: Mapping[str, Any], positions: int, original: int | None) -> tuple[float | None, RopeScaling | None]:
    named = jsonio.convert(value, _Kind)
    kind = named.rope_type or named.type or "default"
    if named.type not in (None, kind):
        raise InvalidPlan("$.type", f"{named.type!r} contradicts rope_type {kind!r}")
    if kind not in _READERS:
        known = ", ".join(map(repr, _READERS))
        raise InvalidPlan("$", f"rotary scaling {kind!r} is not supported; supported: {known}")
    read = jsonio.convert(value, _READERS[kind])
    match read:
        case _Llama3():
            if read.high_freq_factor <= read.low_freq_factor:
                raise InvalidPlan("$.high_freq_factor", f"must be above low_freq_factor {read.low_freq_factor}")
            scaling = RopeScaling(
                "llama3",
                read.factor,
                original or read.original_max_position_embeddings or positions,
                low_freq_factor=read.low_freq_factor,
                high_freq_factor=read.high_freq_factor,
            )
        case _Yarn():
            scaling = RopeScaling(
                "yarn",
                read.factor,
                original or read.original_max_position_embeddings or positions,
                beta_fast=read.beta_fast or 32.0,
                beta_slow=read.beta_slow or 1.0,
                attention_factor=_attention_factor(read),
                truncate=read.truncate,
            )
        case _Linear():
            scaling = RopeScaling("linear" if kind == "linear" else "dynamic", read.factor, positions)
        case _:
            scaling = None
    return read.rope_theta, scaling


def _attention_factor(yarn: _Yarn) -> float:
    """Equation 22 of the YaRN paper unless given, in the generalised form of two ``mscale`` weights."""
    if yarn.attention_factor is not None:
        return yarn.attention_factor

    def weight(scale: float) -> float:
        return 0.1 * scale * math.log(yarn.factor) + 1.0

    if yarn.mscale and yarn.mscale_all_dim:
        return weight(yarn.mscale) / weight(yarn.mscale_all_dim)
    return weight(1.0)
