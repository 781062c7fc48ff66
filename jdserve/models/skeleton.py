"""A model without its weights: the single source of tensor names, shapes and logical axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from jdserve.core.spec import ModelSpec
from jdserve.models.registry import model_class


@dataclass(frozen=True)
class Parameter:
    """One weight of a model.

    Attributes:
        name: of its tensor in a Hugging Face checkpoint.
        shape: as stored on the devices, that is with repeated KV heads.
        axes: logical name of each axis.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]


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


def skeleton(spec: ModelSpec, layers: range, *, kv_heads: int, dtype: DTypeLike) -> Skeleton:
    """Split a module of ``layers`` that stores ``kv_heads`` KV heads, without making any array.

    Raises:
        InvalidPlan: the architecture is unknown, or layers or KV heads do not fit it.
    """
    cls = model_class(spec.architecture)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: cls(spec, layers, kv_heads=kv_heads, dtype=dtype)))
    parameters = tuple(
        Parameter(
            ".".join(map(str, path)), tuple(variable.get_value().shape), tuple(variable.get_metadata()["out_sharding"])
        )
        for path, variable in nnx.to_flat_state(state)
    )
    return Skeleton(parameters, graphdef, jax.tree.structure(state))


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that a checkpoint of ``spec`` must hold.

    Raises:
        InvalidPlan: the architecture is unknown.
    """
    whole = skeleton(spec, range(spec.layers), kv_heads=spec.kv_heads, dtype="float32")
    return {parameter.name: parameter.shape for parameter in whole.parameters}
