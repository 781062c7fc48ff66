"""Read a GGUF file: weights under Hugging Face names. Its other half is :mod:`~jdserve.models.gguf_fields`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize

from jdserve.core.errors import CheckpointError
from jdserve.core.spec import DType
from jdserve.models.gguf_fields import ARCHITECTURES
from jdserve.models.source import Tensors

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3 = _INNER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_KNOWN = (*(f"Q{bits}_{kind}" for bits in (4, 5) for kind in (0, 1)), "Q8_0", *(f"Q{bits}_K" for bits in range(2, 7)))
_DTYPES: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_CHUNK = 1 << 24
"""Weights that are dequantized at a time: the float32 of a large table needs several times its memory."""


def open_gguf(file: Path) -> GGUFReader:
    """Open a GGUF file.

    Raises:
        CheckpointError: no GGUF file, a damaged one, one of another architecture, or with tensors of a type that is not
            read.
    """
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{file} is not a complete GGUF file: {error}") from None
    field = reader.get_field("general.architecture")
    architecture = None if field is None else field.contents()
    if architecture not in ARCHITECTURES:
        known = ", ".join(map(repr, ARCHITECTURES))
        raise CheckpointError(f"{file}: only GGUF files of architecture {known} are read, got {architecture!r}")
    kinds = {tensor.name: GGMLQuantizationType(tensor.tensor_type).name for tensor in reader.tensors}
    refused = sorted(f"{name} ({kind})" for name, kind in kinds.items() if kind not in (*_KNOWN, *_DTYPES))
    if refused:
        raise CheckpointError(
            f"{file}: only tensors of type {', '.join((*_KNOWN, *_DTYPES))} are read; refused: {', '.join(refused)}"
        )
    return reader


def read_tensors(reader: GGUFReader, file: Path, config: dict[str, Any]) -> Tensors:
    """The weights of a GGUF file, each dequantized when it is read.

    Quantized ones are rounded to bfloat16, which is finer than what they were quantized to.
    """
    architecture = config["architectures"][0]
    inner = _GEMMA3 if architecture == ARCHITECTURES["gemma3"] else _INNER
    found = {_hf_name(tensor.name, inner): tensor for tensor in reader.tensors if tensor.name != "rope_freqs.weight"}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    dtype = _dtype(found.values())

    def read(name: str) -> np.ndarray:
        weight = _dequantize(found[name])
        if architecture == ARCHITECTURES["llama"]:
            for projection, count in heads.items():
                if name.endswith(f"{projection}.weight"):
                    weight = unpermute(weight, count)
        if architecture == ARCHITECTURES["gemma3"] and name.endswith("norm.weight"):
            weight = weight - 1  # GGUF holds what the norm multiplies by, which is 1 + weight
        return weight.astype(dtype)

    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in found.items()}
    return Tensors(file, shapes, dtype, read)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of the rows of a query or key projection [heads * head_dim, in].

    It interleaves the two halves of each head for its own rotary convention: row 2 i + j of a head was row
    j * head_dim / 2 + i.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _dtype(tensors: Any) -> DType:
    """Of the matrices, if none is quantized."""
    kinds = {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1}
    return _DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _dequantize(tensor: ReaderTensor) -> np.ndarray:
    """Tensor in its own shape [out, in]: float32 where it is a vector or not quantized, else bfloat16."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if len(shape) < 2 or tensor.tensor_type.name in _DTYPES:
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
    weight = np.empty(shape, ml_dtypes.bfloat16)
    rows = max(1, _CHUNK // shape[-1])
    for start in range(0, shape[0], rows):
        weight[start : start + rows] = dequantize(tensor.data[start : start + rows], tensor.tensor_type)
    return weight


def _hf_name(name: str, inner: dict[str, str]) -> str:
    """Hugging Face name of a GGUF tensor; an unknown one keeps its own."""
    stem, _, suffix = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{suffix}"
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        if part in inner:
            return f"model.layers.{layer}.{inner[part]}.{suffix}"
    return name
