"""Write the reference answers of Gemma 3 270M with transformers on torch; shares no code with jdserve.

    python tests/oracle/make_gemma3.py gemma-3-270m-q4_k_m.gguf

Needs ``torch``, ``transformers`` and ``gguf``, and takes a few minutes. The weights are dequantized and rounded to
bfloat16, the arithmetic is float32. Of the logits after each prompt every 64th is kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

FIXTURES = Path(__file__).parents[1] / "fixtures"
TEXTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "The three primary colors are",
    "Once upon a time there was a",
    "def add(a, b):\n    return",
    "서울은 대한민국의",
    "1, 2, 3, 4, 5, 6,",
    "The opposite of hot is",
)
STEP = 64


def load(file: Path) -> Gemma3ForCausalLM:
    """The model of the GGUF file."""
    reader = gguf.GGUFReader(file)

    def field(name: str):
        return reader.get_field(f"gemma3.{name}").contents()

    layers = field("block_count")
    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        head_dim=field("attention.key_length"),
        query_pre_attn_scalar=field("attention.key_length"),
        max_position_embeddings=field("context_length"),
        sliding_window=field("attention.sliding_window"),
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, layers)
    model = Gemma3ForCausalLM(config).eval()
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        tensor = theirs.pop(names.get_name(name.removesuffix(".weight")) + ".weight")
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        # GGUF holds 1 + w of the norms.
        state[name] = (weight - 1 if "norm" in name else weight).bfloat16().float()
    assert not theirs, list(theirs)
    missing = model.load_state_dict(state, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]), missing
    assert not missing.unexpected_keys, missing
    model.tie_weights()
    return model


@torch.no_grad()
def main(file: Path) -> None:
    """Greedy continuations of all prompts, and a part of the logits after each."""
    model = load(file)
    made = file.with_suffix(".tokenizer.json")  # building it takes minutes
    if not made.is_file():
        AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).backend_tokenizer.save(str(made))
    tokenizer = Tokenizer.from_file(str(made))
    cases, logits = [], []
    for text in TEXTS:
        prompt = tokenizer.encode(text).ids
        ids, best, feed, cache = [], [], prompt, None
        for step in range(16):
            out = model(torch.tensor([feed]), past_key_values=cache, use_cache=True)
            cache, last = out.past_key_values, out.logits[0, -1]
            if step == 0:
                logits.append(last.numpy()[::STEP])
            best.append([round(value, 4) for value in torch.topk(last, 2).values.tolist()])
            feed = [int(last.argmax())]
            ids += feed
        cases.append({"prompt": text, "prompt_ids": prompt, "ids": ids, "best": best, "text": tokenizer.decode(ids)})
        print(repr(text), "->", repr(cases[-1]["text"]), flush=True)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (FIXTURES / "gemma3_greedy.json").write_text(f"[\n{lines}\n]\n")
    np.savez_compressed(FIXTURES / "gemma3_logits.npz", logits=np.stack(logits))


if __name__ == "__main__":
    print("transformers", transformers.__version__, "torch", torch.__version__)
    main(Path(sys.argv[1]))
