"""A model from outside the package, as a user would write one: LLaMA whose logits are scaled by its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import msgspec

from jdserve.core.spec import ModelSpec
from jdserve.models.llama import Llama


class ScaledSpec(ModelSpec, frozen=True):
    logit_scale: float = 1.0


class ScaledLlama(Llama):
    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ScaledSpec:
        spec = ModelSpec.from_config({**config, "architectures": ["LlamaForCausalLM"]})
        fields = msgspec.structs.asdict(spec) | {"architecture": "ScaledLlamaForCausalLM"}
        return ScaledSpec(**fields, logit_scale=config["logit_scale"])

    def logits(self, x: jax.Array) -> jax.Array:
        return super().logits(x) * self.spec.logit_scale
