"""A tiny random LLaMA checkpoint in Hugging Face format, the same every time. Needs no jax and no torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SENTENCES = (
    "The harbour was quiet in the morning, and the fishing boats came home one after another.",
    "A gardener planted seventeen apple trees along the northern wall of the old monastery.",
    "Yesterday the library received three hundred books about astronomy, history and music.",
    "If the kettle whistles before the train departs, we shall drink our tea without hurry.",
    "Her grandmother kept a notebook with recipes for bread, soup, pickled cucumbers and plum cake.",
    "Engineers measured the bridge twice because the wind had moved their instruments during the night.",
    "def area(width: float, height: float) -> float:\n    return width * height\n",
    "for index in range(10):\n    print(index, index ** 2)\n",
    "Das Wetter bleibt bis Mittwoch freundlich, danach ziehen Wolken auf und es regnet kräftig.",
    "Le marché ouvre à sept heures et ferme lorsque les derniers clients sont partis déjeuner.",
    "La montaña tiene nieve durante todo el año, pero el valle es verde y cálido.",
    "오늘은 날씨가 맑아서 산책을 하기에 좋습니다.",
    "明日は友達と一緒に図書館で勉強する予定です。",
    "Привет, как прошёл твой день на работе?",
    "Seven quick penguins juggled frozen vegetables beside an extraordinarily bright volcano.",
    "Question: what is the capital of the country? Answer: the capital is a beautiful large city.",
    "Numbers such as 0, 1, 2, 3, 4, 5, 6, 7, 8 and 9 are written as digits; 2024 is a year.",
    "Please remember to close the window, water the flowers, and leave the key under the mat.",
    "Scientists discovered unusual bacteria living underneath kilometres of ancient Antarctic ice.",
    "The orchestra rehearsed the second movement until every violin sounded perfectly together.",
    "Whoever wrote this letter clearly understood mathematics, philosophy, politics and navigation.",
    "A painter mixes yellow and blue to obtain green, red and white to obtain pink.",
    "Between breakfast and lunch the children built a castle from cardboard, string and imagination.",
    "Merchants travelled across deserts carrying silk, pepper, cinnamon, porcelain and strange stories.",
    "The committee postponed its decision because important documents were missing from the envelope.",
    "My neighbour repairs bicycles, clocks, radios, umbrellas and occasionally broken friendships.",
    "Thunder rolled above the forest while foxes, owls and hedgehogs searched for shelter.",
    "Every Thursday the baker invents another pastry: walnut spirals, cherry triangles, lemon clouds.",
)


def tiny_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly ``vocab`` tokens, digits one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=0,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    assert tokenizer.get_vocab_size() == vocab, tokenizer.get_vocab_size()
    return tokenizer


def write_tiny_checkpoint(
    folder: Path,
    *,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 8,
    ffn: int = 128,
    vocab: int = 1100,
    context: int = 256,
    tied: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    shards: int = 2,
) -> Path:
    """Write ``config.json``, safetensors shards, ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, heads * head_dim),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (ffn, hidden),
            prefix + "mlp.up_proj.weight": (ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    _write_weights(folder, _random(shapes, seed, dtype), shards)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "torch_dtype": dtype,
    }
    texts = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": CHAT_TEMPLATE}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps(texts, indent=1))
    tiny_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    return folder


def _random(shapes: dict[str, tuple[int, ...]], seed: int, dtype: str) -> dict[str, np.ndarray]:
    if dtype == "bfloat16":
        import ml_dtypes  # noqa: F401  teaches numpy the name; the oracle's environment has no need of it
    random = np.random.RandomState(seed)  # the one generator whose stream numpy promises never to change
    return {
        name: (random.standard_normal(shape) * 0.15 + (1.0 if name.endswith("norm.weight") else 0.0)).astype(dtype)
        for name, shape in shapes.items()
    }


def _write_weights(folder: Path, weights: dict[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return
    names = list(weights)
    files = {
        name: f"model-{i * shards // len(names) + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)
    }
    for file in sorted(set(files.values())):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(weight.nbytes for weight in weights.values())}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
