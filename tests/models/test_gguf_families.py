"""GGUF files of every family: names, norms, rows, tokenizers, and every type of tensor."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from families import CONFIGS, weights
from gguf import GGMLQuantizationType as Kind
from test_checkpoints import place_on
from test_gguf import permuted
from test_llama import dense_attend
from tiny import tiny_tokenizer
from tokenizers import Tokenizer

from jdserve.core.errors import CheckpointError
from jdserve.core.rope import RopeScaling
from jdserve.core.spec import ModelSpec
from jdserve.models import gguf_checkpoint
from jdserve.models.convert import Conversion, convert_here
from jdserve.models.gguf_fields import read_config
from jdserve.models.gguf_vocabulary import read_vocabulary
from jdserve.models.load import load_params, resolve
from jdserve.models.packaged import GEMMA3

FIXTURES = Path(__file__).parents[1] / "fixtures"

INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LLAMA = INNER | {"post_attention_layernorm": "ffn_norm"}
GEMMA = INNER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

CHANGES = {
    "qwen2": {"use_sliding_window": False},  # llama.cpp knows no window of it
    "gemma3": {"sliding_window_pattern": 6, "query_pre_attn_scalar": CONFIGS["gemma3"]["head_dim"]},
}


def their_name(name: str, inner: dict[str, str]) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{inner[part]}.{suffix}"


def write(file: Path, name: str, kind: Kind = Kind.F32, *, tensors=None, config=None, **fields) -> Path:
    """A family's checkpoint as llama.cpp converts it, matrices in ``kind``; ``fields`` replace its metadata."""
    config = config or CONFIGS[name] | CHANGES.get(name, {})
    architecture = {"llama3": "llama"}.get(name, name)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if name == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    tokenizer = json.loads(tiny_tokenizer(config["vocab_size"]).to_str())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    writer.add_tokenizer_model(fields.get("model", "gpt2"))
    writer.add_tokenizer_pre(fields.get("pre", {"llama3": "llama-bpe"}.get(name, "qwen2")))
    writer.add_token_list(fields.get("tokens", tokens))
    writer.add_token_types(fields.get("types", [3 if id < 3 else 1 for id in range(len(tokens))]))
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    if "scores" in fields:
        writer.add_token_scores(fields["scores"])
    if "prefix" in fields:
        writer.add_add_space_prefix(fields["prefix"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for tensor, weight in (weights(config) if tensors is None else tensors).items():
        stored = weight
        if architecture == "gemma3" and "norm" in tensor:
            stored = weight + 1
        if architecture == "llama" and ("q_proj" in tensor or "k_proj" in tensor):
            stored = permuted(weight, config["num_attention_heads" if "q_proj" in tensor else "num_key_value_heads"])
        its = kind if weight.ndim > 1 else Kind.F32
        data = gguf.quantize(stored, its)
        writer.add_tensor(their_name(tensor, GEMMA if architecture == "gemma3" else LLAMA), data, raw_dtype=its)
    if name == "llama3":
        writer.add_tensor("rope_freqs.weight", fields.get("factors", llama3_factors(config)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def llama3_factors(config) -> np.ndarray:
    """As llama.cpp's converter computes them, one frequency at a time."""
    scaling, half = config["rope_scaling"], config["head_dim"] // 2
    factors = []
    for i in range(half):
        wavelength = 2 * np.pi * config["rope_theta"] ** (i / half)
        low = 8192 / scaling["low_freq_factor"]
        high = 8192 / scaling["high_freq_factor"]
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(scaling["factor"])
        else:
            smooth = (8192 / wavelength - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def opened(file: Path):
    reader = gguf_checkpoint.open_gguf(file)
    config = read_config(reader, file)
    return ModelSpec.from_config(config), gguf_checkpoint.read_tensors(reader, file, config)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_family_reads_back_as_it_was(name, tmp_path):
    config = CONFIGS[name] | CHANGES.get(name, {})
    spec, tensors = opened(write(tmp_path / "model.gguf", name))
    assert spec == ModelSpec.from_config(config)
    expected = weights(config)
    assert tensors.dtype == "float32"
    assert set(tensors.shapes) == set(expected)
    for tensor, weight in expected.items():
        np.testing.assert_allclose(tensors.read(tensor), weight, atol=1e-6)


def test_gemma3_alone_leaves_its_windows_to_its_name(tmp_path):
    config = CONFIGS["gemma3"] | {"num_hidden_layers": 13, "sliding_window_pattern": 6}
    spec, _ = opened(write(tmp_path / "a.gguf", "gemma3", tensors={}, config=config))
    assert spec.full_layers == (5, 11)
    assert (spec.local_rope_theta, spec.window, spec.query_scalar) == (10_000.0, config["sliding_window"], 16)
    large, _ = opened(write(tmp_path / "b.gguf", "gemma3", tensors={}, config=config | {"num_hidden_layers": 62}))
    assert large.query_scalar == config["hidden_size"] // config["num_attention_heads"]


def test_the_rotary_scaling_of_llama_3_is_recovered(tmp_path):
    config = CONFIGS["llama3"] | {"head_dim": 64, "rope_theta": 5e5}
    spec, tensors = opened(write(tmp_path / "a.gguf", "llama3", tensors={}, config=config))
    assert spec.rope_scaling == RopeScaling("llama3", 8.0, 8192)
    assert tensors.shapes == {}
    wrong = write(tmp_path / "b.gguf", "llama3", tensors={}, config=config, factors=np.full(32, 3.0, np.float32))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        opened(wrong)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Kind.F16, "float16"),
        (Kind.BF16, "bfloat16"),
        *((kind, "bfloat16") for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)),
    ],
)
def test_types_that_can_be_written(kind, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_checkpoint, "_CHUNK", 96)  # several reads per tensor
    _, tensors = opened(write(tmp_path / "model.gguf", "qwen3", kind))
    assert tensors.dtype == dtype
    for name, weight in weights(CONFIGS["qwen3"]).items():
        expected = gguf.dequantize(gguf.quantize(weight, kind), kind) if weight.ndim > 1 else weight
        found = tensors.read(name)
        assert found.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(found, expected.reshape(weight.shape).astype(dtype))


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_k_quants(kind, tmp_path, monkeypatch):
    """The package writes none: blocks of bytes that are finite numbers."""
    monkeypatch.setattr(gguf_checkpoint, "_CHUNK", 1024)
    rows, width = 7, 512
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (rows, width // block * size)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf_checkpoint.open_gguf(tmp_path / "model.gguf")
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 1, "num_key_value_heads": 1}
    found = gguf_checkpoint.read_tensors(reader, tmp_path, config).read("model.embed_tokens.weight")
    expected = gguf.dequantize(raw, kind)
    assert np.isfinite(expected).all()
    assert np.unique(expected).size > 10
    np.testing.assert_array_equal(found, expected.astype(ml_dtypes.bfloat16))


def test_what_is_not_read_is_refused(tmp_path):
    raw = np.zeros((2, 66), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=Kind.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"Q4_K.*refused: token_embd\.weight \(IQ2_XXS\)"):
        gguf_checkpoint.open_gguf(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="tokenizer 'bert'"):
        convert_here(Conversion(write(tmp_path / "b.gguf", "qwen3", model="bert"), "b"))


# Tokenizers.

PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    "<0x0A>",
    "<0xC3>",
    "<0xA9>",
    "▁",
    "a",
    "b",
    "c",
    "ab",
    "▁a",
    "abc",
    "bc",
    "▁ab",
    "!!",
]
SCORES = [0, 0, 0, 0, 0, 0, -50, -51, -52, -53, -4, -6, -7, -1, -5, -1000]
TYPES = [2, 3, 3, 6, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece(prefix, tmp_path):
    config = CONFIGS["llama"] | {"vocab_size": 320}
    file = write(
        tmp_path / "m.gguf", "llama", tensors={}, config=config, model="llama", tokens=PIECES, scores=SCORES,
        types=TYPES, prefix=prefix,
    )  # fmt: skip
    vocabulary = read_vocabulary(gguf_checkpoint.open_gguf(file), file)
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer)
    # The best-scored union comes first: bc (-1), then the space with a (-6) before abc (-7).
    assert tokenizer.encode("abc", add_special_tokens=False).tokens == (["▁a", "bc"] if prefix else ["abc"])
    assert tokenizer.encode("a abé\n", add_special_tokens=False).tokens[-4:] == ["▁ab", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.encode("!!ab", add_special_tokens=False).tokens[0] == "!!"
    assert tokenizer.encode("a").ids[0] == 1, "BOS, unless the file says otherwise"
    for text in ("abc", "a ab", "é\n", "ab  c"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("llama-bpe", ["it", "'s", " ", " ", "202", "4", "!"]),
        ("qwen2", ["it", "'s", " ", " ", "2", "0", "2", "4", "!"]),
        ("gpt-2", ["it", "'s", " ", " 2024", "!"]),
        ("smollm", ["it", "'s", "  ", "2", "0", "2", "4", "!"]),
    ],
)
def test_how_text_is_split(pre, expected, tmp_path):
    file = write(tmp_path / "m.gguf", "qwen3", tensors={}, pre=pre)
    vocabulary = read_vocabulary(gguf_checkpoint.open_gguf(file), file)
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer)
    assert tokenizer.pre_tokenizer is not None
    pieces = [piece.replace("Ġ", " ") for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("it's  2024!")]
    assert pieces == expected
    assert (tokenizer.encode("a").ids[0] == 1) == (pre == "llama-bpe"), "LLaMA 3 begins with BOS"


