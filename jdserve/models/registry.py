"""Which module computes an architecture: ours, one line per architecture, or one from outside the package.

A class from outside is found by the entry point group ``jdserve.models``, where an installed package names it under its
architecture, or it is named as ``module:Class`` (``--model-plugin``, ``Plan.model_plugin``), which goes before all
others. It is a :class:`~jdserve.models.interface.Plugin`. Nothing is registered at run time: every process that is
given the same plan finds the same class.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from jdserve.core.errors import InvalidPlan
from jdserve.core.spec import ModelSpec

GROUP = "jdserve.models"
"""Entry point group of models from outside the package."""

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
    """Every architecture that the package itself serves, as ``config.json`` names it."""
    return tuple(name for name, _ in _MODELS)


def model_class(architecture: str, plugin: str | None = None) -> type[Any]:
    """The :class:`~jdserve.models.interface.Model` class of ``architecture``.

    Args:
        architecture: as ``config.json`` names it.
        plugin: ``module:Class`` that takes its place, None for none.

    Raises:
        InvalidPlan: unknown (the message lists the known ones), or the plug-in cannot be loaded.
    """
    for name, target in _MODELS:
        if name == architecture and plugin is None:
            return _load(target)
    outside = _outside(architecture, plugin)
    if outside is None:
        raise _unknown(architecture)
    return outside


def read_spec(config: Mapping[str, Any], plugin: str | None = None) -> ModelSpec:
    """Read a parsed ``config.json``: by the class from outside that computes it, if there is one.

    Raises:
        InvalidPlan: it is not valid, asks for something unsupported, or the plug-in cannot be loaded.
    """
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    if plugin is None and (architecture is None or architecture in architectures()):
        return ModelSpec.from_config(config)
    outside = _outside(architecture, plugin)
    if outside is None:
        raise _unknown(str(architecture))
    if not hasattr(outside, "read_config"):
        raise InvalidPlan("$.model_plugin", f"{outside.__module__}:{outside.__name__} has no read_config(config)")
    return outside.read_config(config)


def _outside(architecture: str | None, plugin: str | None) -> type[Any] | None:
    if plugin is not None:
        return _load(plugin)
    found = entry_points(group=GROUP, name=architecture) if architecture is not None else ()
    return next((_load(point.value) for point in found), None)


def _load(target: str) -> type[Any]:
    module, _, name = target.partition(":")
    try:
        cls = getattr(import_module(module), name)
    # A module from outside may raise anything while it is imported.
    except Exception as error:
        raise InvalidPlan(
            "$.model_plugin", f"cannot load {target!r}, module:Class is wanted: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(cls, type):
        raise InvalidPlan("$.model_plugin", f"{target!r} is no class")
    return cls


def _unknown(architecture: str) -> InvalidPlan:
    known = (*architectures(), *sorted(point.name for point in entry_points(group=GROUP)))
    return InvalidPlan(
        "$.architectures",
        f"{architecture} is not supported; supported: {', '.join(known)}. --model-plugin names a class of your own",
    )
