"""Write ``tests/fixtures/family_logits.npz`` with transformers on torch; shares no code with jdserve.

    python tests/oracle/make_family_logits.py

For each tiny checkpoint of ``tests/families.py`` the logits, in float32, after the prompts of 1, 40, 1,001 and 8,001
tokens, the last of which are 8,000 and one step with a cache: where the frequencies of rotary positions depend on the
length of the sequence, that is not the same as 8,001 at once. Needs ``torch``, ``transformers``, ``safetensors`` and
``tokenizers``, and takes a minute.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from families import CONFIGS, POSITIONS, prompt, write_family

FIXTURES = Path(__file__).parents[1] / "fixtures"


@torch.no_grad()
def logits(name: str) -> np.ndarray:
    """Logits [positions, vocab] of one family."""

    def fresh() -> Any:
        model, told = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
        )
        assert not any(told.values()), told
        return model.eval()

    tokens = torch.tensor(prompt()[None], dtype=torch.int64)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_family(Path(folder), name)
        for position in POSITIONS[:-1]:
            rows.append(fresh()(tokens[:, : position + 1]).logits[0, -1])
        model = fresh()
        cache = model(tokens[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        rows.append(model(tokens[:, -1:], past_key_values=cache, use_cache=True).logits[0, -1])
    return torch.stack(rows).numpy()


if __name__ == "__main__":
    print("transformers", transformers.__version__, "torch", torch.__version__)
    found = {}
    for name in CONFIGS:
        found[name] = logits(name)
        print(name, found[name].shape, np.abs(found[name]).max(axis=1))
    np.savez_compressed(FIXTURES / "family_logits.npz", **found)
