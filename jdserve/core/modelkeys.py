"""Keys of a Hugging Face ``config.json`` that several families share, and what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from jdserve.core.errors import InvalidPlan
from jdserve.core.rope import PositiveFloat, RopeScaling, Size, read_rope

if TYPE_CHECKING:
    from jdserve.core.spec import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"


class Keys(msgspec.Struct, kw_only=True, frozen=True):
    """Of every family."""

    num_hidden_layers: Size
    hidden_size: Size
    num_attention_heads: Size
    vocab_size: Size
    max_position_embeddings: Size
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def only(self, **wanted: object) -> None:
        """Refuse keys that do not hold the one value that is computed."""
        for key, value in wanted.items():
            if getattr(self, key) != value:
                raise InvalidPlan(f"$.{key}", f"only {value!r} is supported, got {getattr(self, key)!r}")

    def common(self) -> dict[str, Any]:
        """Fields that all families spell alike."""
        eos = self.eos_token_id
        return {
            "layers": self.num_hidden_layers,
            "hidden": self.hidden_size,
            "heads": self.num_attention_heads,
            "vocab": self.vocab_size,
            "bos": self.bos_token_id,
            "eos": () if eos is None else (eos,) if isinstance(eos, int) else eos,
        }


def common_keys(spec: ModelSpec) -> dict[str, Any]:
    """What :meth:`Keys.common` reads back."""
    return {
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "vocab_size": spec.vocab,
        "bos_token_id": spec.bos,
        "eos_token_id": list(spec.eos),
    }


class Rotary(Keys, kw_only=True, frozen=True):
    """Of the families with rotary positions."""

    intermediate_size: Size
    num_key_value_heads: Size | None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: Annotated[float, Meta(ge=1, le=1)] | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False

    def rope(self) -> tuple[float, RopeScaling | None]:
        """Base frequency and scaling, from the older flat keys or from ``rope_parameters``."""
        key = "rope_scaling" if self.rope_scaling else "rope_parameters"
        theta, scaling = read_rope(
            f"$.{key}", getattr(self, key), self.max_position_embeddings, self.original_max_position_embeddings
        )
        return theta or self.rope_theta, scaling

    def fields(self) -> dict[str, Any]:
        """See :class:`~jdserve.core.modelconfig.Reader`."""
        self.only(hidden_act="silu", attention_bias=False)
        theta, scaling = self.rope()
        return self.common() | {
            "ffn": self.intermediate_size,
            "kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_dim or self.hidden_size // self.num_attention_heads,
            "context": scaling.context(self.max_position_embeddings) if scaling else self.max_position_embeddings,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "norm_eps": self.rms_norm_eps,
            "tied_embeddings": self.tie_word_embeddings,
        }


def rotary_keys(spec: ModelSpec, model_type: str) -> dict[str, Any]:
    """What :meth:`Rotary.fields` reads back."""
    scaling = spec.rope_scaling
    stretched = scaling is not None and scaling.kind in ("linear", "dynamic")
    return common_keys(spec) | {
        "model_type": model_type,
        "intermediate_size": spec.ffn,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": scaling.original_context if scaling and stretched else spec.context,
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling.config() if scaling else None,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
    }


def window_fields(
    window: int | None, layers: int, types: tuple[str, ...] | None, full: tuple[int, ...]
) -> dict[str, Any]:
    """The window and the layers without one: those that ``layer_types`` names, or else ``full``."""
    if types is not None:
        if len(types) != layers or not set(types) <= {FULL, SLIDING}:
            raise InvalidPlan("$.layer_types", f"must hold {FULL!r} or {SLIDING!r} for each of {layers} layers")
        full = tuple(layer for layer, kind in enumerate(types) if kind == FULL)
    if len(full) == layers:
        return {}
    if window is None:
        raise InvalidPlan("$.sliding_window", f"layers of type {SLIDING!r} need a window, there is none")
    return {"window": window, "full_layers": full}


def layer_types(spec: ModelSpec) -> list[str]:
    """Which layers have a window."""
    return [FULL if spec.window_of(layer) is None else SLIDING for layer in range(spec.layers)]
