"""How each family spells its shape in a Hugging Face ``config.json``: one class per family, one line in the table.

A class names the keys that decide what is computed, with the defaults of the family; other keys do not matter here. A
key that may hold one value only is checked against it: what is not computed is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from jdserve.core import jsonio
from jdserve.core.errors import InvalidPlan
from jdserve.core.modelkeys import FULL, SLIDING, Keys, Rotary, common_keys, layer_types, rotary_keys, window_fields
from jdserve.core.rope import PositiveFloat, RopeScaling, Size, read_rope

if TYPE_CHECKING:
    from jdserve.core.spec import ModelSpec


class Reader(Protocol):
    """The keys of one family, read from a parsed ``config.json`` by msgspec."""

    def fields(self) -> dict[str, Any]:
        """Arguments of :class:`~jdserve.core.spec.ModelSpec`, without the architecture.

        Raises:
            InvalidPlan: a key asks for something that the family here does not compute.
        """
        ...

    @staticmethod
    def config(spec: ModelSpec) -> dict[str, Any]:
        """The keys that read back to ``spec``, without the architecture."""
        ...


class _Architectures(msgspec.Struct):
    architectures: Annotated[tuple[str, ...], Meta(min_length=1)]


class Opt(Keys, kw_only=True, frozen=True):
    """OPT: learned positions, biases, LayerNorm before or after."""

    ffn_dim: Size
    word_embed_proj_dim: Size | None = None
    do_layer_norm_before: bool = True
    activation_function: str = "relu"
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    remove_final_layer_norm: bool = msgspec.field(default=False, name="_remove_final_layer_norm")
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 2

    def fields(self) -> dict[str, Any]:
        """See :class:`Reader`."""
        self.only(activation_function="relu", enable_bias=True, layer_norm_elementwise_affine=True)
        if self.remove_final_layer_norm:
            raise InvalidPlan("$._remove_final_layer_norm", "only False is supported, got True")
        width = self.word_embed_proj_dim
        return self.common() | {
            "ffn": self.ffn_dim,
            "kv_heads": self.num_attention_heads,
            "head_dim": self.hidden_size // self.num_attention_heads,
            "context": self.max_position_embeddings,
            "tied_embeddings": self.tie_word_embeddings,
            "gated": False,
            "learned_positions": True,
            "pre_norm": self.do_layer_norm_before,
            "embed_width": None if width == self.hidden_size else width,
        }

    @staticmethod
    def config(spec: ModelSpec) -> dict[str, Any]:
        """See :class:`Reader`."""
        return common_keys(spec) | {
            "model_type": "opt",
            "ffn_dim": spec.ffn,
            "max_position_embeddings": spec.context,
            "word_embed_proj_dim": spec.embed_width or spec.hidden,
            "do_layer_norm_before": spec.pre_norm,
            "tie_word_embeddings": spec.tied_embeddings,
        }


class Llama(Rotary, kw_only=True, frozen=True):
    """LLaMA 2 and 3, SmolLM2."""

    num_key_value_heads: Size | None = None
    mlp_bias: bool = False

    def fields(self) -> dict[str, Any]:
        """See :class:`Reader`."""
        self.only(mlp_bias=False)
        return super().fields()

    @staticmethod
    def config(spec: ModelSpec) -> dict[str, Any]:
        """See :class:`Reader`."""
        return rotary_keys(spec, "llama")


class Mistral(Rotary, kw_only=True, frozen=True):
    """Mistral: a window in every layer, or none."""

    sliding_window: Size | None = 4096

    def fields(self) -> dict[str, Any]:
        """See :class:`Reader`."""
        return super().fields() | {"window": self.sliding_window}

    @staticmethod
    def config(spec: ModelSpec) -> dict[str, Any]:
        """See :class:`Reader`."""
        return rotary_keys(spec, "mistral") | {"sliding_window": spec.window}


class Mixtral(Mistral, kw_only=True, frozen=True):
    """Mixtral: Mistral with experts."""

    rope_theta: PositiveFloat = 1e6
    rms_norm_eps: PositiveFloat = 1e-5
    sliding_window: Size | None = None
    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2

    def fields(self) -> dict[str, Any]:
        """See :class:`Reader`."""
        return super().fields() | {"experts": self.num_local_experts, "experts_per_token": self.num_experts_per_tok}

    @staticmethod
    def config(spec: ModelSpec) -> dict[str, Any]:
        """See :class:`Reader`."""
        return Mistral.config(spec) | {
            "model_type": "mixtral",
            "num_local_experts": spec.experts,
            "num_experts_per_tok": spec.experts_per_token,
        }


class Qwen2(Rotary, kw_only=True, frozen=True):
    """Qwen2 and 2.5: biases of queries, keys and values; a window in the upper layers where it is switched on."""

    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: Annotated[int, Meta(ge=0)] = 28
    layer_types: tuple[str, ...] | None = None

    def fields(self) -> dict[str, Any]:
        """See :class:`Reader`."""
        window = self.sliding_window if self.use_sliding_window else None
        full = range(self.num_hidden_layers if window is None else min(self.max_window_layers, self.num_hidden_layers))
        return super().fields() | window_fields(window, self.num_hidden_layers, self.layer_types, tuple(full))

    @staticmethod
    def config(spec: ModelSpec) -> dict[str, Any]:
        """See :class:`Reader`."""
        return rotary_keys(spec, "qwen2") | {
            "use_sliding_window": spec.window is not None,
            "sliding_window": spec.window,
            "layer_types": layer_types(spec),
        }


class Qwen3(Qwen2, kw_only=True, frozen=True):
    """Qwen3: a norm over each query and key head, no biases."""

    head_dim: Size | None = 128

    @staticmethod
    def config(spec: ModelSpec) -> dict[str, Any]:
        """See :class:`Reader`."""
        return Qwen2.config(spec) | {"model_type": "qwen3"}


class Qwen3Moe(Rotary, kw_only=True, frozen=True):
    """Qwen3 with experts in every layer."""

    moe_intermediate_size: Size
    num_experts: Size = 128
    num_experts_per_tok: Size = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096

    def fields(self) -> dict[str, Any]:
        """See :class:`Reader`."""
        self.only(decoder_sparse_step=1)
        if self.mlp_only_layers:
            raise InvalidPlan("$.mlp_only_layers", f"only [] is supported, got {list(self.mlp_only_layers)}")
        return super().fields() | {
            "ffn": self.moe_intermediate_size,
            "experts": self.num_experts,
            "experts_per_token": self.num_experts_per_tok,
            "normalized_routing": self.norm_topk_prob,
            "window": self.sliding_window if self.use_sliding_window else None,
        }

    @staticmethod
    def config(spec: ModelSpec) -> dict[str, Any]:
        """See :class:`Reader`."""
        return rotary_keys(spec, "qwen3_moe") | {
            "moe_intermediate_size": spec.ffn,
            "num_experts": spec.experts,
            "num_experts_per_tok": spec.experts_per_token,
            "norm_topk_prob": spec.normalized_routing,
            "use_sliding_window": spec.window is not None,
            "sliding_window": spec.window,
        }


class Gemma3(Rotary, kw_only=True, frozen=True):
    """The text model of Gemma 3: most layers have a window and unscaled rotary positions of a base of their own."""

    head_dim: Size | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    rope_theta: PositiveFloat = 1e6
    rope_local_base_freq: PositiveFloat = 10_000.0
    query_pre_attn_scalar: PositiveFloat = 256
    sliding_window: Size | None = 4096
    sliding_window_pattern: Size = 6
    layer_types: tuple[str, ...] | None = None
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False
    tie_word_embeddings: bool = True

    def rope(self) -> tuple[float, RopeScaling | None]:
        """Base frequency and scaling of the layers without a window."""
        if self.rope_parameters is None:
            return super().rope()
        path, positions = "$.rope_parameters", self.max_position_embeddings
        theta, scaling = read_rope(f"{path}.{FULL}", self._nested(FULL), positions)
        return theta or self.rope_theta, scaling

    def _nested(self, kind: str) -> dict[str, Any] | None:
        nested = self.rope_parameters or {}
        unknown = nested.keys() - {FULL, SLIDING}
        if unknown:
            raise InvalidPlan("$.rope_parameters", f"only {FULL} and {SLIDING} are read, got {', '.join(unknown)}")
        value = nested.get(kind)
        if value is not None and not isinstance(value, dict):
            raise InvalidPlan(f"$.rope_parameters.{kind}", f"must be an object, got {value!r}")
        return value  # pyright: ignore[reportUnknownVariableType]

    def _local_theta(self) -> float:
        path = f"$.rope_parameters.{SLIDING}"
        theta, scaling = read_rope(path, self._nested(SLIDING), self.max_position_embeddings)
        if scaling is not None:
            raise InvalidPlan(path, f"only 'default' is supported in layers with a window, got {scaling.kind!r}")
        return theta or self.rope_local_base_freq

    def fields(self) -> dict[str, Any]:
        """See :class:`Reader`."""
        self.only(hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=None, attn_logit_softcapping=None)
        if self.use_bidirectional_attention:
            raise InvalidPlan("$.use_bidirectional_attention", "only False is supported, got True")
        pattern = self.sliding_window_pattern
        full = tuple(range(pattern - 1, self.num_hidden_layers, pattern))
        windows = window_fields(self.sliding_window, self.num_hidden_layers, self.layer_types, full)
        _, scaling = self.rope()
        # Of this family the key is the context after linear scaling.
        scaled = scaling is not None and scaling.kind == "linear"
        return (
            super().fields()
            | windows
            | ({"context": self.max_position_embeddings} if scaled else {})
            | {"local_rope_theta": self._local_theta(), "query_scalar": self.query_pre_attn_scalar}
        )

    @staticmethod
    def config(spec: ModelSpec) -> dict[str, Any]:
        """See :class:`Reader`."""
        return rotary_keys(spec, "gemma3_text") | {
            "rope_local_base_freq": spec.local_rope_theta,
            "query_pre_attn_scalar": spec.query_scalar,
            "sliding_window": spec.window,
            "layer_types": layer_types(spec),
        }


READERS: Mapping[str, type[Reader]] = MappingProxyType(
    {
        "LlamaForCausalLM": Llama,
        "MistralForCausalLM": Mistral,
        "MixtralForCausalLM": Mixtral,
        "Qwen2ForCausalLM": Qwen2,
        "Qwen3ForCausalLM": Qwen3,
        "Qwen3MoeForCausalLM": Qwen3Moe,
        "Gemma3ForCausalLM": Gemma3,
        "OPTForCausalLM": Opt,
    }
)
"""The keys of each architecture."""


def reader(architecture: str) -> type[Reader]:
    """The keys of ``architecture``.

    Raises:
        InvalidPlan: it is unknown; the message lists the known ones.
    """
    if architecture not in READERS:
        raise InvalidPlan("$.architectures", f"{architecture} is not supported; supported: {', '.join(READERS)}")
    return READERS[architecture]


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :class:`~jdserve.core.spec.ModelSpec` from a parsed ``config.json``.

    Raises:
        InvalidPlan: the architecture is unknown, a key is missing or wrong, or asks for what is not computed.
    """
    # The architecture first: one that spells its keys in another way is refused for what it is.
    architecture = jsonio.convert(config, _Architectures).architectures[0]
    return {"architecture": architecture, **jsonio.convert(config, reader(architecture)).fields()}


def write_config(spec: ModelSpec) -> dict[str, Any]:
    """The ``config.json`` that reads back to ``spec``.

    Raises:
        InvalidPlan: the architecture is unknown.
    """
    return {"architectures": [spec.architecture], **reader(spec.architecture).config(spec)}
