"""Matrices as int8: what rounding costs, what is stored where, and that every family computes with it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import CONFIGS, LAYERS, VOCAB, weights, write_family
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from runtime.harness import colocated, request, serve
from runtime.harness import plan_of as local_plan
from safetensors.numpy import save_file
from test_checkpoints import made, place_on
from test_llama import dense_attend

from jdserve.core.errors import CheckpointError
from jdserve.models.interface import SCALE
from jdserve.models.load import load_params, resolve
from jdserve.models.quantize import int8_of

FINITE = st.floats(-1e4, 1e4, width=32).map(lambda value: 0.0 if abs(value) < 1e-20 else value)


@given(arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 8)), elements=FINITE))
def test_rounding_is_at_most_half_a_step(weight):
    integers, scale = int8_of(weight)
    assert (integers.dtype, scale.dtype) == (np.int8, np.float32)
    assert scale.shape == weight.shape[:-1]
    assert (scale > 0).all()
    assert np.abs(integers.astype(int)).max() <= 127
    error = np.abs(integers * scale[..., None].astype(np.float64) - weight)
    assert (error <= scale[..., None] * 0.5001).all()
    largest = np.abs(weight).max(axis=-1)
    np.testing.assert_array_equal(np.abs(integers).max(axis=-1), np.where(largest > 0, 127, 0))


def rounded(name: str, weight: np.ndarray) -> np.ndarray:
    """What an int8 checkpoint stands for."""
    if weight.ndim < 2 or name.endswith(("block_sparse_moe.gate.weight", "mlp.gate.weight")):
        return weight
    integers, scale = int8_of(weight)
    return integers * scale[:, None]


OTHERS = ("opt", "opt-350m", "qwen3", "gemma3", "qwen3-moe")


def logits_of(model, tp: int, dtype: str = "float32"):
    tokens = np.arange(12) * 37 % (VOCAB - 3) + 3
    heads = model.spec.stored_kv_heads(tp)
    structure, leaves = load_params(model, range(LAYERS), kv_heads=heads, dtype=dtype, place=place_on(tp))

    @jax.jit
    def run(leaves):
        module = structure.merge(leaves)
        x, _ = module.layers(module.embed(tokens), jnp.arange(len(tokens)), dense_attend, ())
        return module.logits(x)

    return np.asarray(run(leaves)), structure, leaves


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("qwen2", 4),
        ("mixtral", 4),
        ("llama", 1),
        *(pytest.param(name, tp, marks=pytest.mark.long) for name in OTHERS for tp in (1, 4)),
    ],
)
def test_logits_are_those_of_the_rounded_weights(name, tp, tmp_path):
    """Over 4 devices the 2 KV heads, and the scales of their channels, are repeated."""
    model = made(write_family(tmp_path / "model", name), weights="int8")
    assert model.weights == "int8"
    reference = write_family(tmp_path / "reference", name)
    save_file(
        {tensor: rounded(tensor, weight) for tensor, weight in weights(CONFIGS[name]).items()},
        reference / "model.safetensors",
    )
    expected, *_ = logits_of(resolve(reference), tp)
    ours, structure, leaves = logits_of(model, tp)
    np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())
    found = {one.name: (one, leaf) for one, leaf in zip(structure.parameters, leaves, strict=True)}
    for one, leaf in found.values():
        matrix = len(one.shape) > 1 and "router" not in one.axes and not one.name.endswith(SCALE)
        assert leaf.dtype == (jnp.int8 if matrix else jnp.float32), one.name
        if matrix:
            scale, its = found[one.name + SCALE]
            assert scale.shape == one.shape[:-1]
            assert its.sharding == place_on(tp)(one.axes[:-1], one.shape[:-1])


def test_activations_keep_the_dtype_of_the_plan(tmp_path):
    model = made(write_family(tmp_path / "model", "llama"), weights="int8")
    expected, *_ = logits_of(model, 1)
    ours, structure, leaves = logits_of(model, 1, "bfloat16")
    assert np.abs(ours - expected).max() < 0.1 * np.abs(expected).max()
    module = structure.merge(leaves)
    assert module.embed(jnp.arange(4)).dtype == jnp.bfloat16
    dtypes = {one.name: leaf.dtype for one, leaf in zip(structure.parameters, leaves, strict=True)}
    assert dtypes["model.norm.weight"] == jnp.bfloat16
    assert dtypes["lm_head.weight_scale"] == jnp.float32


def test_resolving_converts_to_int8_and_keeps_both(tmp_path: Path):
    folder = write_family(tmp_path / "model", "llama")
    made(folder)
    model = made(folder, weights="int8")
    assert resolve(folder, weights="int8") == model
    assert resolve(folder).weights is None
    assert resolve(model.folder).weights == "int8"
    with pytest.raises(CheckpointError, match="converted without int8 weights"):
        resolve(made(folder).folder, weights="int8")


@pytest.mark.slow
def test_it_is_served(tmp_path: Path):
    """Over 2 devices, by step programs; the tokens are those of the rounded weights."""
    plan = local_plan(colocated(token_budget=16, max_num_seqs=1, pages=3, tp=2), longest=32)
    asked = [request(f"r{i}", (5 + i, 6, 7), max_tokens=6) for i in range(2)]
    reference = write_family(tmp_path / "reference", "llama")
    rounded_weights = {name: rounded(name, weight) for name, weight in weights(CONFIGS["llama"]).items()}
    save_file(rounded_weights, reference / "model.safetensors")
    expected = [answer.tokens for answer in serve(resolve(reference), plan, asked)]
    model = made(write_family(tmp_path / "model", "llama"), weights="int8")
    assert [answer.tokens for answer in serve(model, plan, asked)] == expected
