"""Every family served disaggregated gives the tokens that it gives colocated."""

from __future__ import annotations

import families
import numpy as np
import pytest
from paged import Paged, read_leaves

from jdserve.models.load import resolve
from runtime.harness import colocated, decode, plan_of, prefill, request, serve

LONGEST = 32

CHANGES: dict[str, dict[str, object]] = {
    # Windows and scaling that take effect within so few tokens.
    "gemma3": {
        "sliding_window": 6,
        "max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    },
    "mistral": {"sliding_window": 6},
    "qwen2": {"sliding_window": 6},
    "dynamic": {"max_position_embeddings": 16},
}

FIRST = ("gemma3",)
"""A window, and rotary positions that go by the length of the prompt; the others are left out unless asked for."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.long]) for name in families.CONFIGS]
)
def test_1p1d_equals_colocated(name: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = families.write_family(tmp_path / name, name, **CHANGES.get(name, {}))
    model = resolve(folder)
    wanted = [
        request(f"g{length}", map(int, families.prompt(length)), max_tokens=LONGEST - 20, logprobs=2)
        for length in (3, 20)
    ]
    config = families.CONFIGS[name] | CHANGES.get(name, {})
    plain = Paged(
        *read_leaves(model.spec, range(families.LAYERS), families.weights(config)), model.spec, longest=LONGEST
    )
    small = {"pages": 6, "prefix_cache": False}
    together = serve(model, plan_of(colocated(token_budget=LONGEST, max_num_seqs=1, **small), longest=LONGEST), wanted)
    apart = serve(
        model,
        plan_of(prefill(lm_tokens=LONGEST, max_batch=1, **small), decode(pages=6, max_num_seqs=1), longest=LONGEST),
        wanted,
    )
    for asked, one, other in zip(wanted, together, apart, strict=True):
        assert len(one.tokens) == LONGEST - 20
        assert one.tokens == other.tokens
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(greedy(plain, asked.prompt), abs=1e-4)


def greedy(plain: Paged, prompt: tuple[int, ...]) -> list[float]:
    """Log-probabilities of the best tokens, without a runtime."""
    rows, place, found = plain.prompt(np.array(prompt, np.int32)), len(prompt), []
    for _ in range(LONGEST - 20):
        logits = plain.logits(rows[-1:])[0].astype(np.float64)
        found.append(float(logits.max() - np.log(np.exp(logits).sum())))
        rows, place = plain.step(np.array([logits.argmax()], np.int32), place), place + 1
    return found
