"""The metadata of a GGUF file, and the ``config.json`` that it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor

from jdserve.core.errors import CheckpointError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""Names of the architectures that are read, in GGUF and in ``config.json``."""

_LLAMA_3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all LLaMA 3 models have in common, of which a GGUF file holds the outcome only."""


class Fields:
    """Values of one section of the metadata: ``fields("name")`` is ``section.name``."""

    def __init__(self, reader: GGUFReader, file: Path, section: str) -> None:
        self._reader = reader
        self._section = section
        self.file = file

    def __call__(self, name: str, default: Any = None) -> Any:
        """A value.

        Raises:
            CheckpointError: it is missing, and there is no default.
        """
        field = self._reader.get_field(f"{self._section}.{name}")
        if field is not None:
            return field.contents()
        if default is None:
            raise CheckpointError(f"{self.file} has no field {self._section}.{name}")
        return default


def read_config(reader: GGUFReader, file: Path) -> dict[str, Any]:
    """The ``config.json`` that a GGUF file stands for.

    Raises:
        CheckpointError: a field is missing, or says something that is not read.
    """
    kind = Fields(reader, file, "general")("architecture")
    fields = Fields(reader, file, kind)
    text = Fields(reader, file, "tokenizer.ggml")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "expert_count" in {name.removeprefix(f"{kind}.") for name in reader.fields} and fields("expert_count"):
        raise CheckpointError(f"{file}: mixtures of experts are not read from GGUF; give a Hugging Face folder instead")
    heads, hidden = int(fields("attention.head_count")), int(fields("embedding_length"))
    eos, bos = (text(f"{name}_token_id", -1) for name in ("eos", "bos"))
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "num_hidden_layers": int(fields("block_count")),
        "hidden_size": hidden,
        "intermediate_size": int(fields("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields("attention.head_count_kv", heads)),
        "head_dim": int(fields("attention.key_length", hidden // heads)),
        "vocab_size": len(text("tokens")),
        "max_position_embeddings": int(fields("context_length")),
        "rope_theta": _shortest(fields("rope.freq_base", 10_000.0)),
        "rope_scaling": _rope_scaling(fields, tensors.get("rope_freqs.weight")),
        "rms_norm_eps": _shortest(fields("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": None if bos < 0 else int(bos),
        "eos_token_id": None if eos < 0 else int(eos),
    }
    return config | _gemma3(fields, config) if kind == "gemma3" else config


def _gemma3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """What GGUF leaves to the architecture's name."""
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    # Of all sizes only that of 62 layers scales queries by another number than the head dimension.
    scale = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else head_dim
    return {
        "query_pre_attn_scalar": scale,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": int(fields("attention.sliding_window")),
        "layer_types": ["sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(layers)],
        "rope_local_base_freq": 10_000.0,
    }


def _rope_scaling(fields: Fields, factors: ReaderTensor | None) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(fields, np.asarray(factors.data, np.float32).reshape(-1))
    kind = fields("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _shortest(fields("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = int(fields("rope.scaling.original_context_length"))
    return scaling


def _llama3_scaling(fields: Fields, factors: np.ndarray) -> dict[str, Any]:
    """The scaling whose divisors of the frequencies are ``factors``: low frequencies are divided by the factor, high
    ones by 1."""
    scaling = {"rope_type": "llama3", "factor": _shortest(factors.max()), **_LLAMA_3_ROPE}
    theta, original = fields("rope.freq_base", 10_000.0), scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * theta ** (-np.arange(len(factors)) / len(factors)) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise CheckpointError(f"{fields.file}: rope_freqs.weight holds no scaling of LLaMA 3, and no other is read")
    return scaling


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF stores 1e-5 as 9.99999974e-06."""
    return float(str(np.float32(value)))
