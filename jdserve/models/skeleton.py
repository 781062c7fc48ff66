"""A model without its weights: the single source of tensor names, shapes and logical axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jdserve.core.spec import ModelSpec, WeightFormat
from jdserve.models.layers import store_int8
from jdserve.models.registry import model_class


@dataclass(frozen=True)
class Parameter:
    """One weight of a model.

    Attributes:
        name: of its tensor in a Hugging Face checkpoint, or of the stack of several.
        shape: as stored on the devices, that is with repeated KV heads.
        axes: logical name of each axis.
        dtype: as stored on the devices.
        parts: names of the checkpoint's tensors that are stacked on a new first axis, such as those of all experts;
            empty where the checkpoint holds the weight under ``name``.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: np.dtype[Any]
    parts: tuple[str, ...] = ()

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the checkpoint's tensors that the weight is made of."""
        return dict.fromkeys(self.parts, self.shape[1:]) if self.parts else {self.name: self.shape}

    def read(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """The weight, from ``read(name)`` of its tensors."""
        return np.stack([read(part) for part in self.parts]) if self.parts else read(self.name)


@dataclass(frozen=True)
class Skeleton:
    """Structure of a module, split from its weights once, so that a step takes a flat tuple of arrays.

    Attributes:
        parameters: of the leaves, in their order.
        graphdef: of the NNX module.
        treedef: of its state.
    """

    parameters: tuple[Parameter, ...]
    graphdef: Any
    treedef: Any

    def merge(self, leaves: Sequence[jax.Array]) -> Any:
        """The :class:`~jdserve.models.interface.Model` that computes with ``leaves``; call it inside the jit."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


def skeleton(
    spec: ModelSpec,
    layers: range,
    *,
    kv_heads: int,
    dtype: DTypeLike,
    weights: WeightFormat | None = None,
    plugin: str | None = None,
) -> Skeleton:
    """Split a module of ``layers`` that stores ``kv_heads`` KV heads, without making any array.

    Args:
        spec: of the whole model.
        layers: in the module.
        kv_heads: as stored.
        dtype: of activations, and of weights but for those in ``weights``.
        weights: how matrices are stored; None for in ``dtype``.
        plugin: ``module:Class`` of the module, None for what the architecture says.

    Raises:
        InvalidPlan: the architecture is unknown, or layers or KV heads do not fit it.
    """
    cls = model_class(spec.architecture, plugin)

    def build() -> Any:
        model = cls(spec, layers, kv_heads=kv_heads, dtype=dtype)
        if weights == "int8":
            store_int8(model)
        return model

    graphdef, state = nnx.split(nnx.eval_shape(build))
    parameters = tuple(_parameter(path, variable) for path, variable in nnx.to_flat_state(state))
    return Skeleton(parameters, graphdef, jax.tree.structure(state))


def _parameter(path: Sequence[Any], variable: Any) -> Parameter:
    *outer, _ = names = [str(name) for name in path]
    metadata = variable.get_metadata()
    return Parameter(
        ".".join(names),
        tuple(variable.get_value().shape),
        tuple(metadata["out_sharding"]),
        np.dtype(variable.get_value().dtype),
        tuple(".".join((*outer, part)) for part in metadata.get("parts", ())),
    )


def checkpoint_parameters(
    spec: ModelSpec, weights: WeightFormat | None = None, plugin: str | None = None
) -> tuple[Parameter, ...]:
    """Every weight of a whole model, as a checkpoint has it; ``weights`` and ``plugin`` as of :func:`skeleton`.

    Raises:
        InvalidPlan: the architecture is unknown.
    """
    every = range(spec.layers)
    whole = skeleton(spec, every, kv_heads=spec.kv_heads, dtype="float32", weights=weights, plugin=plugin)
    return whole.parameters
