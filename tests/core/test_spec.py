"""``ModelSpec``: what is read from a ``config.json``, what is refused, and the numbers that follow."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from families import CONFIGS as TINY
from hypothesis import given
from hypothesis import strategies as st

from core.shapes import LLAMA3, MISTRAL, SMOLLM2
from jdserve.core.errors import InvalidPlan
from jdserve.core.spec import ModelSpec

SPEC = ModelSpec.from_config(SMOLLM2)
CONFIGS = {"smollm2": SMOLLM2, "llama3-8b": LLAMA3, "mistral-7b": MISTRAL, **TINY}

REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)


def refused(config: dict[str, Any]) -> InvalidPlan:
    with pytest.raises(InvalidPlan) as error:
        ModelSpec.from_config(config)
    return error.value


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_smollm2() -> None:
    spec = ModelSpec.from_config(SMOLLM2)
    assert spec == ModelSpec(
        architecture="LlamaForCausalLM",
        layers=30,
        hidden=576,
        ffn=1536,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocab=49152,
        context=8192,
        rope_theta=100_000.0,
        norm_eps=1e-5,
        tied_embeddings=True,
        bos=1,
        eos=(2,),
    )
    assert SPEC.parameters == 134_515_008
    assert SPEC.kv_bytes_per_token("bfloat16") == 23_040
    assert SPEC.kv_bytes_per_token("float16") == 23_040
    assert SPEC.kv_bytes_per_token("float32") == 46_080


def test_llama3() -> None:
    spec = ModelSpec.from_config(LLAMA3)
    assert (spec.head_dim, spec.kv_heads, spec.rope_theta) == (128, 8, 500_000.0)
    assert spec.eos == (128001, 128009)
    assert not spec.tied_embeddings
    assert spec.parameters == 8_030_261_248
    assert spec.kv_bytes_per_token("bfloat16") == 131_072


def test_mistral_has_a_window_in_every_layer() -> None:
    spec = ModelSpec.from_config(MISTRAL)
    assert (spec.architecture, spec.context, spec.window) == ("MistralForCausalLM", 32768, 4096)
    assert spec.parameters == 7_241_732_096
    assert {spec.window_of(layer) for layer in range(32)} == {4096}
    assert ModelSpec.from_config({**MISTRAL, "sliding_window": None}).window is None
    assert ModelSpec.from_config(without(MISTRAL, "sliding_window")).window == 4096


def test_keys_that_may_be_absent() -> None:
    spec = ModelSpec.from_config({"architectures": ["LlamaForCausalLM"], **{key: SMOLLM2[key] for key in REQUIRED}})
    assert (spec.kv_heads, spec.head_dim, spec.rope_theta, spec.norm_eps) == (9, 64, 10_000.0, 1e-6)
    assert (spec.tied_embeddings, spec.bos, spec.eos) == (False, None, ())


def test_head_dim_need_not_divide_the_hidden_size() -> None:
    assert ModelSpec.from_config({**SMOLLM2, "head_dim": 128}).head_dim == 128


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str) -> None:
    assert key in str(refused(without(SMOLLM2, key)))


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (without(SMOLLM2, "architectures"), "architectures"),
        ({**SMOLLM2, "architectures": []}, "architectures"),
        ({**SMOLLM2, "architectures": "LlamaForCausalLM"}, "architectures"),
        # An architecture that spells its keys in another way is refused for what it is.
        ({"architectures": ["GPT2LMHeadModel"], "n_embd": 768}, "GPT2LMHeadModel is not supported"),
    ],
)
def test_other_architectures_are_refused(config: dict[str, Any], found: str) -> None:
    assert found in str(refused(config))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention_bias", True, "$.attention_bias: only False is supported, got True"),
        ("mlp_bias", True, "$.mlp_bias: only False is supported, got True"),
        ("hidden_act", "gelu", "$.hidden_act: only 'silu' is supported, got 'gelu'"),
        ("rope_scaling", {"rope_type": "longrope"}, "$.rope_scaling: rotary scaling 'longrope' is not supported"),
        (
            "rope_scaling",
            {"type": "su"},
            "$.rope_scaling: rotary scaling 'su' is not supported; supported: 'default', ",
        ),
        ("rope_parameters", {"rope_type": "mrope"}, "$.rope_parameters: rotary scaling 'mrope' is not supported"),
        ("rope_scaling", {"rope_type": "linear", "type": "yarn"}, "$.rope_scaling.type: 'yarn' contradicts"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "$.rope_scaling: Object missing required field `low_"),
        ("rope_scaling", {"type": "linear"}, "$.rope_scaling: Object missing required field `factor`"),
        ("rope_scaling", {"type": "linear", "factor": 0.5}, "$.rope_scaling.factor: Expected `float` >= 1"),
        ("rope_scaling", {"type": "linear", "factor": 2.0, "short_factor": [1]}, "$.rope_scaling: Object contains unk"),
        (
            "rope_scaling",
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "$.rope_scaling.high_freq_factor: must be above low_freq_factor 4.0",
        ),
        ("partial_rotary_factor", 0.5, "$.partial_rotary_factor: Expected `float` >= 1.0"),
        ("num_key_value_heads", 2, "$.kv_heads: 2 KV heads do not divide 9 query heads"),
        ("head_dim", 63, "$.head_dim: must be even for rotary embeddings, got 63"),
        ("hidden_size", 8, "$.head_dim: must be at least 1, got 0"),
    ],
)
def test_what_is_not_computed_is_refused(key: str, value: object, message: str) -> None:
    assert str(refused({**SMOLLM2, key: value})).startswith(message)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_attention_heads", 0, ">= 1"),
        ("num_key_value_heads", 0, ">= 1"),
        ("num_hidden_layers", -1, ">= 1"),
        ("hidden_size", "576", "`int`"),
        ("hidden_size", None, "`int`"),
        ("vocab_size", 1.5, "`int`"),
        ("tie_word_embeddings", "false", "`bool`"),
        ("rms_norm_eps", 0.0, "> 0"),
        ("rms_norm_eps", math.nan, "> 0"),
        ("rope_theta", None, "`float`"),
        ("rope_scaling", "linear", "`object"),
        ("eos_token_id", "</s>", "`int"),
        ("bos_token_id", [1], "`int"),
    ],
)
def test_a_wrong_value_is_refused_at_its_path(key: str, value: object, expected: str) -> None:
    error = refused({**SMOLLM2, key: value})
    assert error.path == f"$.{key}"
    assert expected in str(error)


@pytest.mark.parametrize(
    "parameters", [{"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 500000}], ids=["bare", "typed"]
)
def test_newer_configs_keep_the_base_frequency_in_rope_parameters(parameters: dict[str, Any]) -> None:
    assert ModelSpec.from_config({**SMOLLM2, "rope_parameters": parameters}).rope_theta == 5e5


@pytest.mark.parametrize("name", CONFIGS)
def test_config_reads_back(name: str, tmp_path: Path) -> None:
    spec = ModelSpec.from_config(CONFIGS[name])
    assert ModelSpec.from_config(spec.config()) == spec
    (tmp_path / "config.json").write_text(json.dumps(spec.config()))
    assert ModelSpec.read(tmp_path) == ModelSpec.read(tmp_path / "config.json") == spec


@pytest.mark.parametrize(("text", "message"), [(None, "cannot read"), ("{", "is not JSON"), ("[]", "JSON object")])
def test_a_file_that_holds_no_config(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidPlan, match=message):
        ModelSpec.read(tmp_path)


@pytest.mark.parametrize("field", ["layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "context"])
def test_sizes_are_at_least_one(field: str) -> None:
    with pytest.raises(InvalidPlan) as error:
        msgspec.structs.replace(SPEC, **{field: 0})
    assert str(error.value) == f"$.{field}: must be at least 1, got 0"


def test_degrees_that_do_not_divide_the_heads_are_refused_with_the_valid_ones() -> None:
    spec = msgspec.structs.replace(SPEC, heads=28, kv_heads=4, ffn=18944)
    for tp in (1, 2, 4):
        spec.check_parallel(tp, 1)
    with pytest.raises(InvalidPlan) as error:
        spec.check_parallel(8, 1, "$.instances[3]")
    assert error.value.path == "$.instances[3].tp"
    assert "8 does not fit 28 query heads, 4 KV heads and FFN width 18944" in str(error.value)
    assert str(error.value).endswith("valid: 1, 2, 4")  # 28 would do for the heads, not for this FFN


def test_degrees_of_smollm2() -> None:
    SPEC.check_parallel(3, 1)
    with pytest.raises(InvalidPlan, match=r"^\$\.tp: 2 does not fit 9 query heads, 3 KV heads.*valid: 1, 3$"):
        SPEC.check_parallel(2, 1)
    # 9 is a multiple of the KV heads and divides the query heads, but not the FFN width
    with pytest.raises(InvalidPlan, match="FFN width 1536"):
        SPEC.check_parallel(9, 1)


def test_kv_heads_are_repeated_above_their_number() -> None:
    spec = ModelSpec.from_config(LLAMA3)
    spec.check_parallel(16, 1)
    assert [spec.stored_kv_heads(tp) for tp in (1, 8, 16, 32)] == [8, 8, 16, 32]


def test_stages_divide_the_layers() -> None:
    SPEC.check_parallel(1, 15)
    with pytest.raises(InvalidPlan, match=r"^\$\.pp: 4 does not divide 30 layers; valid: 1, 2, 3, 5, 6, 10, 15, 30$"):
        SPEC.check_parallel(1, 4)


junk = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 99), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)


@given(key=st.sampled_from(sorted(SMOLLM2)), value=st.one_of(junk, st.dictionaries(st.text(max_size=3), junk)))
def test_a_config_is_read_or_refused(key: str, value: object) -> None:
    try:
        spec = ModelSpec.from_config({**SMOLLM2, key: value})
    except InvalidPlan:
        return
    assert ModelSpec.from_config(spec.config()) == spec
