"""transformers on torch, in a process of its own: float32, greedy, all cores.

    python bench/peers_transformers.py SmolLM2-135M-Instruct.Q4_1.gguf

Runs in any interpreter that has ``transformers``, ``torch`` and ``gguf``, without jdserve. Reads one JSON object a line
and answers each with one:

- at the start, unasked: ``{"missing": [...]}`` and the end, or ``{"versions": {...}, "threads": n}``;
- ``{"op": "generate", "prompts": [[id]], "tokens": n}``: a batch of prompts of one length. Answer: ``steps``, seconds
  from the start to each of the n tokens, the same for all prompts; ``tokens``; ``peak`` resident bytes meanwhile;
- ``{"op": "score", "prompts": [[id]], "tokens": [[id]]}``: each prompt with an answer to it, all of one length. Answer:
  ``best``, per prompt and token (likeliest id, largest logit, second logit, largest absolute logit) at its place.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import cores, peak_memory, reset_peak_memory

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

NEEDED = ("transformers", "torch", "gguf")

SCORED_AT_A_TIME = 8
"""Prompts of one forward pass of ``score``."""


def load(file: Path) -> LlamaForCausalLM:
    """The model of a LLaMA GGUF file, weights rounded to bfloat16 as jdserve stores them, in float32."""
    import gguf
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(file)

    def field(name: str) -> Any:
        value = reader.get_field(f"llama.{name}")
        assert value is not None, f"{file} has no llama.{name}"
        return value.contents()

    layers, heads, kv_heads = field("block_count"), field("attention.head_count"), field("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": float(field("rope.freq_base"))},
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config).eval()
    their_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name, parameter in model.named_parameters():
        tensor = stored[f"{their_names.get_name(name.removesuffix('.weight'))}.weight"]
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if "q_proj" in name or "k_proj" in name:
            # GGUF interleaves the two halves of each head for its rotary embedding: undo that.
            count = heads if "q_proj" in name else kv_heads
            weight = weight.reshape(count, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        parameter.data.copy_(weight.bfloat16())
    # No end-of-sequence token: every answer has the length that was asked for.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


def generate(model: LlamaForCausalLM, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Answer a batch of prompts of one length."""
    import torch

    started = time.perf_counter()
    steps: list[float] = []

    def note(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        steps.append(time.perf_counter() - started)
        return torch.zeros(len(ids), dtype=torch.bool)

    reset_peak_memory()
    ids = torch.tensor(prompts)
    started = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, stopping_criteria=[note])
    return {"steps": steps, "tokens": out[:, ids.shape[1] :].tolist(), "peak": peak_memory()}


def score(model: LlamaForCausalLM, prompts: list[list[int]], tokens: list[list[int]]) -> dict[str, Any]:
    """What the model thinks at each place of given answers."""
    import torch

    best: list[list[tuple[float, ...]]] = []
    with torch.no_grad():
        for start in range(0, len(prompts), SCORED_AT_A_TIME):
            part = slice(start, start + SCORED_AT_A_TIME)
            ids = torch.tensor([[*p, *t[:-1]] for p, t in zip(prompts[part], tokens[part], strict=True)])
            logits = model(ids, use_cache=False, logits_to_keep=len(tokens[0])).logits
            top = torch.topk(logits, 2)
            rows = torch.stack((top.indices[..., 0], *top.values.unbind(-1), logits.abs().amax(-1)), -1)
            best += rows.tolist()
    return {"best": best}


def main() -> None:
    """Serve requests from stdin until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print must not get between the answers

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        answer({"missing": missing})
        return
    import torch
    import transformers

    torch.set_num_threads(cores())
    model = load(Path(sys.argv[1]))
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    answer({"versions": versions, "threads": torch.get_num_threads()})
    operations = {"generate": generate, "score": score}
    for line in sys.stdin:
        request = json.loads(line)
        answer(operations[request.pop("op")](model, **request))


if __name__ == "__main__":
    main()
