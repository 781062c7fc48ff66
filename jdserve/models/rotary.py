"""Rotary positions (Su et al., arXiv:2104.09864) in the half-split convention of Hugging Face, and their scalings.

Angles at position 8,000 turn one unit in the last place of a frequency into 5e-4 radians, so frequencies are rounded to
float32 where the code that trained and tested the models rounds them: after the power, after its inverse, and after
each step of a scaling.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jdserve.core.rope import RopeScaling

Tables = tuple[jax.Array, jax.Array]
"""Cosines and sines, [T, head_dim / 2] each."""


def rotary_tables(
    positions: jax.Array, lengths: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Tables:
    """Cosines and sines of position * frequency, float32 [T, head_dim / 2].

    Args:
        positions: int32 [T].
        lengths: int32 [T], the length of sequence that a ``dynamic`` scaling goes by; the others do not read it.
        head_dim: elements of a head.
        theta: base; unscaled, frequency i is theta ** (-2 i / head_dim).
        scaling: see :class:`~jdserve.core.rope.RopeScaling`.
    """
    place = positions.astype(jnp.float32)[:, None]
    if scaling is not None and scaling.kind == "dynamic":
        angles = place * _dynamic(lengths, head_dim, theta, scaling)
    else:
        angles = place * jnp.asarray(frequencies(head_dim, theta, scaling))[None, :]
    factor = 1.0 if scaling is None else scaling.attention_factor
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Frequencies float32 [head_dim / 2] that no length changes: those of ``dynamic`` within the original context."""
    plain = np.float32(1) / _powers(head_dim, theta)
    if scaling is None:
        return plain
    match scaling.kind:
        case "dynamic":
            return plain
        case "linear":
            return plain / np.float32(scaling.factor)
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(head_dim, theta, scaling)


def _powers(head_dim: int, theta: float) -> np.ndarray:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long wavelengths divided, short ones kept, and in between a blend that is linear in the rotations."""
    low, high, factor = (np.float32(x) for x in (scaling.low_freq_factor, scaling.high_freq_factor, scaling.factor))
    original = np.float32(scaling.original_context)
    wavelength = np.float32(2 * math.pi) / plain
    share = (original / wavelength - low) / (high - low)
    blend = (1 - share) * plain / factor + share * plain
    return np.where(wavelength > original / low, plain / factor, np.where(wavelength < original / high, plain, blend))


def _yarn(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Equations 17 to 21 of arXiv:2309.00071, the ramp being linear in the dimension."""

    def dimension(rotations: float) -> float:
        """The dimension that turns so often within the original context."""
        return head_dim * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    kept = 1 - ramp
    powers = _powers(head_dim, theta)
    plain, divided = np.float32(1) / powers, np.float32(1) / (np.float32(scaling.factor) * powers)
    return divided * (1 - kept) + plain * kept


def _dynamic(lengths: jax.Array, head_dim: int, theta: float, scaling: RopeScaling) -> jax.Array:
    """Frequencies [T, head_dim / 2] of a base that grows with the length beyond the original context.

    The base is theta * growth ** (d / (d - 2)), growth = factor * length / original - (factor - 1). Only the powers of
    the growth, which is small, are computed on the device: those of the base would lose a digit.
    """
    original, factor = scaling.original_context, scaling.factor
    length = jnp.maximum(lengths, original).astype(jnp.float32)
    growth = length * (factor / original) - (factor - 1.0)
    exponents = jnp.asarray(np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim - 2))
    shrink = jnp.exp(-jnp.log(growth)[:, None] * exponents[None, :])
    return jnp.asarray(frequencies(head_dim, theta))[None, :] * shrink


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [T, heads, head_dim]: the pairs are element i of the first half and element i of the second."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
