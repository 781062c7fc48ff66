"""Weights from the safetensors files of a Hugging Face folder straight onto devices.

One file is open at a time, and of each tensor every part that a device wants is read by itself, once. The host so holds
what is mapped of one file and one part, beside what the devices hold; on accelerators that is all it ever holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdserve.compat import Device
from jdserve.models.hf_checkpoint import open_shard, read_headers
from jdserve.models.progress import Progress, silent
from jdserve.models.source import check_held
from jdserve.ops.host import aligned


def stream(
    folder: Path,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    parts: Mapping[str, tuple[str, ...]],
    progress: Progress = silent,
) -> dict[str, jax.Array]:
    """Read weights onto devices, each device its part, cast to the wanted dtype.

    Args:
        folder: a Hugging Face model folder.
        wanted: what to make, with a sharding, by name of the parameter.
        parts: tensors that are stacked to make it; none where it is the tensor of its own name.
        progress: told after each tensor.

    Returns:
        A ``jax.Array`` per name of ``wanted``.

    Raises:
        CheckpointError: files or tensors are missing, damaged or misshapen; the message names them.
    """
    headers = read_headers(folder)
    arrays = {name: _Growing(wanted[name], len(parts[name])) for name in wanted}
    tensors = {tensor: (name, row) for name in wanted for row, tensor in enumerate(parts[name] or (name,))}
    check_held(folder, headers.shapes, {tensor: arrays[name].tensor_shape for tensor, (name, _) in tensors.items()})
    done = 0
    for file in sorted({headers.files[tensor] for tensor in tensors}):
        with open_shard(folder / file) as shard:
            for tensor, (name, row) in tensors.items():
                if headers.files[tensor] == file:
                    progress("load", done / len(tensors))
                    arrays[name].add(shard.get_slice(tensor), row)
                    done += 1
    progress("load", 1.0)
    return {name: growing.array() for name, growing in arrays.items()}


_PIECE = 8 << 20
"""Bytes, as cast, that are read at a time."""

Part = tuple[tuple[int, int], ...]
"""What a device holds of an array: first and last + 1 along each axis."""


class _Growing:
    """An array that is read tensor by tensor, part by part; devices that hold the same part share one reading of it.

    Attributes:
        tensor_shape: of each tensor it is made of.

    Args:
        target: what it becomes.
        stacked: how many tensors are stacked in it, 0 where it is one.
    """

    def __init__(self, target: jax.ShapeDtypeStruct, stacked: int) -> None:
        assert target.sharding is not None
        self.tensor_shape = target.shape[1:] if stacked else target.shape
        self._target = target
        self._missing = stacked
        self._holders: dict[Part, list[Device]] = {}
        for device, index in target.sharding.addressable_devices_indices_map(target.shape).items():
            assert index is not None
            part = tuple(one.indices(size)[:2] for one, size in zip(index, target.shape, strict=True))
            self._holders.setdefault(part, []).append(device)
        self._stacks: dict[Part, np.ndarray] = {}
        self._placed: list[jax.Array] = []

    def add(self, tensor: Any, row: int) -> None:
        """Read of a tensor, open for slicing, what is wanted; it is number ``row`` of a stack."""
        if not self._missing:
            for part in self._holders:
                value = _empty(part, self._target.dtype)
                _read(tensor, part, value)
                self._place(part, value)
            return
        for part in self._holders:
            (first, last), *rest = part
            if first <= row < last:
                if part not in self._stacks:
                    self._stacks[part] = _empty(part, self._target.dtype)
                _read(tensor, rest, self._stacks[part][row - first])
        self._missing -= 1
        if not self._missing:
            for part in self._holders:
                self._place(part, self._stacks.pop(part))

    def _place(self, part: Part, value: np.ndarray) -> None:
        # Waited for, because copies to accelerators are asynchronous, and what they read must not pile up.
        self._placed += [jax.device_put(value, device).block_until_ready() for device in self._holders[part]]

    def array(self) -> jax.Array:
        """It, when every tensor was added."""
        assert self._target.sharding is not None
        return jax.make_array_from_single_device_arrays(self._target.shape, self._target.sharding, self._placed)


def _empty(part: Part, dtype: np.dtype[Any]) -> np.ndarray:
    """Memory for a part."""
    return aligned([stop - start for start, stop in part], dtype)


def _read(tensor: Any, part: Sequence[tuple[int, int]], into: np.ndarray) -> None:
    """Read a part and cast it, some rows at a time: what is read and not cast yet takes memory too."""
    (first, last), *rest = part
    rows = max(1, _PIECE * len(into) // max(1, into.nbytes))
    for start in range(first, last, rows):
        stop = min(start + rows, last)
        into[start - first : stop - first] = tensor[(slice(start, stop), *(slice(*bounds) for bounds in rest))]
