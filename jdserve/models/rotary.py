"""Rotary positions (Su et al., arXiv:2104.09864) in the half-split convention of Hugging Face."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Tables = tuple[jax.Array, jax.Array]
"""Cosines and sines, [T, head_dim / 2] each."""


def rotary_tables(positions: jax.Array, head_dim: int, theta: float) -> Tables:
    """Cosines and sines of position * theta ** (-2 i / head_dim), [T, head_dim / 2].

    Float32 throughout; the frequencies are rounded to it once, from float64.
    """
    frequencies = np.float64(theta) ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [T, heads, head_dim]: the pairs are element i of the first half and element i of the second."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
