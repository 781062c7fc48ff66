"""Write the reference answers in ``tests/fixtures`` with transformers on torch; shares no code with jdserve.

    python tests/oracle/make_fixtures.py SmolLM2-135M-Instruct.Q4_1.gguf GPL-3

The first file is the built-in model, the second a long English text for the prompt of 1,000 tokens. Needs ``torch``,
``transformers``, ``gguf``, ``safetensors`` and ``tokenizers``, and takes a few minutes. All arithmetic is float32; the
weights of the built-in model are dequantized and rounded to bfloat16 first.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import write_tiny_checkpoint

FIXTURES = Path(__file__).parents[1] / "fixtures"

TEXTS = (
    "The",
    "The capital of France is",
    "Once upon a time",
    "Water boils at",
    "def fibonacci(n):",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "fn main() {\n    let numbers = vec![1, 2, 3];\n",
    "서울은",
    "La capital de España es",
    "Die Donau fließt durch",
    "東京は日本の",
    "Москва - это",
    "🎉🎂 Happy birthday to",
    "I love 🍕 and",
    "12 + 30 =",
    "Dear Sir or Madam,\n\nI am writing to",
    "To be, or not to be:",
    "1. Apples\n2. Bananas\n3.",
)
CHATS = ("What is the capital of France?", "Write one sentence about the sea.", "¿Cómo estás?")
LOGITS_OF = (0, 1, 8, 13)
"""Prompts whose last logits are kept whole."""


@torch.no_grad()
def tiny_logits() -> None:
    """Logits at all 40 positions of a fixed prompt through the tiny checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM.from_pretrained(
            write_tiny_checkpoint(Path(folder)), dtype=torch.float32, attn_implementation="eager"
        )
    tokens = np.arange(40) * 37 % 1097 + 3
    logits = model(torch.tensor(tokens)[None]).logits[0].numpy()
    greedy = torch.tensor(tokens)[None]
    for _ in range(24):
        greedy = torch.cat((greedy, model(greedy).logits[:, -1].argmax(-1, keepdim=True)), 1)
    ids = greedy[0, 40:].numpy()
    print("tiny greedy:", ids.tolist(), "largest", np.abs(logits).max())
    np.savez_compressed(FIXTURES / "tiny_logits.npz", tokens=tokens.astype(np.int32), logits=logits, greedy=ids)


def load_gguf(file: Path) -> LlamaForCausalLM:
    """The model of a GGUF file, weights rounded to bfloat16, computing in float32."""
    reader = gguf.GGUFReader(file)

    def field(name: str) -> Any:
        return reader.get_field(f"llama.{name}").contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": float(field("rope.freq_base"))},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    model = LlamaForCausalLM(config).eval()
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        tensor = theirs[names.get_name(name.removesuffix(".weight")) + ".weight"]
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                half = weight.shape[0] // count // 2
                rows = [h * 2 * half + 2 * i + j for h in range(count) for j in (0, 1) for i in range(half)]
                weight = weight[rows]
        state[name] = weight.bfloat16().float()
    missing = model.load_state_dict(state, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]), missing
    assert not missing.unexpected_keys, missing
    model.tie_weights()
    return model


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompt: list[int], steps: int, eos: int) -> tuple[dict[str, Any], np.ndarray]:
    """Greedy ids with the two best logits of each step, and the logits after the prompt."""
    ids, best, cache, feed, first = [], [], None, prompt, None
    while len(ids) < steps and eos not in ids:
        out = model(torch.tensor([feed]), past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[0, -1]
        first = logits.numpy() if first is None else first
        top = torch.topk(logits, 2).values.tolist()
        best.append([round(value, 5) for value in top] + [round(float(logits.abs().max()), 4)])
        feed = [int(logits.argmax())]
        ids += feed
    assert first is not None
    return {"prompt_ids": prompt, "ids": ids, "best": best}, first


def smollm2(file: Path, text: Path) -> None:
    """Greedy continuations of all prompts and whole logits of a few."""
    model = load_gguf(file)
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    prompts: list[dict[str, Any]] = [{"prompt": prompt} for prompt in TEXTS]
    prompts += [{"chat": chat} for chat in CHATS]
    cases, logits = [], {}
    for case in prompts:
        if "chat" in case:
            messages = [{"role": "user", "content": case["chat"]}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(ids, add_special_tokens=False).input_ids
        else:
            ids = tokenizer(case["prompt"], add_special_tokens=False).input_ids
        answer, first = greedy(model, ids, 24, 2)
        if len(cases) in LOGITS_OF:
            logits[str(len(cases))] = first
        cases.append(case | answer | {"text": tokenizer.decode(answer["ids"])})
    long = tokenizer(text.read_text(), add_special_tokens=False).input_ids[:1000]
    answer, first = greedy(model, long, 24, 2)
    logits[str(len(cases))] = first
    cases.append(answer | {"text": tokenizer.decode(answer["ids"])})
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (FIXTURES / "smollm2_greedy.json").write_text(f"[\n{lines}\n]\n")
    np.savez_compressed(FIXTURES / "smollm2_logits.npz", **logits)


if __name__ == "__main__":
    print("transformers", transformers.__version__, "torch", torch.__version__)
    tiny_logits()
    if len(sys.argv) > 1:
        smollm2(Path(sys.argv[1]), Path(sys.argv[2]))
