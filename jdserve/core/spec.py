"""What a model is, as numbers: read from a Hugging Face ``config.json``, used by both towers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from jdserve.core import jsonio
from jdserve.core.errors import InvalidPlan

DType = Literal["float32", "bfloat16", "float16"]

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

Size = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]

LLAMA_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
"""Architectures whose layers are those of LLaMA."""


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of a decoder-only transformer.

    Attributes:
        architecture: first entry of ``architectures`` in ``config.json``; names the module in ``models/``.
        layers, hidden, ffn, heads, kv_heads, head_dim, vocab: sizes; ``hidden`` need not be heads * head_dim.
        context: most positions the model is trained for.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of RMSNorm.
        tied_embeddings: the output projection is the embedding table.
        gated: the FFN has a gate and an up projection; without, one.
        learned_positions: a table of position embeddings beside that of tokens, not rotary embeddings.
        bos, eos: token ids; ``eos`` holds every id that ends a text.
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

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "context"):
            if getattr(self, name) < 1:
                raise InvalidPlan(f"$.{name}", f"must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise InvalidPlan("$.kv_heads", f"{self.kv_heads} KV heads do not divide {self.heads} query heads")
        if self.head_dim % 2:
            raise InvalidPlan("$.head_dim", f"must be even for rotary embeddings, got {self.head_dim}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a parsed Hugging Face ``config.json``.

        Raises:
            InvalidPlan: a key is missing, or asks for something that the architecture here does not compute.
        """
        architecture = jsonio.convert(config, _Architectures).architectures[0]
        if architecture not in LLAMA_ARCHITECTURES:
            raise InvalidPlan(
                "$.architectures", f"{architecture} is not supported; supported: {', '.join(LLAMA_ARCHITECTURES)}"
            )
        read = jsonio.convert(config, _Config)
        for key, only in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
            if getattr(read, key) != only:
                raise InvalidPlan(f"$.{key}", f"only {only!r} is supported, got {getattr(read, key)!r}")
        eos = read.eos_token_id
        return cls(
            architecture=architecture,
            layers=read.num_hidden_layers,
            hidden=read.hidden_size,
            ffn=read.intermediate_size,
            heads=read.num_attention_heads,
            kv_heads=read.num_key_value_heads or read.num_attention_heads,
            head_dim=read.head_dim or read.hidden_size // read.num_attention_heads,
            vocab=read.vocab_size,
            # Inside its window a sliding-window model computes plain causal attention.
            context=min(read.max_position_embeddings, read.sliding_window or read.max_position_embeddings),
            rope_theta=_rope_theta(read),
            norm_eps=read.rms_norm_eps,
            tied_embeddings=read.tie_word_embeddings,
            bos=read.bos_token_id,
            eos=() if eos is None else (eos,) if isinstance(eos, int) else eos,
        )

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
        return {
            "architectures": [self.architecture],
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied_embeddings,
            "bos_token_id": self.bos,
            "eos_token_id": list(self.eos),
            "model_type": "llama",
        }

    @property
    def parameters(self) -> int:
        """Number of weights, biases left out."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + (3 if self.gated else 2) * self.hidden * self.ffn + 2 * self.hidden
        tables = self.vocab * (1 if self.tied_embeddings else 2) + (self.context if self.learned_positions else 0)
        return self.layers * layer + self.hidden + self.hidden * tables

    def kv_bytes_per_token(self, dtype: DType) -> int:
        """Bytes of KV of one token over all layers and KV heads, without replication."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def stored_kv_heads(self, tp: int) -> int:
        """KV heads that an instance of degree ``tp`` stores: each is repeated when there are fewer than devices."""
        return max(self.kv_heads, tp)

    def check_parallel(self, tp: int, pp: int, path: str = "$") -> None:
        """Check tensor- and pipeline-parallel degrees against this model.

        TP must divide the query heads, and either divide the KV heads or be a multiple of them (each KV head is then
        replicated); PP must divide the layers; TP must divide the FFN width.

        Raises:
            InvalidPlan: at ``path`` + ``.tp`` or ``.pp``, with the values that would be valid.
        """
        if not self._tp_fits(tp):
            valid = [degree for degree in range(1, self.heads + 1) if self._tp_fits(degree)]
            raise InvalidPlan(
                f"{path}.tp",
                f"{tp} does not fit {self.heads} query heads, {self.kv_heads} KV heads and FFN width {self.ffn};"
                f" valid: {', '.join(map(str, valid))}",
            )
        if self.layers % pp:
            valid = [degree for degree in range(1, self.layers + 1) if self.layers % degree == 0]
            raise InvalidPlan(
                f"{path}.pp", f"{pp} does not divide {self.layers} layers; valid: {', '.join(map(str, valid))}"
            )

    def _tp_fits(self, tp: int) -> bool:
        kv_fits = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        return self.heads % tp == 0 and kv_fits and self.ffn % tp == 0


class _Rope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveFloat | None = None


class _Architectures(msgspec.Struct):
    architectures: Annotated[tuple[str, ...], Meta(min_length=1)]


class _Config(_Architectures, kw_only=True):
    """The keys of ``config.json`` that decide what is computed; the others do not matter here."""

    num_hidden_layers: Size
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    vocab_size: Size
    max_position_embeddings: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    sliding_window: Size | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


def _rope_theta(config: _Config) -> float:
    """Base frequency, from the flat key or from ``rope_parameters`` (newer configs); scaled variants are refused."""
    for key in ("rope_scaling", "rope_parameters"):
        rope: _Rope | None = getattr(config, key)
        if rope is None:
            continue
        kind = rope.rope_type or rope.type or "default"
        if kind != "default":
            raise InvalidPlan(f"$.{key}", f"rotary scaling {kind!r} is not supported; supported: 'default'")
        if rope.rope_theta is not None:
            return rope.rope_theta
    return config.rope_theta
