"""A tiny random checkpoint of every family in Hugging Face format, the same every time. Needs no jax and no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tiny import CHAT_TEMPLATE, SPECIAL, tiny_tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, VOCAB, EXPERTS = 32, 4, 2, 16, 64, 2, 320, 4
POSITIONS = (0, 39, 1000, 8000)
"""Where logits are compared."""
WINDOW = 100

_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROTARY = _COMMON | {
    "intermediate_size": FFN,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_LLAMA = _ROTARY | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_SCALED = _LLAMA | {"rope_theta": 500_000.0}
_OPT = _COMMON | {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "ffn_dim": FFN,
    "word_embed_proj_dim": HIDDEN,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
_QWEN3 = _ROTARY | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1e6}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama3": _SCALED
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    },
    "yarn": _SCALED | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
    "linear": _SCALED | {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 2048},
    "dynamic": _SCALED | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 2048},
    "opt": _OPT,
    "opt-350m": _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 24},
    "qwen2": _ROTARY
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": _QWEN3,
    "gemma3": _ROTARY
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "mistral": _ROTARY | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW},
    "mixtral": _ROTARY
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
    },
    "qwen3-moe": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": FFN // 2,
        "num_experts": 2 * EXPERTS,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""``config.json`` of each."""


def prompt(length: int = POSITIONS[-1] + 1) -> np.ndarray:
    """The tokens that logits are compared on, int32."""
    return np.random.RandomState(7).randint(len(SPECIAL), VOCAB, length).astype(np.int32)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint, as published ones have them."""
    kind = config["model_type"]
    layer = _opt_layer() if kind == "opt" else _rotary_layer(config)
    trunk = "model.decoder." if kind == "opt" else "model."
    width = config.get("word_embed_proj_dim", HIDDEN)
    all_shapes: dict[str, tuple[int, ...]] = {f"{trunk}embed_tokens.weight": (VOCAB, width)}
    for index in range(LAYERS):
        all_shapes |= {f"{trunk}layers.{index}.{name}": shape for name, shape in layer.items()}
    if kind == "opt":
        all_shapes[f"{trunk}embed_positions.weight"] = (config["max_position_embeddings"] + 2, HIDDEN)
        if config["do_layer_norm_before"]:
            all_shapes |= {f"{trunk}final_layer_norm.{part}": (HIDDEN,) for part in ("weight", "bias")}
        if width != HIDDEN:
            all_shapes |= {f"{trunk}project_in.weight": (HIDDEN, width), f"{trunk}project_out.weight": (width, HIDDEN)}
    else:
        all_shapes["model.norm.weight"] = (HIDDEN,)
    if not config["tie_word_embeddings"]:
        all_shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return all_shapes


def _opt_layer() -> dict[str, tuple[int, ...]]:
    weights = {f"self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "out")}
    weights |= {"fc1.weight": (FFN, HIDDEN), "fc2.weight": (HIDDEN, FFN)}
    weights |= {f"{norm}.weight": (HIDDEN,) for norm in ("self_attn_layer_norm", "final_layer_norm")}
    biases = {name.replace("weight", "bias"): shape[:1] for name, shape in weights.items()}
    return weights | biases


def _rotary_layer(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    kind = config["model_type"]
    outs = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{part}_proj.weight": (out, HIDDEN) for part, out in outs.items()}
    layer |= {
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if kind == "qwen2":
        layer |= {f"self_attn.{part}_proj.bias": (out,) for part, out in outs.items()}
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        layer |= {f"self_attn.{part}_norm.weight": (HEAD_DIM,) for part in ("q", "k")}
    if kind == "gemma3_text":
        layer |= {f"{side}_feedforward_layernorm.weight": (HIDDEN,) for side in ("pre", "post")}
    if kind == "mixtral":
        return layer | _experts("block_sparse_moe", EXPERTS, FFN, ("w1", "w3", "w2"))
    if kind == "qwen3_moe":
        return layer | _experts("mlp", 2 * EXPERTS, FFN // 2, ("gate_proj", "up_proj", "down_proj"))
    return layer | {
        "mlp.gate_proj.weight": (FFN, HIDDEN),
        "mlp.up_proj.weight": (FFN, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FFN),
    }


def _experts(prefix: str, count: int, ffn: int, names: tuple[str, str, str]) -> dict[str, tuple[int, ...]]:
    gate, up, down = names
    layer: dict[str, tuple[int, ...]] = {f"{prefix}.gate.weight": (count, HIDDEN)}
    for expert in range(count):
        at = f"{prefix}.experts.{expert}"
        layer |= {f"{at}.{name}.weight": (ffn, HIDDEN) for name in (gate, up)}
        layer |= {f"{at}.{down}.weight": (HIDDEN, ffn)}
    return layer


def weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor, float32. Queries and keys are large enough that attention looks at few places, and so at which."""
    random = np.random.RandomState(0)  # the one generator whose stream numpy promises never to change

    def one(name: str, shape: tuple[int, ...]) -> np.ndarray:
        spread = 0.3 if name.endswith(("q_proj.weight", "k_proj.weight", "gate.weight")) else 0.15
        # The norms of Gemma count from one.
        centre = 0.0 if "norm.weight" not in name or config["model_type"] == "gemma3_text" else 1.0
        centre += 0.5 if "_norm.weight" in name and "self_attn." in name else 0.0
        return (random.standard_normal(shape) * spread + centre).astype(np.float32)

    return {name: one(name, shape) for name, shape in shapes(config).items()}


def write_family(folder: Path, name: str, **changes: Any) -> Path:
    """Write the checkpoint of ``CONFIGS[name]`` with ``changes`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[name] | changes
    save_file(weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    texts = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": CHAT_TEMPLATE}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps(texts, indent=1))
    tiny_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))
    return folder
