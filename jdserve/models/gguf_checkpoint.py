"""Read a GGUF file of the LLaMA architecture: weights under Hugging Face names, spec, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jdserve.core.errors import CheckpointError
from jdserve.core.spec import ModelSpec
from jdserve.models.source import Tensors, Vocabulary

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_PRE_TOKENIZERS = ("smollm", "starcoder", "refact")
"""GGUF names of the splitting that :func:`_tokenizer` builds."""

_SPECIAL = (3, 4)
"""Token types "control" and "user defined"."""


def open_gguf(file: Path) -> GGUFReader:
    """Open a GGUF file.

    Raises:
        CheckpointError: no GGUF file, a damaged one, or one of another architecture.
    """
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{file} is not a complete GGUF file: {error}") from None
    architecture = _field(reader, file, "general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{file}: only GGUF files of architecture 'llama' are read, got {architecture!r}")
    return reader


def read_spec(reader: GGUFReader, file: Path) -> ModelSpec:
    """The spec that a GGUF file describes.

    Raises:
        CheckpointError: a field is missing.
        InvalidPlan: the spec is not valid, or asks for something unsupported.
    """

    def number(name: str, default: Any = None) -> Any:
        return _field(reader, file, f"llama.{name}", default)

    names = {tensor.name for tensor in reader.tensors}
    scaling = number("rope.scaling.type", "none")
    if scaling == "none" and "rope_freqs.weight" in names:
        scaling = "llama3"  # llama.cpp stores its factors as a tensor
    heads = int(number("attention.head_count"))
    hidden = int(number("embedding_length"))
    eos, bos = (_field(reader, file, f"tokenizer.ggml.{name}_token_id", -1) for name in ("eos", "bos"))
    return ModelSpec.from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": int(number("block_count")),
            "hidden_size": hidden,
            "intermediate_size": int(number("feed_forward_length")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(number("attention.head_count_kv", heads)),
            "head_dim": int(number("attention.key_length", hidden // heads)),
            "vocab_size": len(_field(reader, file, "tokenizer.ggml.tokens")),
            "max_position_embeddings": int(number("context_length")),
            "rope_theta": _shortest(number("rope.freq_base", 10_000.0)),
            "rope_scaling": None if scaling == "none" else {"rope_type": scaling},
            "rms_norm_eps": _shortest(number("attention.layer_norm_rms_epsilon")),
            "tie_word_embeddings": "output.weight" not in names,
            "bos_token_id": None if bos < 0 else int(bos),
            "eos_token_id": None if eos < 0 else int(eos),
        }
    )


def read_tensors(reader: GGUFReader, file: Path, spec: ModelSpec) -> Tensors:
    """The weights of a GGUF file, each dequantized and rounded to bfloat16 when it is read."""
    found = {_hf_name(tensor.name): tensor for tensor in reader.tensors}

    def read(name: str) -> np.ndarray:
        weight = _dequantize(found[name])
        if name.endswith("q_proj.weight"):
            weight = unpermute(weight, spec.heads)
        elif name.endswith("k_proj.weight"):
            weight = unpermute(weight, spec.kv_heads)
        return weight.astype(ml_dtypes.bfloat16)

    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in found.items()}
    return Tensors(file, shapes, "bfloat16", read)


def read_vocabulary(reader: GGUFReader, file: Path) -> Vocabulary:
    """The tokenizer and chat template of a GGUF file.

    Raises:
        CheckpointError: the tokenizer is not a byte-level BPE that splits digits one by one.
    """
    kind = _field(reader, file, "tokenizer.ggml.model")
    split = _field(reader, file, "tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file}: tokenizer {kind!r} with pre-tokenizer {split!r} is not read; readable: 'gpt2' with"
            f" {', '.join(map(repr, _PRE_TOKENIZERS))}. Give the model as a Hugging Face folder instead"
        )
    tokens = _field(reader, file, "tokenizer.ggml.tokens")
    types = _field(reader, file, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, file, "tokenizer.ggml.merges")]
    bos, eos = (_field(reader, file, f"tokenizer.ggml.{name}_token_id", -1) for name in ("bos", "eos"))
    return Vocabulary(
        _tokenizer(tokens, merges, [token for token, type in zip(tokens, types, strict=True) if type in _SPECIAL]),
        _field(reader, file, "tokenizer.chat_template", "") or None,
        None if bos < 0 else tokens[bos],
        None if eos < 0 else tokens[eos],
    )


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of the rows of a query or key projection [heads * head_dim, in].

    It interleaves the two halves of each head for its own rotary convention: row 2 i + j of a head was row
    j * head_dim / 2 + i.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _tokenizer(tokens: list[str], merges: list[tuple[str, ...]], special: list[str]) -> str:
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))  # pyright: ignore[reportArgumentType]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    # The package writes its vocabulary in no fixed order; sorted, equal tokenizers are equal files.
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, sort_keys=True)


def _dequantize(tensor: ReaderTensor) -> np.ndarray:
    """Tensor as float32 in its own shape [out, in]."""
    weight = dequantize(tensor.data, tensor.tensor_type)
    return np.asarray(weight, np.float32).reshape(tuple(int(size) for size in reversed(tensor.shape)))


def _hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; an unknown one keeps its own."""
    stem, _, suffix = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{suffix}"
    if stem.startswith("blk."):
        _, layer, inner = stem.split(".", 2)
        if inner in _INNER:
            return f"model.layers.{layer}.{_INNER[inner]}.{suffix}"
    return name


def _field(reader: GGUFReader, file: Path, name: str, default: Any = None) -> Any:
    field = reader.get_field(name)
    if field is not None:
        return field.contents()
    if default is None:
        raise CheckpointError(f"{file} has no field {name}")
    return default


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF stores 1e-5 as 9.99999974e-06."""
    return float(str(np.float32(value)))
