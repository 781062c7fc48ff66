"""Every family against transformers' logits: far into a long prompt, over devices, and cut into stages."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import CONFIGS, EXPERTS, LAYERS, POSITIONS, prompt, shapes, weights, write_family
from paged import Paged, read_leaves
from test_llama import dense_attend

from jdserve.core.spec import ModelSpec
from jdserve.models.load import load_params, resolve
from jdserve.models.moe import ROWS, SparseFeedForward
from jdserve.models.registry import architectures
from jdserve.models.rotary import frequencies, rotary_tables
from jdserve.models.skeleton import checkpoint_parameters
from jdserve.sharding.rules import ShardingRules, instance_mesh

TOLERANCE = 1e-4
"""Of the largest logit."""
SCALED = ("llama3", "yarn", "linear", "dynamic")
FAMILIES = [name for name in CONFIGS if name not in SCALED]


@pytest.fixture(scope="module")
def oracle():
    return np.load(Path(__file__).parents[1] / "fixtures" / "family_logits.npz")


def near(logits, expected):
    error = np.abs(logits - expected).max(axis=-1) / np.abs(expected).max(axis=-1)
    assert (error < TOLERANCE).all(), error


def test_every_architecture_is_here():
    assert {config["architectures"][0] for config in CONFIGS.values()} == set(architectures())


def further(names, left_out):
    """Parameters, of which some are left out unless they are asked for."""
    return [pytest.param(*name, marks=[pytest.mark.long] if name in left_out else []) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", further([(name,) for name in CONFIGS], [("llama",)]))
def test_logits_at_0_1k_and_8k_equal_transformers(name, oracle):
    """CKPT-04: in chunks over a paged prefix, and the last position as a decoding step."""
    spec = ModelSpec.from_config(CONFIGS[name])
    paged = Paged(*read_leaves(spec, range(LAYERS), weights(CONFIGS[name])), spec, chunk=256, longest=len(prompt()))
    tokens = prompt()
    if name == "dynamic":  # the length of a prompt decides about all of its rows
        rows = [paged.prompt(tokens[: position + 1])[-1] for position in POSITIONS[:-1]]
        paged.prompt(tokens[:-1])
    else:
        rows = list(paged.prompt(tokens[:-1])[list(POSITIONS[:-1])])
    rows.append(paged.step(tokens[-1:], POSITIONS[-1])[0])
    near(paged.logits(np.stack(rows)), oracle[name])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """``written(name)`` is the checkpoint of a family, written once."""
    done = {}

    def get(name):
        if name not in done:
            done[name] = resolve(write_family(tmp_path_factory.mktemp(name) / name, name))
        return done[name]

    return get


def staged_logits(model, stages, tp, tokens):
    """Logits of the last of ``tokens`` through stages of layers, each on ``tp`` devices; and all weights."""
    place = partial(ShardingRules().sharding, instance_mesh(jax.devices()[:tp]))
    heads = model.spec.stored_kv_heads(tp)
    x, weights = tokens, {}
    for layers in stages:
        structure, leaves = load_params(model, layers, kv_heads=heads, dtype="float32", place=place)
        weights |= {one.name: leaf for one, leaf in zip(structure.parameters, leaves, strict=True)}

        @jax.jit
        def run(leaves, x, structure=structure, layers=layers):
            module = structure.merge(leaves)
            x = module.embed(x) if layers.start == 0 else x
            x, _ = module.layers(x, jnp.arange(len(tokens)), dense_attend, ())
            return module.logits(x[-1:]) if layers.stop == LAYERS else x

        x = np.asarray(run(leaves, x))
    return x, weights


LAYOUTS = [(name, tp, tp != 2) for name in FAMILIES for tp in (1, 2, 4)]
"""Family, devices per stage, and whether there is a stage per layer."""
FIRST = [(name, 4, True) for name in ("opt", "qwen2", "gemma3", "mixtral")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp", "cut"), further(LAYOUTS, [layout for layout in LAYOUTS if layout not in FIRST]))
def test_devices_and_stages_change_nothing(name, tp, cut, written, oracle):
    """Over 4 devices the 2 KV heads, and their biases, are repeated."""
    stages = [range(layer, layer + 1) for layer in range(LAYERS)] if cut else [range(LAYERS)]
    logits, weights = staged_logits(written(name), stages, tp, prompt(POSITIONS[1] + 1))
    near(logits, oracle[name][1:2])
    for weight, leaf in weights.items():
        parts = {shard.data.shape for shard in leaf.addressable_shards}
        if ".experts." in weight:
            assert parts == {(leaf.shape[0] // tp, *leaf.shape[1:])}, "each device holds whole experts of its own"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_holds_what_the_family_asks_for(name):
    spec = ModelSpec.from_config(CONFIGS[name])
    wanted = [tensor for one in checkpoint_parameters(spec) for tensor in one.tensors.items()]
    assert dict(wanted) == shapes(CONFIGS[name])
    assert len(wanted) == len(dict(wanted)), "no tensor is part of two weights"


def test_experts_are_stacked_in_their_order():
    spec, tensors = ModelSpec.from_config(CONFIGS["mixtral"]), weights(CONFIGS["mixtral"])
    stack = next(
        one for one in checkpoint_parameters(spec) if one.name.endswith("layers.1.block_sparse_moe.experts.w2")
    )
    assert stack.shape == (EXPERTS, 32, 64)
    assert stack.axes == ("experts", "embed", "expert_mlp")
    for expert, tensor in enumerate(stack.read(tensors.__getitem__)):
        assert tensor is not None
        np.testing.assert_array_equal(tensor, tensors[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"])


@pytest.mark.parametrize("normalized", [True, False])
def test_experts_against_a_loop(normalized):
    """More rows than are computed at a time, not a multiple of them; token by token, the chosen experts only."""
    config = CONFIGS["qwen3-moe"] | {"norm_topk_prob": normalized}
    spec, random = ModelSpec.from_config(config), np.random.default_rng(0)
    layer = SparseFeedForward(spec, "float32", ("gate_proj", "up_proj", "down_proj"))
    leaves = [layer.gate.weight, *(getattr(layer.experts, name) for name in layer.experts.names)]
    for leaf in leaves:
        leaf.set_value(jnp.asarray(random.normal(size=leaf.shape) * 0.3, jnp.float32))
    router, gate, up, down = (np.asarray(leaf[...], np.float64) for leaf in leaves)
    x = random.normal(size=(ROWS + 3, spec.hidden)).astype(np.float32)
    got = np.asarray(layer(jnp.asarray(x)))
    for row, out in zip(x.astype(np.float64), got, strict=True):
        scores = np.exp(router @ row) / np.exp(router @ row).sum()
        chosen = np.argsort(scores)[-spec.experts_per_token :]
        total = scores[chosen].sum() if normalized else 1.0
        expected = np.zeros(spec.hidden)
        for expert in chosen:
            inner = gate[expert] @ row
            inner = inner / (1 + np.exp(-inner)) * (up[expert] @ row)
            expected += scores[expert] / total * (down[expert] @ inner)
        np.testing.assert_allclose(out, expected, atol=1e-4)


# Rotary scaling.


def test_dynamic_scaling_begins_beyond_the_original_context():
    scaling = ModelSpec.from_config(CONFIGS["dynamic"]).rope_scaling
    place = jnp.array([7, 7, 7], jnp.int32)
    lengths = jnp.array([8, scaling.original_context, scaling.original_context + 1], jnp.int32)
    cos, sin = (np.asarray(part) for part in rotary_tables(place, lengths, 16, 5e5, scaling))
    plain = [np.asarray(part) for part in rotary_tables(place, lengths, 16, 5e5)]
    for got, expected in zip((cos, sin), plain, strict=True):
        np.testing.assert_array_equal(got[:2], expected[:2])
        assert np.abs(got[2] - expected[2]).max() > 1e-6


@pytest.mark.parametrize("length", [2049, 5000, 8192])
def test_dynamic_scaling_raises_the_base(length):
    """The formula as it is written, in float64."""
    scaling = ModelSpec.from_config(CONFIGS["dynamic"]).rope_scaling
    base = 5e5 * (4.0 * length / 2048 - 3.0) ** (16 / 14)
    angles = 8000 * base ** (-np.arange(0, 16, 2) / 16)
    cos, sin = rotary_tables(jnp.array([8000]), jnp.array([length]), 16, 5e5, scaling)
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=2e-3)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=2e-3)


def test_frequencies_are_those_of_float32_code():
    """Bit for bit: 1 / (theta ** (2 i / d)), rounded after each operation."""
    exponents = np.arange(0, 64, 2, dtype=np.float32) / np.float32(64)
    powers = np.array([np.float32(5e5 ** float(exponent)) for exponent in exponents])
    np.testing.assert_array_equal(frequencies(64, 5e5), np.float32(1) / powers)
    assert frequencies(64, 5e5).dtype == np.float32


@pytest.mark.parametrize("name", further([("gemma3",), ("opt-350m",), ("qwen3-moe",)], [("opt-350m",), ("qwen3-moe",)]))
def test_bfloat16_stays_near_float32(name, oracle):
    """The families whose arithmetic differs most, in the dtype that they are served in."""
    spec, tokens = ModelSpec.from_config(CONFIGS[name]), prompt(POSITIONS[1] + 1)
    structure, leaves = read_leaves(spec, range(LAYERS), weights(CONFIGS[name]))

    @jax.jit
    def logits(leaves):
        module = structure.merge(leaves)
        x, _ = module.layers(module.embed(jnp.asarray(tokens)), jnp.arange(len(tokens)), dense_attend, ())
        assert x.dtype == jnp.bfloat16
        return module.logits(x[-1:])

    got = np.asarray(logits(tuple(leaf.astype(jnp.bfloat16) for leaf in leaves)))
    assert got.dtype == np.float32
    assert np.abs(got - oracle[name][1:2]).max() < 0.1 * np.abs(oracle[name][1]).max()
