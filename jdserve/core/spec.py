"""What a model is, as numbers: read from a Hugging Face ``config.json``, used by both towers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from jdserve.core.errors import InvalidPlan
from jdserve.core.modelconfig import read_config, write_config
from jdserve.core.rope import RopeScaling

DType = Literal["float32", "bfloat16", "float16"]

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

WeightFormat = Literal["int8"]
"""How matrices may be stored other than in the plan's ``dtype``: 8-bit integers with a scale per output channel."""


def weight_bytes(dtype: DType, weights: WeightFormat | None) -> int:
    """Bytes of a weight of a matrix; scales, a hundredth of it or less, are left out."""
    return DTYPE_BYTES[dtype] if weights is None else 1


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of a decoder-only transformer.

    Attributes:
        architecture: first entry of ``architectures`` in ``config.json``; names the module in ``models/``.
        layers, hidden, ffn, heads, kv_heads, head_dim, vocab: sizes; ``hidden`` need not be heads * head_dim, and
            ``ffn`` is the width of one expert where there are experts.
        context: most positions the model is made for, rotary scaling included.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of the norms.
        tied_embeddings: the output projection is the embedding table.
        gated: the FFN has a gate and an up projection; without, one.
        learned_positions: a table of position embeddings beside that of tokens, not rotary embeddings.
        bos, eos: token ids; ``eos`` holds every id that ends a text.
        rope_scaling: how the rotary frequencies are scaled, None for not at all.
        window: tokens, the new one included, that a token attends to; None for all.
        full_layers: layers that attend to all tokens although there is a window.
        local_rope_theta: base of the unscaled rotary frequencies of the layers with a window, None where they use
            those of the others.
        query_scalar: attention scores are divided by its root; None for ``head_dim``.
        pre_norm: layers norm what they read; without, the sum of what they read and write.
        embed_width: width of the embedding table where it is not ``hidden``.
        experts: feed-forwards per layer that a router chooses from, 0 for one without a router.
        experts_per_token: of them, for each token.
        normalized_routing: the weights of the chosen experts sum to 1.
    """

    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    gated: bool = True
    learned_positions: bool = False
    bos: int | None = None
    eos: tuple[int, ...] = ()
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    query_scalar: float | None = None
    pre_norm: bool = True
    embed_width: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    normalized_routing: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "context"):
            if getattr(self, name) < 1:
                raise InvalidPlan(f"$.{name}", f"must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise InvalidPlan("$.kv_heads", f"{self.kv_heads} KV heads do not divide {self.heads} query heads")
        if not 0 <= self.experts_per_token <= self.experts or (self.experts and not self.experts_per_token):
            raise InvalidPlan(
                "$.experts_per_token", f"must be between 1 and the {self.experts} experts, got {self.experts_per_token}"
            )
        if self.head_dim % 2 and not self.learned_positions:
            raise InvalidPlan("$.head_dim", f"must be even for rotary embeddings, got {self.head_dim}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a parsed Hugging Face ``config.json``.

        Raises:
            InvalidPlan: a key is missing, or asks for something that the architecture here does not compute.
        """
        return cls(**read_config(config))

    @classmethod
    def read(cls, path: str | Path) -> ModelSpec:
        """Read the ``config.json`` at ``path`` (the file, or the folder that holds it).

        Raises:
            InvalidPlan: as :meth:`from_config`, or the file is absent or no JSON object.
        """
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        try:
            config: Any = json.loads(file.read_text())
        except OSError as error:
            raise InvalidPlan("$", f"cannot read {file}: {error.strerror}") from None
        except ValueError as error:
            raise InvalidPlan("$", f"{file} is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise InvalidPlan("$", f"{file} does not hold a JSON object")
        return cls.from_config(cast("dict[str, Any]", config))

    def config(self) -> dict[str, Any]:
        """The ``config.json`` that :meth:`from_config` reads back to this spec."""
        return write_config(self)

    def window_of(self, layer: int) -> int | None:
        """Tokens that layer ``layer`` attends to, None for all."""
        return None if layer in self.full_layers else self.window

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of one layer, those of all experts and their router included."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        expert = (3 if self.gated else 2) * self.hidden * self.ffn
        return attention + (self.experts * (expert + self.hidden) if self.experts else expert)

    @property
    def table_weights(self) -> int:
        """Weights of the embedding table, with the two projections around it where it is narrower than the layers."""
        width = self.embed_width or self.hidden
        return self.vocab * width + (2 * self.hidden * width if self.embed_width else 0)

    @property
    def parameters(self) -> int:
        """Number of weights; biases and the norms of single heads are left out."""
        head = 0 if self.tied_embeddings else self.vocab * (self.embed_width or self.hidden)
        positions = self.hidden * self.context if self.learned_positions else 0
        layer = self.layer_weights + 2 * self.hidden
        return self.layers * layer + self.hidden + self.table_weights + head + positions

    def kv_bytes_per_token(self, dtype: DType) -> int:
        """Bytes of KV of one token over all layers and KV heads, without replication."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def stored_kv_heads(self, tp: int) -> int:
        """KV heads that an instance of degree ``tp`` stores: each is repeated when there are fewer than devices."""
        return max(self.kv_heads, tp)

    def check_parallel(self, tp: int, pp: int, path: str = "$") -> None:
        """Check tensor- and pipeline-parallel degrees against this model.

        TP must divide the query heads, and either divide the KV heads or be a multiple of them (each KV head is then
        replicated); PP must divide the layers; TP must divide the FFN width, or the experts where there are some.

        Raises:
            InvalidPlan: at ``path`` + ``.tp`` or ``.pp``, with the values that would be valid.
        """
        if not self._tp_fits(tp):
            valid = [degree for degree in range(1, self.heads + 1) if self._tp_fits(degree)]
            width = f"{self.experts} experts" if self.experts else f"FFN width {self.ffn}"
            raise InvalidPlan(
                f"{path}.tp",
                f"{tp} does not fit {self.heads} query heads, {self.kv_heads} KV heads and {width};"
                f" valid: {', '.join(map(str, valid))}",
            )
        if self.layers % pp:
            valid = [degree for degree in range(1, self.layers + 1) if self.layers % degree == 0]
            raise InvalidPlan(
                f"{path}.pp", f"{pp} does not divide {self.layers} layers; valid: {', '.join(map(str, valid))}"
            )

    def check_prefix_cache(self, longest: int, path: str) -> None:
        """Check that the same tokens have the same KV in every prompt of at most ``longest`` tokens.

        Dynamic rotary scaling does not give that: what it rotates by depends on the length of the prompt.

        Raises:
            InvalidPlan: at ``path``.
        """
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "dynamic" and longest > scaling.original_context:
            raise InvalidPlan(
                path,
                "must be false: with dynamic rotary scaling the KV of a prefix depends on the length of the prompt,"
                f" and max_model_len {longest} is above {scaling.original_context}",
            )

    def _tp_fits(self, tp: int) -> bool:
        kv_fits = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        return self.heads % tp == 0 and kv_fits and (self.experts or self.ffn) % tp == 0
