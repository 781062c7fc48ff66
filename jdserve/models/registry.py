"""Which module computes an architecture. One line per architecture; loaded when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from jdserve.core.errors import InvalidPlan

_MODELS = (
    ("LlamaForCausalLM", "jdserve.models.llama:Llama"),
    ("MistralForCausalLM", "jdserve.models.llama:Llama"),
    ("MixtralForCausalLM", "jdserve.models.mixtral:Mixtral"),
    ("Qwen2ForCausalLM", "jdserve.models.qwen2:Qwen2"),
    ("Qwen3ForCausalLM", "jdserve.models.qwen3:Qwen3"),
    ("Qwen3MoeForCausalLM", "jdserve.models.qwen3_moe:Qwen3Moe"),
    ("Gemma3ForCausalLM", "jdserve.models.gemma3:Gemma3"),
    ("OPTForCausalLM", "jdserve.models.opt:Opt"),
)


def architectures() -> tuple[str, ...]:
    """Every architecture that can be served, as ``config.json`` names it."""
    return tuple(name for name, _ in _MODELS)


def model_class(architecture: str) -> type[Any]:
    """The :class:`~jdserve.models.interface.Model` class of ``architecture``.

    Raises:
        InvalidPlan: unknown; the message lists the known ones.
    """
    for name, target in _MODELS:
        if name == architecture:
            module, _, cls = target.partition(":")
            return getattr(import_module(module), cls)
    raise InvalidPlan("$.architectures", f"{architecture} is not supported; supported: {', '.join(architectures())}")
