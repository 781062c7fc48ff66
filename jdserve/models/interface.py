"""What the runtime asks of a model. A model knows no mesh, no phase and no kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from jdserve.core.spec import ModelSpec

SCALE = "_scale"
"""What is added to the name of a parameter that is stored as integers to name its scales."""


class Attend(Protocol):
    """The attention of one layer, with whatever stores its keys and values."""

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, kv: Any, window: int | None = None
    ) -> tuple[jax.Array, Any]:
        """Attend, causally.

        Args:
            layer: counts from the first layer of the module.
            q: [T, heads, head_dim], rotary embeddings applied; the softmax scale 1 / sqrt(head_dim) is not.
            k: [T, stored kv heads, head_dim], rotary embeddings applied.
            v: [T, stored kv heads, head_dim].
            kv: the store.
            window: tokens to attend to, the row's own included; None for all.

        Returns:
            ``out`` as q, and the store.
        """
        ...


class Model(Protocol):
    """A range of layers of a decoder-only transformer, as a Flax NNX module.

    Built as ``cls(spec, layers, kv_heads=..., dtype=...)``. Every parameter carries logical axis names, and its path in
    the module tree is the name of its tensor in a Hugging Face checkpoint.
    """

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [T] int32 to residual stream [T, hidden]; only where the layers start at 0."""
        ...

    def layers(
        self, x: jax.Array, positions: jax.Array, attend: Attend, kv: Any, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Run all layers of the range over x [T, hidden].

        Args:
            x: residual stream.
            positions: of its rows, [T] int32.
            attend: called once per layer.
            kv: goes from one ``attend`` to the next.
            lengths: [T] int32, for each row the length of sequence by which rotary positions of kind ``dynamic`` are
                scaled: that of the prompt, or position + 1 where that is more. None where the rows are one whole
                sequence.
        """
        ...

    def logits(self, x: jax.Array) -> jax.Array:
        """Rows [N, hidden] to logits [N, vocab] float32; only where the layers end with the model's last."""
        ...


class Plugin(Protocol):
    """A class from outside the package: a :class:`Model` that reads its own configuration."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """The spec of a parsed ``config.json``; a subclass of :class:`ModelSpec` may hold what that one lacks.

        Raises:
            InvalidPlan: a key is missing, or asks for something that is not computed.
        """
        ...