# Gemma 3 270M itself, where it was fetched: `jdserve convert gemma-3-270m`.


@pytest.fixture(scope="module")
def gemma3():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XDG_CACHE_HOME", raising=False)  # the user's own
        from jdserve.models.cache import cache_dir

        if not (cache_dir("models") / GEMMA3.file).is_file():
            pytest.skip("Gemma 3 270M was not fetched")
        return resolve(GEMMA3.name)


@pytest.mark.long
def test_gemma3_equals_transformers(gemma3):
    cases = json.loads((FIXTURES / "gemma3_greedy.json").read_text())
    logits = np.load(FIXTURES / "gemma3_logits.npz")["logits"]
    tokenizer = Tokenizer.from_file(str(gemma3.tokenizer_path))
    structure, leaves = load_params(gemma3, range(18), kv_heads=1, dtype="float32", place=place_on(1))

    @jax.jit
    def run(leaves, tokens):
        module = structure.merge(leaves)
        x, _ = module.layers(module.embed(tokens), jnp.arange(len(tokens)), dense_attend, ())
        return module.logits(x)

    for case, expected in zip(cases, logits, strict=True):
        prompt, ids = case["prompt_ids"], case["ids"]
        assert tokenizer.encode(case["prompt"]).ids == prompt
        assert tokenizer.decode(ids) == case["text"]
        given = np.zeros(40, np.int32)  # of one length for all, so that one program is compiled
        given[: len(prompt) + len(ids)] = prompt + ids
        ours = np.asarray(run(leaves, jnp.asarray(given)))[len(prompt) - 1 : len(prompt) + len(ids) - 1]
        assert np.abs(ours[0, ::64] - expected).max() < 1e-4 * np.abs(expected).max()
        assert ours.argmax(axis=-1).tolist() == ids
        np.testing.assert_allclose(np.sort(ours, axis=-1)[:, :-3:-1], case["best"], rtol=1e-3)
