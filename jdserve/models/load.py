"""From the name of a model to weights on devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jdserve.core.errors import CheckpointError
from jdserve.core.spec import ModelSpec
from jdserve.models import default_model
from jdserve.models.checkpoint import LoadedModel, is_converted, open_converted, restore
from jdserve.models.convert import convert
from jdserve.models.progress import Progress, silent
from jdserve.models.skeleton import Parameter, Skeleton, skeleton

Place = Callable[[tuple[str | None, ...], tuple[int, ...]], jax.sharding.Sharding]
"""``place(logical axes, shape)``: where an array lives. An axis None is replicated."""


def resolve(model: str | Path, progress: Progress = silent) -> LoadedModel:
    """Find a model and convert it if that has not been done yet; starts no jax back end.

    Args:
        model: ``smollm2-135m-instruct`` (built in, downloaded on first use), a Hugging Face folder, a ``.gguf`` file,
            or a folder that was converted before.
        progress: told of ``download`` and ``convert``.

    Raises:
        CheckpointError: there is no such model, or it cannot be fetched or converted.
        InvalidPlan: a converted folder's configuration is not valid.
    """
    if model == default_model.NAME:
        return replace(convert(default_model.fetch(progress), progress), name=default_model.NAME)
    path = Path(model).expanduser()
    if path.is_dir():
        return open_converted(path) if is_converted(path) else convert(path, progress)
    if path.is_file() and path.suffix == ".gguf":
        return convert(path, progress)
    raise CheckpointError(
        f"no model {str(model)!r}: give {default_model.NAME!r}, a Hugging Face folder or a .gguf file"
    )


def load_params(
    model: LoadedModel,
    layers: range,
    *,
    kv_heads: int,
    dtype: DTypeLike,
    place: Place,
    progress: Progress = silent,
) -> tuple[Skeleton, tuple[jax.Array, ...]]:
    """Put the weights of some layers onto devices.

    Args:
        model: from :func:`resolve`.
        layers: of this pipeline stage.
        kv_heads: KV heads to store: those of the model, or a multiple that repeats each.
        dtype: of the weights and activations.
        place: sharding of each parameter, from its logical axes and stored shape.
        progress: told of ``load``.

    Returns:
        The module's structure and its weights; ``structure.merge(weights)`` inside a jit is the module.

    Raises:
        CheckpointError: the converted checkpoint lacks weights or is damaged.
        InvalidPlan: layers or KV heads do not fit the model.
    """
    structure = skeleton(model.spec, layers, kv_heads=kv_heads, dtype=dtype)
    wanted = {
        parameter.name: _as_stored(parameter, model.spec, kv_heads, dtype, place) for parameter in structure.parameters
    }
    arrays = restore(model.folder, wanted, progress)
    leaves = []
    for parameter in structure.parameters:
        array = arrays.pop(parameter.name)
        if array.shape != parameter.shape:
            sharding = place(parameter.axes, parameter.shape)
            array = repeat_heads(array, model.spec.kv_heads, kv_heads // model.spec.kv_heads, sharding)
        assert isinstance(array, jax.Array), f"{parameter.name} is not on a device"
        assert (array.shape, array.dtype) == (parameter.shape, jnp.dtype(dtype)), parameter.name
        leaves.append(array)
    return structure, tuple(leaves)


def repeat_heads(array: jax.Array, heads: int, times: int, sharding: jax.sharding.Sharding) -> jax.Array:
    """Repeat each of ``heads`` blocks of rows of array [heads * head_dim, ...] ``times`` times in a row."""
    return jax.jit(partial(_repeat, heads=heads, times=times), out_shardings=sharding)(array)


def _repeat(array: jax.Array, heads: int, times: int) -> jax.Array:
    blocks = array.reshape(heads, -1, *array.shape[1:])
    return jnp.repeat(blocks, times, axis=0).reshape(-1, *array.shape[1:])


def _as_stored(
    parameter: Parameter, spec: ModelSpec, kv_heads: int, dtype: DTypeLike, place: Place
) -> jax.ShapeDtypeStruct:
    """What to restore for a parameter: itself, or its KV heads before they are repeated, on every device."""
    shape, axes = parameter.shape, parameter.axes
    if kv_heads != spec.kv_heads and axes[0] == "kv_heads":
        shape = (shape[0] * spec.kv_heads // kv_heads, *shape[1:])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place((None, *axes[1:]), shape))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place(axes, shape))
