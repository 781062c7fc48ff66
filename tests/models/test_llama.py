"""The model against transformers' logits, whole and cut into pipeline stages."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import write_tiny_checkpoint

from jdserve.core.errors import InvalidPlan
from jdserve.core.spec import ModelSpec
from jdserve.models.hf_checkpoint import read_tensors
from jdserve.models.registry import architectures, model_class
from jdserve.models.skeleton import checkpoint_parameters, skeleton

FIXTURES = Path(__file__).parents[1] / "fixtures"


def dense_attend(layer, q, k, v, kv, window=None):
    """Plain causal attention; kv collects the keys and values by layer."""
    repeat = q.shape[1] // k.shape[1]
    wide_k, wide_v = jnp.repeat(k, repeat, axis=1), jnp.repeat(v, repeat, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, wide_k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
    rows = q.shape[0]
    mask = jnp.tril(jnp.ones((rows, rows), bool))[None, :, :]
    if window is not None:
        mask &= ~jnp.tril(jnp.ones((rows, rows), bool), -window)[None, :, :]
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("hqk,khd->qhd", weights, wide_v.astype(jnp.float32)).astype(q.dtype)
    return out, (*kv, (layer, k, v))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny")
    return ModelSpec.read(folder), read_tensors(folder)


def stage(checkpoint, layers, dtype="float32", repeat=1):
    """Skeleton and leaves of some layers, read straight from the files."""
    spec, tensors = checkpoint
    structure = skeleton(spec, layers, kv_heads=spec.kv_heads * repeat, dtype=dtype)
    leaves = []
    for parameter in structure.parameters:
        weight = tensors.read(parameter.name)
        if parameter.axes[0] == "kv_heads" and repeat > 1:
            heads = weight.reshape(spec.kv_heads, spec.head_dim, -1)
            weight = np.repeat(heads, repeat, axis=0).reshape(parameter.shape)
        leaves.append(jnp.asarray(weight, dtype))
    return structure, tuple(leaves)


def whole_logits(checkpoint, tokens, **options):
    structure, leaves = stage(checkpoint, range(checkpoint[0].layers), **options)

    @jax.jit
    def run(leaves, tokens):
        model = structure.merge(leaves)
        x, _ = model.layers(model.embed(tokens), jnp.arange(len(tokens)), dense_attend, ())
        return model.logits(x)

    return np.asarray(run(leaves, tokens))


@pytest.fixture(scope="module")
def oracle():
    return np.load(FIXTURES / "tiny_logits.npz")


def test_logits_equal_transformers(checkpoint, oracle):
    logits = whole_logits(checkpoint, jnp.asarray(oracle["tokens"]))
    assert logits.dtype == np.float32
    assert np.abs(logits - oracle["logits"]).max() < 1e-4 * np.abs(oracle["logits"]).max()


def test_bfloat16_stays_near_float32(checkpoint, oracle):
    logits = whole_logits(checkpoint, jnp.asarray(oracle["tokens"]), dtype="bfloat16")
    assert np.abs(logits - oracle["logits"]).max() < 0.1 * np.abs(oracle["logits"]).max()


def test_repeated_kv_heads_change_nothing(checkpoint, oracle):
    logits = whole_logits(checkpoint, jnp.asarray(oracle["tokens"]), repeat=2)
    np.testing.assert_allclose(logits, oracle["logits"], atol=1e-4 * np.abs(oracle["logits"]).max())


def test_stages_compose_to_the_whole(checkpoint, oracle):
    tokens = jnp.asarray(oracle["tokens"])
    positions = jnp.arange(len(tokens))
    (first, head), (second, tail) = stage(checkpoint, range(2)), stage(checkpoint, range(2, 4))
    model = first.merge(head)
    x, kv = model.layers(model.embed(tokens), positions, dense_attend, ())
    assert [layer for layer, *_ in kv] == [0, 1]
    assert kv[0][1].shape == (40, 4, 8)
    model = second.merge(tail)
    x, kv = model.layers(x, positions, dense_attend, ())
    assert [layer for layer, *_ in kv] == [0, 1], "layers count from the first of the stage"
    logits = np.asarray(model.logits(x[-1:]))
    np.testing.assert_allclose(logits, oracle["logits"][-1:], atol=1e-4 * np.abs(oracle["logits"]).max())


def test_only_relative_positions_matter(checkpoint):
    structure, leaves = stage(checkpoint, range(4))
    model = structure.merge(leaves)
    x = model.embed(jnp.arange(10, 20))
    near, _ = model.layers(x, jnp.arange(10), dense_attend, ())
    far, _ = model.layers(x, jnp.arange(100, 110), dense_attend, ())
    np.testing.assert_allclose(near, far, atol=1e-4)
    stretched, _ = model.layers(x, jnp.arange(0, 20, 2), dense_attend, ())
    assert np.abs(np.asarray(near - stretched)).max() > 1e-2


def names(spec, layers):
    return {parameter.name for parameter in skeleton(spec, layers, kv_heads=spec.kv_heads, dtype="float32").parameters}


def test_stages_hold_what_they_need(checkpoint):
    spec, tensors = checkpoint
    assert {one.name: one.shape for one in checkpoint_parameters(spec)} == tensors.shapes
    first, middle, last = names(spec, range(1)), names(spec, range(1, 3)), names(spec, range(3, 4))
    assert first | middle | last == set(tensors.shapes)
    outer = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert first & outer == {"model.embed_tokens.weight"}
    assert not middle & outer
    assert last & outer == {"model.norm.weight", "lm_head.weight"}


def test_a_tied_last_stage_has_its_own_table(tmp_path):
    spec = ModelSpec.read(write_tiny_checkpoint(tmp_path, tied=True))
    last = names(spec, range(3, 4))
    assert "model.embed_tokens.weight" in last
    assert "lm_head.weight" not in last
    assert "model.embed_tokens.weight" not in names(spec, range(1, 3))


def test_every_parameter_has_logical_axes(checkpoint):
    spec, _ = checkpoint
    known = {"vocab", "embed", "heads", "kv_heads", "mlp"}
    for parameter in skeleton(spec, range(4), kv_heads=8, dtype="bfloat16").parameters:
        assert len(parameter.axes) == len(parameter.shape)
        assert set(parameter.axes) <= known
        if "k_proj" in parameter.name:
            assert (parameter.shape, parameter.axes) == ((64, 64), ("kv_heads", "embed"))


def test_leaves_are_in_the_order_of_the_parameters(checkpoint):
    structure, leaves = stage(checkpoint, range(4))
    state = nnx.to_flat_state(nnx.state(structure.merge(leaves)))
    for (path, variable), parameter, leaf in zip(state, structure.parameters, leaves, strict=True):
        assert ".".join(path) == parameter.name
        assert variable.get_value() is leaf


@pytest.mark.parametrize("layers", [range(2, 2), range(5), range(0, 4, 2)])
def test_bad_layers_are_refused(checkpoint, layers):
    with pytest.raises(InvalidPlan, match="layers"):
        skeleton(checkpoint[0], layers, kv_heads=4, dtype="float32")


@pytest.mark.parametrize("kv_heads", [0, 2, 6, 16])
def test_bad_kv_heads_are_refused(checkpoint, kv_heads):
    with pytest.raises(InvalidPlan, match="KV heads"):
        skeleton(checkpoint[0], range(4), kv_heads=kv_heads, dtype="float32")


def test_unknown_architecture_lists_the_known():
    with pytest.raises(InvalidPlan, match=r"GPT2LMHeadModel.*LlamaForCausalLM, .*OPTForCausalLM"):
        model_class("GPT2LMHeadModel")
    for name in architectures():
        assert issubclass(model_class(name), nnx.Module)
