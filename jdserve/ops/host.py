"""Memory of the host that CPU devices and numpy share without a copy."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence as Seq

import numpy as np
from jax import Array

ALIGNMENT = 64
"""Bytes: what lies so is taken over by XLA on CPU instead of being copied."""


def aligned(shape: Seq[int], dtype: np.dtype) -> np.ndarray:
    """An array with nothing in it, for ``device_put`` to borrow once it is filled."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def host_memory(array: Array) -> np.ndarray:
    """The memory of a computed array on one CPU device, read-only.

    Unlike ``np.asarray`` this holds no reference, which would turn the donation of a pool into a copy of it. So the
    caller keeps the array, and launches nothing that it is donated to, while the memory is read.
    """
    address = ctypes.cast(array.unsafe_buffer_pointer(), ctypes.POINTER(ctypes.c_uint8))
    view = np.ctypeslib.as_array(address, (array.nbytes,)).view(array.dtype).reshape(array.shape)
    view.flags.writeable = False
    return view
