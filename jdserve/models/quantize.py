"""Matrices as 8-bit integers: symmetric, one float32 scale per output channel, computed once at conversion.

Weight w[o, i] is stored as q[o, i] = round(w[o, i] / s[o]) with s[o] = max_i |w[o, i]| / 127. A product with x is
(x q^T) s: the scale belongs to a row of the result, so the integers are all that is read of the matrix. Activations and
KV keep the plan's dtype; vectors (norms, biases) are stored as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from jdserve.models.interface import SCALE
from jdserve.models.skeleton import Parameter

LARGEST = 127
"""Largest stored integer; -128 stays unused, so that the range is the same on both sides."""


def quantized_names(parameters: Iterable[Parameter]) -> frozenset[str]:
    """Names of those that are stored as integers."""
    return frozenset(one.name for one in parameters if one.dtype == np.int8)


def quantize(arrays: Mapping[str, np.ndarray], names: frozenset[str]) -> dict[str, np.ndarray]:
    """Replace the arrays of these names, [..., out, in], by integers, and add their scales [..., out] float32."""
    stored: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if name in names:
            stored[name], stored[name + SCALE] = int8_of(array)
        else:
            stored[name] = array
    return stored


def int8_of(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers [..., out, in] and scales [..., out] of a weight; a channel of zeros has scale 1."""
    wide = weight.astype(np.float32)
    largest = np.abs(wide).max(axis=-1)
    scale = np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)
    return np.rint(wide / scale[..., None]).clip(-LARGEST, LARGEST).astype(np.int8), scale
