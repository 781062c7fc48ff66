"""Shapes of well-known models, for planning without a checkpoint.

Sizes are those of each model's ``config.json``. Biases, and what only changes numerics (norm placement, rotary
scaling), are left out: they do not matter to time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from jdserve.core.errors import InvalidPlan
from jdserve.core.spec import ModelSpec


def _opt(layers: int, hidden: int, heads: int, *, pre_norm: bool = True, embed_width: int | None = None) -> ModelSpec:
    return ModelSpec(
        "OPTForCausalLM",
        layers,
        hidden,
        4 * hidden,
        heads,
        heads,
        hidden // heads,
        vocab=50_272,
        context=2048,
        tied_embeddings=True,
        gated=False,
        learned_positions=True,
        bos=2,
        eos=(2,),
        pre_norm=pre_norm,
        embed_width=embed_width,
    )


def _model(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    context: int,
    *,
    head_dim: int = 128,
    theta: float = 10_000.0,
    tied: bool = False,
    architecture: str = "LlamaForCausalLM",
    experts: tuple[int, int] = (0, 0),
) -> ModelSpec:
    return ModelSpec(
        architecture,
        layers,
        hidden,
        ffn,
        heads,
        kv_heads,
        head_dim,
        vocab,
        context,
        rope_theta=theta,
        tied_embeddings=tied,
        experts=experts[0],
        experts_per_token=experts[1],
    )


_LLAMA3 = {"vocab": 128_256, "theta": 500_000.0}
_QWEN25 = {"vocab": 152_064, "context": 32_768, "theta": 1e6, "architecture": "Qwen2ForCausalLM"}
_QWEN3 = {"vocab": 151_936, "context": 40_960, "theta": 1e6, "architecture": "Qwen3ForCausalLM"}
_SMOLLM2 = {"vocab": 49_152, "context": 8192, "head_dim": 64, "theta": 100_000.0, "tied": True}

MODELS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "opt-125m": _opt(12, 768, 12),
        "opt-350m": _opt(24, 1024, 16, pre_norm=False, embed_width=512),
        "opt-1.3b": _opt(24, 2048, 32),
        "opt-2.7b": _opt(32, 2560, 32),
        "opt-6.7b": _opt(32, 4096, 32),
        "opt-13b": _opt(40, 5120, 40),
        "opt-30b": _opt(48, 7168, 56),
        "opt-66b": _opt(64, 9216, 72),
        "opt-175b": _opt(96, 12_288, 96),
        "llama-2-7b": _model(32, 4096, 11_008, 32, 32, 32_000, 4096),
        "llama-2-13b": _model(40, 5120, 13_824, 40, 40, 32_000, 4096),
        "llama-2-70b": _model(80, 8192, 28_672, 64, 8, 32_000, 4096),
        "llama-3-8b": _model(32, 4096, 14_336, 32, 8, context=8192, **_LLAMA3),
        "llama-3-70b": _model(80, 8192, 28_672, 64, 8, context=8192, **_LLAMA3),
        "llama-3.1-8b": _model(32, 4096, 14_336, 32, 8, context=131_072, **_LLAMA3),
        "llama-3.1-70b": _model(80, 8192, 28_672, 64, 8, context=131_072, **_LLAMA3),
        "llama-3.1-405b": _model(126, 16_384, 53_248, 128, 8, context=131_072, **_LLAMA3),
        "llama-3.2-1b": _model(16, 2048, 8192, 32, 8, context=131_072, head_dim=64, tied=True, **_LLAMA3),
        "llama-3.2-3b": _model(28, 3072, 8192, 24, 8, context=131_072, tied=True, **_LLAMA3),
        "mistral-7b": _model(32, 4096, 14_336, 32, 8, 32_000, 32_768, architecture="MistralForCausalLM"),
        "mixtral-8x7b": _model(
            32, 4096, 14_336, 32, 8, 32_000, 32_768, theta=1e6, architecture="MixtralForCausalLM", experts=(8, 2)
        ),
        "qwen2.5-7b": _model(28, 3584, 18_944, 28, 4, **_QWEN25),
        "qwen2.5-14b": _model(48, 5120, 13_824, 40, 8, **_QWEN25),
        "qwen2.5-32b": _model(64, 5120, 27_648, 40, 8, **_QWEN25),
        "qwen2.5-72b": _model(80, 8192, 29_568, 64, 8, **_QWEN25),
        "qwen3-8b": _model(36, 4096, 12_288, 32, 8, **_QWEN3),
        "qwen3-14b": _model(40, 5120, 17_408, 40, 8, **_QWEN3),
        "qwen3-32b": _model(64, 5120, 25_600, 64, 8, **_QWEN3),
        "qwen3-30b-a3b": _model(
            48, 2048, 768, 32, 4, **{**_QWEN3, "architecture": "Qwen3MoeForCausalLM"}, experts=(128, 8)
        ),
        "smollm2-135m": _model(30, 576, 1536, 9, 3, **_SMOLLM2),
        "smollm2-135m-instruct": _model(30, 576, 1536, 9, 3, **_SMOLLM2),
        "smollm2-360m": _model(32, 960, 2560, 15, 5, **_SMOLLM2),
        "smollm2-1.7b": _model(24, 2048, 8192, 32, 32, **{**_SMOLLM2, "theta": 130_000.0}),
    }
)
"""Known models by name."""


def model(name: str) -> ModelSpec:
    """The model called ``name``, or the one whose ``config.json`` lies at that path.

    Raises:
        InvalidPlan: neither; or as :meth:`ModelSpec.read`.
    """
    if name in MODELS:
        return MODELS[name]
    if Path(name).exists():
        return ModelSpec.read(name)
    raise InvalidPlan("$.model", f"{name!r} is neither a path nor a known model; known: {', '.join(MODELS)}")
