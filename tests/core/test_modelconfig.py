"""How each family spells its shape: what is read, the defaults, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from families import CONFIGS

from core.shapes import LLAMA3
from jdserve.core.errors import InvalidPlan
from jdserve.core.modelconfig import FULL, READERS, SLIDING
from jdserve.core.plan import ColocatedInstance, DecodeInstance, HostedStage, Plan, PrefillInstance, Worker
from jdserve.core.rope import RopeScaling
from jdserve.core.spec import ModelSpec


def spec(name: str, **changes: Any) -> ModelSpec:
    return ModelSpec.from_config(CONFIGS[name] | changes)


def refused(name: str, **changes: Any) -> InvalidPlan:
    with pytest.raises(InvalidPlan) as error:
        spec(name, **changes)
    return error.value


def test_every_family_has_a_tiny_configuration() -> None:
    assert {config["architectures"][0] for config in CONFIGS.values()} == set(READERS)


def test_opt() -> None:
    read = spec("opt-350m")
    assert (read.learned_positions, read.gated, read.tied_embeddings, read.pre_norm) == (True, False, True, False)
    assert (read.embed_width, read.ffn, read.kv_heads, read.head_dim, read.norm_eps) == (24, 64, 4, 8, 1e-5)
    assert spec("opt").pre_norm
    assert spec("opt").embed_width is None
    assert msgspec.structs.replace(read, heads=32, kv_heads=32, head_dim=1).head_dim == 1  # no rotation needs pairs


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("opt", "activation_function", "gelu"),
        ("opt", "enable_bias", False),
        ("opt", "layer_norm_elementwise_affine", False),
        ("opt", "_remove_final_layer_norm", True),
        ("qwen2", "hidden_act", "gelu"),
        ("qwen3", "attention_bias", True),
        ("qwen3-moe", "decoder_sparse_step", 2),
        ("qwen3-moe", "mlp_only_layers", [1]),
        ("gemma3", "hidden_activation", "gelu"),
        ("gemma3", "final_logit_softcapping", 30.0),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "use_bidirectional_attention", True),
        ("gemma3", "layer_types", [SLIDING]),
        ("qwen2", "layer_types", [FULL, "chunked_attention"]),
        ("mistral", "sliding_window", 0),
        ("gemma3", "sliding_window", None),
        ("mixtral", "num_local_experts", 0),
    ],
)
def test_what_a_family_does_not_compute_is_refused(name: str, key: str, value: object) -> None:
    assert refused(name, **{key: value}).path == f"$.{key}"


def test_experts() -> None:
    read = spec("mixtral")
    assert (read.experts, read.experts_per_token, read.normalized_routing, read.ffn) == (4, 2, True, 64)
    assert str(refused("mixtral", num_experts_per_tok=5)).startswith("$.experts_per_token: must be between 1 and the 4")
    read = spec("qwen3-moe")
    assert (read.experts, read.experts_per_token, read.normalized_routing, read.ffn) == (8, 3, True, 32)
    assert not spec("qwen3-moe", norm_topk_prob=False).normalized_routing
    assert read.layer_weights == 32 * 16 * 2 * 6 + 8 * (3 * 32 * 32 + 32)


def test_devices_divide_the_experts() -> None:
    read = spec("qwen3-moe", num_attention_heads=12, num_key_value_heads=12, moe_intermediate_size=24)
    read.check_parallel(4, 1)
    with pytest.raises(InvalidPlan, match=r"3 does not fit .*, 12 KV heads and 8 experts; valid: 1, 2, 4$"):
        read.check_parallel(3, 1)


def test_windows() -> None:
    def windows(read: ModelSpec) -> list[int | None]:
        return [read.window_of(layer) for layer in range(read.layers)]

    assert windows(spec("qwen2")) == [None, 100]
    assert windows(spec("qwen2", use_sliding_window=False)) == [None, None]
    assert windows(spec("qwen2", layer_types=[SLIDING, FULL])) == [100, None]
    assert windows(spec("qwen2", max_window_layers=9)) == [None, None]
    assert windows(spec("qwen3-moe", use_sliding_window=True)) == [4096, 4096]
    assert windows(spec("mixtral", sliding_window=8)) == [8, 8]
    gemma = spec("gemma3", num_hidden_layers=13, sliding_window_pattern=6)
    assert [layer for layer, window in enumerate(windows(gemma)) if window is None] == [5, 11]


def test_gemma() -> None:
    read = spec("gemma3")
    assert (read.rope_theta, read.local_rope_theta, read.query_scalar) == (1e6, 1e4, 24)
    assert read.context == 8192, "its key is the context after linear scaling"
    assert spec("gemma3", rope_scaling={"rope_type": "dynamic", "factor": 4.0}).context == 4 * 8192
    assert read.rope_scaling == RopeScaling("linear", 8.0, 8192)
    nested = {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        SLIDING: {"rope_type": "default", "rope_theta": 3e4},
    }
    read = spec("gemma3", rope_scaling=None, rope_parameters=nested)
    assert (read.rope_theta, read.local_rope_theta) == (2e6, 3e4)
    assert read.rope_scaling == RopeScaling("linear", 8.0, 8192)
    for path, changed in (
        (f"$.rope_parameters.{SLIDING}", nested | {SLIDING: {"rope_type": "linear", "factor": 2.0}}),
        (f"$.rope_parameters.{FULL}.factor", nested | {FULL: {"rope_type": "linear", "factor": 0.1}}),
        (f"$.rope_parameters.{FULL}", nested | {FULL: 3}),
        ("$.rope_parameters", nested | {"chunked_attention": {}}),
    ):
        assert refused("gemma3", rope_scaling=None, rope_parameters=changed).path == path


# CKPT-04: rotary scaling under either key.

LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("kind", "keys", "expected", "context"),
    [
        ("linear", {"factor": 4.0}, RopeScaling("linear", 4.0, 8192), 32_768),
        ("dynamic", {"factor": 2.0}, RopeScaling("dynamic", 2.0, 8192), 16_384),
        ("llama3", LLAMA31, RopeScaling("llama3", 8.0, 8192), 8192),
        (
            "yarn",
            {"factor": 4.0, "original_max_position_embeddings": 8192},
            RopeScaling("yarn", 4.0, 8192, attention_factor=0.1 * math.log(4) + 1),
            32_768,
        ),
        (
            "yarn",
            {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16, "truncate": False},
            RopeScaling(
                "yarn",
                40.0,
                8192,
                beta_fast=16,
                attention_factor=(0.1 * math.log(40) + 1) / (0.08 * math.log(40) + 1),
                truncate=False,
            ),
            327_680,
        ),
        (
            "yarn",
            {"factor": 2.0, "attention_factor": 0.9},
            RopeScaling("yarn", 2.0, 8192, attention_factor=0.9),
            16_384,
        ),
        ("default", {}, None, 8192),
    ],
)
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_rotary_scaling(
    where: str, key: str, kind: str, keys: dict[str, Any], expected: RopeScaling | None, context: int
) -> None:
    read = ModelSpec.from_config({**LLAMA3, where: {key: kind, **keys}})
    assert (read.rope_scaling, read.context, read.rope_theta) == (expected, context, 500_000.0)
    assert ModelSpec.from_config(read.config()) == read


def test_the_original_context_of_the_file_wins() -> None:
    config = {**LLAMA3, "max_position_embeddings": 131_072, "rope_scaling": {"rope_type": "llama3", **LLAMA31}}
    assert ModelSpec.from_config(config).context == 131_072
    scaling = ModelSpec.from_config({**config, "original_max_position_embeddings": 4096}).rope_scaling
    assert scaling is not None
    assert scaling.original_context == 4096


@pytest.mark.parametrize("kind", ["prefill", "colocated"])
def test_dynamic_scaling_shares_no_prefix(kind: str) -> None:
    """What a token's key is depends on the length of the prompt, beyond the original context."""

    def plan(longest: int, shared: bool) -> Plan:
        pages = {"pages": 256}
        instances: tuple[Any, ...] = (
            ColocatedInstance(name="a", token_budget=64, max_num_seqs=4, prefix_cache=shared, **pages),
        )
        if kind == "prefill":
            prefill = PrefillInstance(name="a", lm_tokens=64, prefix_cache=shared, **pages)
            instances = (prefill, DecodeInstance(name="b", max_num_seqs=4, **pages))
        stages = tuple(HostedStage(one.name, (device,)) for device, one in enumerate(instances))
        return Plan(model="m", max_model_len=longest, instances=instances, workers=(Worker("w", stages),))

    plan(2048, True).check(spec("dynamic"))
    plan(2049, False).check(spec("dynamic"))
    plan(2049, True).check(spec("linear"))
    with pytest.raises(InvalidPlan, match=r"prefix_cache: must be false.*2049 is above 2048") as error:
        plan(2049, True).check(spec("dynamic"))
    assert error.value.path == "$.instances[0].prefix_cache"
